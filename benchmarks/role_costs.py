"""The constants of `persia-launcher plan --constants`, measured on this machine with short jobs.

    python -m benchmarks.role_costs --output constants.yaml

Each job has one process of each role, or is one process. Takes a minute or two. Threads of torch: one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
from persia.data import SyntheticClicks
from persia.launcher import job_costs
from persia.launcher.job_costs import Constants, Job, RoleCost, SlotLoad, Traffic, work
from persia.testing import LocalCluster
from persia.utils import dump_yaml

# (batch size, dim): far enough apart to tell the costs of batches, IDs and floats from each other.
_RUNS = ((256, 16), (4096, 16), (4096, 64), (16384, 8))
# As many batches in turns as make the rows of most of them leave the caches.
_ALPHA, _MADE, _WARM_UP, _TIMEOUT_S = 1.1, 16, 20, 300.0
_ROLES = {
    "embedding-parameter-server-0": job_costs.SERVERS,
    "embedding-worker-0": job_costs.WORKERS,
    "data-loader-0": job_costs.LOADERS,
    "nats": job_costs.BROKER,
    "nn-worker": job_costs.RANKS,
}


def calibrate() -> Constants:
    """Runs the jobs."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    server_mib = 0.0
    for size, dim in _RUNS:
        click.echo(f"measuring batches of {size} samples, dim {dim}", err=True)
        measured, server_mib = _cluster(size, dim)
        job = _job(size, dim)
        items = work(job, Traffic.of(job, 1, 1))
        for role, seconds in (measured | {job_costs.ONE_PROCESS: _one_process(size, dim)}).items():
            found.setdefault(role, []).append((*items[role], seconds))
    costs: dict[str, RoleCost] = {role: _solve(runs) for role, runs in found.items()}
    return Constants(server_mib=round(server_mib), **costs)


def _solve(measured: Sequence[tuple[float, float, float]]) -> RoleCost:
    """The constants of a role, none below 0, by least squares of (items, words, seconds of a batch)."""
    rows = np.array([[1.0, items, words] for items, words, _ in measured])
    seconds = np.array([value for _, _, value in measured])
    kept = [column for column in range(3) if rows[:, column].any()]
    while True:
        # Relative errors: a small batch counts as much as a large one.
        found = np.linalg.lstsq(rows[:, kept] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    values = dict(zip(kept, found, strict=True))
    costs = [float(f"{values.get(column, 0.0) * unit:.3g}") for column, unit in enumerate((1e6, 1e9, 1e9))]
    return RoleCost(batch_us=costs[0], item_ns=costs[1], word_ns=costs[2])


def _batches(size: int) -> list[list[Any]]:
    made = SyntheticClicks(num_batches=_MADE, batch_size=size, alpha=_ALPHA)
    return [[ids.astype(np.uint64) for ids in made.columns(number)[1]] for number in range(_MADE)]


def _job(size: int, dim: int) -> Job:
    distinct = np.mean([[len(np.unique(ids)) for ids in batch] for batch in _batches(size)], axis=0)
    slots = [
        SlotLoad(name=f"cat_{index}.bin", rows=0, distinct=float(count))
        for index, count in enumerate(distinct)
    ]
    return Job(batch_size=size, dim=dim, slots=slots)


def _slots(dim: int) -> dict[str, Any]:
    return {"slots_config": {f"cat_{index}.bin": {"dim": dim} for index in range(26)}}


def _cluster(size: int, dim: int) -> tuple[dict[str, float], float]:
    """Seconds of a batch by role, and MiB of a server without rows."""
    with LocalCluster(embedding_config=_slots(dim), env={"OMP_NUM_THREADS": "1"}) as cluster:
        cluster.start_loader(__file__, "load", str(size))
        pids = {process.name: process.pid for process in cluster.processes}
        statm = Path(f"/proc/{pids['embedding-parameter-server-0']}/statm").read_text()
        rank = cluster.start_nn_worker(__file__, "train", str(size), str(dim), json.dumps(pids))
        if cluster.wait(rank, _TIMEOUT_S):
            raise RuntimeError(rank.output)
        seconds = _last_json(rank.output)
    mib = int(statm.split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    return {_ROLES[name]: value for name, value in seconds.items()}, mib


def _one_process(size: int, dim: int) -> float:
    command = [sys.executable, __file__, "alone", str(size), str(dim), "{}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S
    )
    return _last_json(done.stdout)["nn-worker"]


def _last_json(output: str) -> dict[str, float]:
    found: dict[str, float] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found


def _num_batches(size: int) -> int:
    return _WARM_UP + max(24, (1 << 18) // size)


def _made(size: int) -> Iterator[Any]:
    columns, dense, label = _batches(size), np.zeros((size, 13), np.float32), np.zeros((size, 1), np.float32)
    for number in range(_num_batches(size)):
        ids = [
            IDTypeFeatureWithSingleID(f"cat_{slot}.bin", values)
            for slot, values in enumerate(columns[number % _MADE])
        ]
        yield PersiaBatch(ids, [NonIDTypeFeature(dense)], [Label(label)], requires_grad=True)


def _load(size: int) -> None:
    with DataCtx() as ctx:
        for batch in _made(size):
            ctx.send_data(batch)


def _train(size: int, dim: int, pids: Mapping[str, int], *, alone: bool) -> None:
    """Prints the seconds of a batch of this process, and of those in `pids`."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, _dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            return self.weight * sum(rows.sum(dim=1) for rows in embeddings)

    pids = {**pids, "nn-worker": os.getpid()}
    model = Model()
    dense = torch.optim.SGD(model.parameters(), lr=1e-6)
    slots = _slots(dim) if alone else None
    dataset = StreamingDataset(loader=partial(_load, size))  # which a cluster does not call
    begin: dict[str, float] = {}
    sparse = optim.Adagrad(lr=1e-6)
    with TrainCtx(sparse, dense, model=model, embedding_config=EmbeddingConfig(), slots=slots) as ctx:
        for batch in DataLoader(dataset, embedding_staleness=8):
            output, _ = ctx.forward(batch)
            ctx.backward(output.mean())
            sparse.set_lr(1e-6 / ctx.step)  # as with a schedule, which tells the servers at each step
            if ctx.step == _WARM_UP:
                begin = {name: process_seconds(pid) for name, pid in pids.items()}
        ctx.wait_for_gradients()
        counted = ctx.step - _WARM_UP
        print(
            json.dumps({name: (process_seconds(pid) - begin[name]) / counted for name, pid in pids.items()})
        )


def process_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    # The clock of a process, as clock_getcpuclockid(3) makes it: /proc has hundredths of a second.
    return time.clock_gettime((~pid << 3) | 2)


@click.command(help=__doc__)
@click.option("--output", required=True, type=click.Path(dir_okay=False))
def main(output: str) -> None:
    dump_yaml(calibrate().model_dump(), output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        _load(int(sys.argv[2]))
    elif sys.argv[1:2] in (["train"], ["alone"]):
        size, dim, pids = sys.argv[2:]
        _train(int(size), int(dim), json.loads(pids), alone=sys.argv[1] == "alone")
    else:
        main()
