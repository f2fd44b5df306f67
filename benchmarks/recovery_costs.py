"""What it costs a job to be able to survive: `python -m benchmarks.recovery_costs --turns 3`.

A job of separate processes (a loader, a rank, NATS, an embedding worker and two parameter servers) trains
with one thing after the other, in turns:

    nothing      the rank has no ID features, so a worker's death would lose its batches
    exactly-once the default: batches carry their ID features to the rank
    checkpoints  and the rank takes a consistent checkpoint every 100 steps
    standbys     exactly-once, and each parameter server has a standby

Prints batches a second, and the processor time of a batch by role. `--step-ms 20` lets the rank sleep in each
step, as it would wait for a GPU: cores are then spare, as they are where servers have hosts of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import click
import numpy as np
import torch

from benchmarks.role_costs import process_seconds
from persia import (
    DataCtx,
    DataLoader,
    EmbeddingConfig,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
    StreamingDataset,
    TrainCtx,
    optim,
)
from persia.ctx import Recovery
from persia.messaging.payloads import SubmittedBatch
from persia.pipeline import send
from persia.testing import LocalCluster
from persia.waiting import Attempts

SLOTS, DIM, WARM_UP, EVERY_STEPS = 26, 16, 20, 100
CONFIG = {"slots_config": {f"C{{1..{SLOTS}}}": {"dim": DIM}}}
_WARM, _COPIED = "it is warm", "has every row and change"
_SERVER, _DEADLINE_S = "embedding-parameter-server", 900.0
VARIANTS = ("nothing", "exactly-once", "checkpoints", "standbys")
ROLES = {
    "data-loader": "loader",
    "nn-worker": "rank",
    "nats": "NATS",
    "embedding-worker": "worker",
    _SERVER: "servers",
}


def load(num_batches: int, size: int, variant: str) -> None:
    """The data loader. For "nothing" it is as before the rank had the ID features."""
    submitted = SubmittedBatch
    if variant == "nothing":
        send.__dict__["SubmittedBatch"] = lambda **fields: submitted(**fields | {"id_features": b""})
    random = np.random.default_rng(0)
    ids = random.integers(100_000, size=(8, SLOTS, size)).astype(np.uint64)
    dense, label = np.zeros((size, 13), np.float32), np.zeros((size, 1), np.float32)
    with DataCtx() as ctx:
        for number in range(num_batches):
            columns = ids[number % len(ids)]
            features = [IDTypeFeatureWithSingleID(f"C{i + 1}", columns[i]) for i in range(SLOTS)]
            ctx.send_data(
                PersiaBatch(features, [NonIDTypeFeature(dense)], [Label(label)], requires_grad=True)
            )


def train(num_batches: int, step_s: float, folder: str) -> None:
    """The rank; with a `folder` it takes checkpoints."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(DIM, 1)

        def forward(self, _dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            output: torch.Tensor = self.layer(torch.stack(embeddings).sum(0))
            return output

    model = Model()
    sgd, config = torch.optim.SGD(model.parameters(), lr=0.01), EmbeddingConfig()
    recovery = Recovery(folder, every_steps=EVERY_STEPS, keep_last=2) if folder else None
    with TrainCtx(
        optim.Adagrad(lr=0.01), sgd, model=model, embedding_config=config, recovery=recovery
    ) as ctx:
        for batch in DataLoader(StreamingDataset(), embedding_staleness=8):
            output, labels = ctx.forward(batch)
            assert labels is not None
            ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
            time.sleep(step_s)
            if ctx.step == WARM_UP:
                begin = time.monotonic()
                print(_WARM, flush=True)
        ctx.wait_for_gradients()
        print(f"{(num_batches - WARM_UP) / (time.monotonic() - begin)} batches/s", flush=True)


def turn(num_batches: int, size: int, step_s: float, variant: str) -> dict[str, float]:
    """Batches a second, and seconds of processor time a batch by role."""
    servers = {"embedding_parameter_server_config": {"standbys": int(variant == "standbys")}}
    with (
        tempfile.TemporaryDirectory(prefix="persia-costs-") as folder,
        LocalCluster(
            embedding_config=CONFIG,
            global_config=servers,
            parameter_servers=2,
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as cluster,
    ):
        if variant == "standbys":
            _await(lambda: all(_COPIED in _output(cluster, f"{_SERVER}-{index}") for index in range(2)))
        checkpoints = f"{folder}/checkpoints" if variant == "checkpoints" else ""
        rank = cluster.start_nn_worker(__file__, "train", str(num_batches), str(step_s), checkpoints)
        loader = cluster.start_loader(__file__, "load", str(num_batches), str(size), variant)
        _await(lambda: _WARM in rank.output or rank.exit_code is not None)
        before = used = processor_s(cluster)
        # The processor time of a process can be read until it has ended.
        for _ in Attempts(_DEADLINE_S, pause_s=0.1, waiting_for=lambda: f"the end of the job: {rank.output}"):
            used = used | {role: max(used[role], now) for role, now in processor_s(cluster).items()}
            if rank.exit_code is not None and loader.exit_code is not None:
                break
        for process in (rank, loader):
            if process.exit_code:
                raise RuntimeError(process.output)
        found = {role: (used[role] - before[role]) / (num_batches - WARM_UP) for role in used}
        speed = re.search(r"^(\S+) batches/s$", rank.output, re.MULTILINE)
        assert speed is not None, rank.output
        return found | {"batches/s": float(speed[1])}


def _await(condition: Callable[[], bool]) -> None:
    next(attempt for attempt in Attempts(_DEADLINE_S, waiting_for=lambda: "the job's start") if condition())


def _output(cluster: LocalCluster, name: str) -> str:
    return next(process.output for process in cluster.processes if process.name == name)


def processor_s(cluster: LocalCluster) -> dict[str, float]:
    """Of the processes of each role that run, standbys among the servers."""
    used: dict[str, float] = {}
    for process in cluster.processes:
        role = next(role for name, role in ROLES.items() if process.name.startswith(name))
        with contextlib.suppress(OSError):  # has ended
            used[role] = used.get(role, 0) + process_seconds(process.pid)
    return used


@click.command(help=__doc__)
@click.option("--turns", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--batches", type=click.IntRange(min=WARM_UP + 1), default=500, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--step-ms", type=click.FloatRange(min=0), default=0, help="Sleep of the rank in each step.")
def main(turns: int, batches: int, batch_size: int, step_ms: float) -> None:
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for number in range(turns):
        # Every other turn backwards, so that drift of the machine meets all of them alike.
        for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
            found[variant].append(turn(batches, batch_size, step_ms / 1e3, variant))
    click.echo("| | batches/s | of exactly-once, by turns | ms of a processor a batch | servers' |")
    click.echo("|---|---|---|---|---|")
    for variant, results in found.items():
        ratios = [
            one["batches/s"] / base["batches/s"]
            for one, base in zip(results, found["exactly-once"], strict=True)
        ]
        middle = {name: statistics.median(result[name] for result in results) for name in results[0]}
        parts = ", ".join(f"{role} {middle[role] * 1e3:.2f}" for role in ROLES.values())
        base_servers = statistics.median(result["servers"] for result in found["exactly-once"])
        click.echo(
            f"| {variant} | {middle['batches/s']:.1f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {parts} | {middle['servers'] / base_servers:.2f} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        load(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1:2] == ["train"]:
        train(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
    else:
        main()
