"""What it costs a job that trains to get another number of parameter servers.

    python -m benchmarks.resize --sizes 2,3,5,2
    python -m benchmarks.resize --sizes 2,2 --uneven

The same number twice rebalances the servers. `--uneven` has only IDs whose rows two servers have on the first
one.

A job of separate processes trains all the time: a loader, a rank, NATS, an embedding worker and the parameter
servers, all on this machine. For each change it prints what was moved and how fast, how long requests waited
for the hand-over, the longest time between two steps, and the steps per second beside those of as much time
just before and after. The longest time between two steps without a change tells what the machine adds.
`--step-ms 20` lets the rank sleep in each step, as for a GPU, so that processors have time to spare.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray

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
from persia.launcher.resizing import ResizeState
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.nn.exported import sign_hash
from persia.observability.status import job_status
from persia.testing import LocalCluster
from persia.waiting import Attempts

SLOTS, DIM = 8, 32
CONFIG = {"slots_config": {f"C{{1..{SLOTS}}}": {"dim": DIM}}}
LEAST_S = 10.0  # of the time before and after that a change is compared with
TIMEOUT_S = 1200.0


def ids_of(slot: int, num_ids: int, *, uneven: bool) -> NDArray[np.uint64]:
    ids = torch.arange(3 * num_ids)
    if uneven:
        ids = ids[sign_hash(ids | (slot + 1) << 56) >> 52 & 1 == 0]  # of even virtual shards
    return ids[:num_ids].numpy().astype(np.uint64)


def load(num_ids: int, size: int, *, uneven: bool) -> None:
    """The data loader, until it is killed."""
    random = np.random.default_rng(0)
    ids_by_slot = [ids_of(slot, num_ids, uneven=uneven) for slot in range(SLOTS)]
    dense, label = np.zeros((size, 13), np.float32), np.zeros((size, 1), np.float32)
    with DataCtx() as ctx:
        while True:
            ids = [random.choice(of_slot, size) for of_slot in ids_by_slot]
            features = [IDTypeFeatureWithSingleID(f"C{i + 1}", ids[i]) for i in range(SLOTS)]
            ctx.send_data(
                PersiaBatch(features, [NonIDTypeFeature(dense)], [Label(label)], requires_grad=True)
            )


def train(times: str, step_s: float) -> None:
    """The rank: writes when it has done a step, until it is killed."""
    model = torch.nn.Linear(DIM, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, _dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            output: torch.Tensor = self.layer(torch.stack(embeddings).sum(0))
            return output

    adagrad = optim.Adagrad(lr=0.01)
    with (
        TrainCtx(adagrad, sgd, model=Model(), embedding_config=EmbeddingConfig()) as ctx,
        Path(times).open("w", buffering=1) as file,
    ):
        for batch in DataLoader(StreamingDataset(), embedding_staleness=8):
            output, labels = ctx.forward(batch)
            assert labels is not None
            ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
            time.sleep(step_s)
            file.write(f"{time.monotonic()}\n")


def steps(path: Path) -> list[float]:
    """When the steps were done, by time.monotonic()."""
    lines = path.read_text().splitlines()[:-1] if path.exists() else []  # the last one may be cut off
    return [float(line) for line in lines]


def rate(times: list[float], begin: float, end: float) -> float:
    return sum(begin <= at < end for at in times) / (end - begin)


def longest(times: list[float], begin: float, end: float) -> float:
    """The longest time between two steps, in seconds."""
    within = [at for at in times if begin - 1 <= at <= end + 1]
    return max(b - a for a, b in itertools.pairwise(within))


def await_steps(path: Path, number: int) -> None:
    end = time.monotonic() + TIMEOUT_S
    while len(steps(path)) < number:
        if time.monotonic() > end:
            raise RuntimeError(f"no {number} steps in {TIMEOUT_S:.0f} s")
        time.sleep(0.2)


def imbalance(cluster: LocalCluster) -> float:
    """Of the servers, since they have started."""
    for _ in Attempts(60.0):  # absent while a server does not answer at once
        for worker in job_status(Directory(cluster.session).present(EMBEDDING_WORKER, 1.0)):
            if worker.values is not None and "load_imbalance" in worker.values["stats"]:
                return float(worker.values["stats"]["load_imbalance"])
    raise RuntimeError("the embedding worker shows no loads")


@click.command(help=__doc__)
@click.option(
    "--sizes", default="2,3,5,2", show_default=True, help="Numbers of servers, one after the other."
)
@click.option("--ids", type=click.IntRange(min=1), default=50_000, show_default=True, help="Of each slot.")
@click.option("--batch-size", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--warm-up", type=click.IntRange(min=1), default=200, show_default=True, help="Steps.")
@click.option("--step-ms", type=click.FloatRange(min=0), default=0, help="Sleep of the rank in each step.")
@click.option("--uneven", is_flag=True, help="Only IDs of the first of two servers.")
def main(sizes: str, ids: int, batch_size: int, warm_up: int, step_ms: float, uneven: bool) -> None:
    numbers = [int(number) for number in sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times"
        with LocalCluster(
            embedding_config=CONFIG, parameter_servers=numbers[0], env={"OMP_NUM_THREADS": "1"}
        ) as cluster:
            cluster.start_nn_worker(__file__, "train", str(path), str(step_ms / 1e3))
            cluster.start_loader(__file__, "load", str(ids), str(batch_size), *["uneven"] * uneven)
            await_steps(path, warm_up)
            for has, number in itertools.pairwise(numbers):
                time.sleep(LEAST_S)
                before = imbalance(cluster)
                begin = time.monotonic()
                state = cluster.rebalance() if number == has else cluster.resize(number)
                end = time.monotonic()
                time.sleep(max(LEAST_S, end - begin))
                report(steps(path), begin, end, state)
                click.echo(
                    f"  load_imbalance {before:.3f} before and {imbalance(cluster):.3f} after, "
                    f"{state.num_moved_shards} virtual shards moved"
                )


def report(times: list[float], begin: float, end: float, state: ResizeState) -> None:
    around = max(LEAST_S, end - begin)
    with_change = rate(times, begin, end)
    without = (rate(times, begin - LEAST_S, begin) + rate(times, end, end + around)) / 2
    quiet = longest(times, begin - LEAST_S + 1, begin - 1)
    click.echo(
        f"{state.before} to {state.after}: {state.num_rows:,} rows, {state.num_bytes / 1e6:.1f} MB, "
        f"{end - begin:.1f} s in all, copy {state.copy_s:.1f} s "
        f"({state.num_bytes / 1e9 / state.copy_s:.4f} GB/s), hand-over {state.pause_s * 1e3:.0f} ms, "
        f"longest step {longest(times, begin, end) * 1e3:.0f} ms (without {quiet * 1e3:.0f}), "
        f"{with_change:.1f} steps/s (without {without:.1f}): {1 - with_change / without:.1%} less; "
        f"load average {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        load(int(sys.argv[2]), int(sys.argv[3]), uneven=len(sys.argv) > 4)
    elif sys.argv[1:2] == ["train"]:
        train(sys.argv[2], float(sys.argv[3]))
    else:
        main()
