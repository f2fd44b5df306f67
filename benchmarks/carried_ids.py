"""What it costs that a batch carries its ID features to the rank, which keeps them for a worker's death.

    python -m benchmarks.carried_ids --turns 3

A job of separate processes trains with and without them, in turns: a loader, a rank, NATS, an embedding
worker and a parameter server. Prints the processor time a batch of those that the ID features cross, and
batches a second.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import click
import numpy as np
import torch

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
from persia.messaging.payloads import SubmittedBatch
from persia.pipeline import send
from persia.testing import LocalCluster

SLOTS, SIZE, DIM, WARM_UP = 26, 4096, 16, 20
CONFIG = {"slots_config": {f"C{{1..{SLOTS}}}": {"dim": DIM}}}


def load(num_batches: int, carries: bool) -> None:
    """The data loader. Without `carries` it is as before the rank had the ID features."""
    submitted = SubmittedBatch
    if not carries:
        send.__dict__["SubmittedBatch"] = lambda **fields: submitted(**fields | {"id_features": b""})
    random = np.random.default_rng(0)
    ids = random.integers(100_000, size=(8, SLOTS, SIZE)).astype(np.uint64)
    dense, label = np.zeros((SIZE, 13), np.float32), np.zeros((SIZE, 1), np.float32)
    with DataCtx() as ctx:
        for number in range(num_batches):
            if number == WARM_UP:
                begin = time.process_time()
            columns = ids[number % len(ids)]
            features = [IDTypeFeatureWithSingleID(f"C{i + 1}", columns[i]) for i in range(SLOTS)]
            batch = PersiaBatch(features, [NonIDTypeFeature(dense)], [Label(label)], requires_grad=True)
            ctx.send_data(batch)
    print(json.dumps({"loader": (time.process_time() - begin) / (num_batches - WARM_UP)}), flush=True)


def train(num_batches: int) -> None:
    """The rank."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(DIM, 1)

        def forward(self, _dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            output: torch.Tensor = self.layer(torch.stack(embeddings).sum(0))
            return output

    model = Model()
    sgd, config = torch.optim.SGD(model.parameters(), lr=0.01), EmbeddingConfig()
    with TrainCtx(optim.SGD(lr=0.01), sgd, model=model, embedding_config=config) as ctx:
        for batch in DataLoader(StreamingDataset(), embedding_staleness=8):
            output, labels = ctx.forward(batch)
            assert labels is not None
            ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
            if ctx.step == WARM_UP:
                begin, cpu = time.monotonic(), time.process_time()
        ctx.wait_for_gradients()
        counted = num_batches - WARM_UP
        used = {
            "rank": (time.process_time() - cpu) / counted,
            "batches/s": counted / (time.monotonic() - begin),
        }
    print(json.dumps(used), flush=True)


def turn(num_batches: int, carries: bool) -> dict[str, float]:
    """Seconds of processor time a batch, by process, and batches a second."""
    with LocalCluster(embedding_config=CONFIG, env={"OMP_NUM_THREADS": "1"}) as cluster:
        nats = next(process.pid for process in cluster.processes if process.name == "nats")
        begin = _processor_s(nats)
        arguments = (str(num_batches), str(int(carries)))
        processes = [
            cluster.start_nn_worker(__file__, "train", *arguments),
            cluster.start_loader(__file__, "load", *arguments),
        ]
        codes = [cluster.wait(process, 600) for process in processes]
        used = {"nats": (_processor_s(nats) - begin) / num_batches}
        for process, code in zip(processes, codes, strict=True):
            if code:
                raise RuntimeError(process.output)
            used |= json.loads(next(line for line in process.output.splitlines() if line.startswith("{")))
    return used


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@click.command(help=__doc__)
@click.option("--turns", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--batches", type=click.IntRange(min=WARM_UP + 1), default=200, show_default=True)
def main(turns: int, batches: int) -> None:
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(turns):
        for carries, results in found.items():
            results.append(turn(batches, carries))
    for name in ("loader", "nats", "rank"):
        without, carried = (statistics.median(r[name] for r in found[c]) * 1e3 for c in (False, True))
        click.echo(f"{name}: {without:.2f} ms of a processor a batch without, {carried:.2f} with ID features")
    without, carried = (statistics.median(r["batches/s"] for r in found[c]) for c in (False, True))
    click.echo(f"{without:.1f} batches/s without, {carried:.1f} with ID features")


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        load(int(sys.argv[2]), sys.argv[3] == "1")
    elif sys.argv[1:2] == ["train"]:
        train(int(sys.argv[2]))
    else:
        main()
