"""`persia-launcher evaluate`: accuracy and latency of a served model."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from persia.launcher import options
from persia.launcher.options import COUNT, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from persia.data import Batches
    from persia.serving.evaluation import PredictionClient


_common = options.all_of(
    option("--address", default="127.0.0.1:8001", metavar="HOST:PORT", help="gRPC port of the server."),
    options.model_name,
    option("--mapping", default="test", help="Mapping of the feature spec."),
    option("--model-version", default="", help="Number or label of a version: stable, canary."),
    option("--timeout", type=click.FloatRange(min=0.001), default=60.0, help="Seconds for a request."),
    option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
)


@click.group("evaluate", cls=options.Group)
def command() -> None:
    """Measure a model that `persia-launcher serve` serves, on a data set or on logged requests.

    \b
      persia-launcher evaluate accuracy /data/criteo
      persia-launcher evaluate latency /data/criteo --batch-sizes 256,1024 --concurrency 2
      persia-launcher evaluate latency requests.bin --model-version canary
    """


@command.command("accuracy")
@click.argument("dataset")
@_common
@option("--batch-size", type=COUNT, default=1024, help="At most the server's --max-batch-size.")
@option("--max-steps", type=COUNT, help="Batches; default: all.")
@option("--probabilities", is_flag=True, help="The model returns probabilities instead of logits.")
def accuracy(
    dataset: str,
    address: str,
    model_name: str,
    model_version: str,
    mapping: str,
    timeout: float,
    as_json: bool,
    batch_size: int,
    max_steps: int | None,
    probabilities: bool,
) -> None:
    """AUC, log loss and calibration of predictions for DATASET, a folder with a feature_spec.yaml."""
    from persia.data import open_batches
    from persia.serving import evaluation

    batches = open_batches(dataset, mapping, batch_size=batch_size)
    with evaluation.PredictionClient(address, model_name, version=model_version, timeout_s=timeout) as client:
        quality = evaluation.accuracy(client, batches, max_steps=max_steps, from_logits=not probabilities)
    _show([quality.values()], as_json)


@command.command("latency")
@click.argument("dataset")
@_common
@option("--batch-sizes", default="256,512,1024", metavar="N,...", help="At most --max-batch-size of serve.")
@option("--concurrency", type=COUNT, default=1, help="Requests under way at a time.")
@option("--requests", type=COUNT, default=200, help="Measured requests of each batch size.")
def latency(
    dataset: str,
    address: str,
    model_name: str,
    model_version: str,
    mapping: str,
    timeout: float,
    as_json: bool,
    batch_sizes: str,
    concurrency: int,
    requests: int,
) -> None:
    """Latency and throughput for samples of DATASET, by batch size. It has a feature_spec.yaml.

    DATASET may also be a file that --request-log of a server has written: its requests are sent as they are.
    """
    from persia.data import open_batches
    from persia.serving.evaluation import PredictionClient

    if (log := Path(dataset)).is_file():
        with PredictionClient(address, model_name, version=model_version, timeout_s=timeout) as client:
            return _show([_replayed(client, log, concurrency)], as_json)
    sizes = [int(size) if size.isdecimal() else 0 for size in batch_sizes.split(",")]
    if min(sizes) < 1:
        raise click.BadParameter(
            f"{batch_sizes!r} is no list of whole numbers from 1, like 256,1024", param_hint="--batch-sizes"
        )
    data = {size: open_batches(dataset, mapping, batch_size=size) for size in sizes}
    for size, batches in data.items():
        if batches.num_rows < size:
            raise click.UsageError(
                f"{mapping!r} has {batches.num_rows} rows, fewer than a batch of {size}: lower --batch-sizes"
            )
    with PredictionClient(address, model_name, version=model_version, timeout_s=timeout) as client:
        _show([_row(client, data[size], size, concurrency, requests) for size in sizes], as_json)


def _replayed(client: PredictionClient, log: Path, concurrency: int) -> dict[str, float]:
    from persia.embedding.data import PersiaBatch, split_batches
    from persia.serving import evaluation

    sent = split_batches(log.read_bytes())
    if not sent:
        raise click.UsageError(f"{log} has no requests yet")
    size = sum(PersiaBatch.from_bytes(batch).batch_size for batch in sent) / len(sent)
    found = evaluation.latency(client, sent, size, concurrency=concurrency)
    return {"batch_size": size, "concurrency": concurrency, **asdict(found)}


def _row(
    client: PredictionClient, batches: Batches, size: int, concurrency: int, requests: int
) -> dict[str, float]:
    from persia.serving import evaluation

    read = itertools.islice(batches.read(), requests)
    batches_made = (batches.make(rows, requires_grad=False) for rows in read)
    made = [batch.to_bytes() for batch in batches_made if batch.batch_size == size]  # the last may be shorter
    sent = list(itertools.islice(itertools.cycle(made), requests))
    found = evaluation.latency(client, sent, size, concurrency=concurrency)
    return {"batch_size": size, "concurrency": concurrency, **asdict(found)}


def _show(rows: Sequence[dict[str, float]], as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(
            *(f"{value:,}" if isinstance(value, int) else f"{value:,.5g}" for value in row.values())
        )
    Console(width=120, highlight=False).print(table)
