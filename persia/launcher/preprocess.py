"""`persia-launcher preprocess`: raw Criteo logs to a data set that training reads."""

from __future__ import annotations

import contextlib
import glob
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from persia.launcher.options import COUNT, option

if TYPE_CHECKING:
    from persia.data.preprocessing import Engine


@click.command("preprocess")
@click.argument("train", nargs=-1, required=True, metavar="FILE...")
@option("--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="A new directory.")
@option("--test", multiple=True, metavar="FILE", help="File or pattern of the test set; repeat for several.")
@option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "split-binary"]),
    default="split-binary",
    help="Parquet files, or a file of numbers for each column in NVIDIA's format.",
)
@option(
    "--engine",
    type=click.Choice(["local", "spark", "ray"]),
    default="local",
    help="local: processes of this machine. spark and ray: a cluster, at --address.",
)
@option("--workers", type=COUNT, help="Processes of the local engine; default: one a core.")
@option("--address", help="Of a cluster, spark://HOST:PORT or, of Ray, HOST:PORT; default: this machine.")
@option("--partitions", type=COUNT, default=1024, help="Tasks, about; the output is the same for any number.")
@option(
    "--frequency-limit",
    type=click.IntRange(min=0),
    default=0,
    help="Rarer values share ID 1; above 1 the training files are read twice.",
)
@option(
    "--contiguous",
    is_flag=True,
    help="IDs 0, 1, ... for NVIDIA's tools instead of 64-bit hashes; reads twice.",
)
@option("--log-offset", type=float, default=3.0, help="Numbers become ln(max(x + offset, 1)).")
@option("--num-numerical", type=click.IntRange(min=0), default=13, help="Integer fields after the label.")
@option("--num-categorical", type=COUNT, default=26, help="Categorical fields after them.")
@option("--block-mib", type=click.FloatRange(min=0.001), default=32.0, help="Text of a block, MiB.")
@option("--max-bad-records", type=click.IntRange(min=0), default=100, help="To skip before an error.")
@option("--allow-gaps", is_flag=True, help="Accept files numbered with gaps, as day_4 and day_6.")
def command(train: tuple[str, ...], test: tuple[str, ...], **flags: Any) -> None:
    """Transform raw Criteo logs for training: each FILE is a day, plain, .gz or .zst.

    \b
      persia-launcher preprocess --output criteo/ --test raw/day_2.gz raw/day_0.gz raw/day_1.gz

    \b
    A line is a label, integers and categories, separated by tabs. Missing integers count as 0, missing
    categories get ID 0. The output does not depend on the engine or the number of partitions.
    Interrupted, the same command resumes.
    """
    from persia.data.preprocessing import Preprocessing, preprocess

    settings = Preprocessing(
        str(flags["output"]),
        flags["kind"],
        flags["num_numerical"],
        flags["num_categorical"],
        flags["frequency_limit"],
        flags["contiguous"],
        flags["log_offset"],
        int(flags["block_mib"] * (1 << 20)),
        flags["max_bad_records"],
    )
    inputs = {"train": _found(train)} | ({"test": _found(test)} if test else {})
    engine = _engine(flags["engine"], flags["workers"], flags["address"])
    with _progress() as progress:
        result = preprocess(
            settings,
            inputs,
            engine,
            partitions=flags["partitions"],
            allow_gaps=flags["allow_gaps"],
            progress=progress,
        )
    for mapping, num_rows in result.num_rows.items():
        click.echo(f"{mapping}: {num_rows} rows in {settings.output}")
    if result.num_bad:
        click.secho(f"skipped {result.num_bad} bad records, the first ones:", fg="yellow", err=True)
        click.echo("\n".join(result.bad), err=True)


def _found(patterns: tuple[str, ...]) -> list[str]:
    # Without a match the pattern itself, which is then reported as missing.
    return [name for pattern in patterns for name in glob.glob(pattern) or [pattern]]


def _engine(name: str, workers: int | None, address: str | None) -> Engine:
    from persia.data.engines import LocalEngine, RayEngine, SparkEngine

    if name == "local":
        return LocalEngine(workers)
    return SparkEngine(address) if name == "spark" else RayEngine(address)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    # A log has no use for a bar that is drawn again and again.
    if not sys.stderr.isatty():
        yield lambda title, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as shown:
        bars: dict[str, TaskID] = {}

        def update(title: str, done: int, total: int) -> None:
            if title not in bars:
                bars[title] = shown.add_task(title)
            shown.update(bars[title], completed=done, total=total)

        yield update
