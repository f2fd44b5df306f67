"""The constants of `persia-launcher plan --constants`, measured on this machine with short jobs.

    python -m benchmarks.role_costs --output constants.yaml

Each job has two parameter servers and one process of each other role, or is one process. Takes two or three
minutes. Threads of torch: one. Where other work takes cores, let the job be the first on one of them, and
compare with jobs that are measured in the same way:

    chrt -r 5 taskset -c 1 python -m benchmarks.role_costs --output constants.yaml
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
from persia.launcher.job_costs import Constants, Job, RoleCost, SlotLoad, Traffic, Work, work
from persia.testing import LocalCluster
from persia.utils import dump_yaml

# (batch size, dim, whether each batch has new IDs): far enough apart to tell the costs of batches, IDs,
# floats and new rows from each other.
_RUNS = (
    *((256, 16, False), (4096, 16, False), (4096, 64, False), (16384, 8, False)),
    *((1024, 16, True), (4096, 64, True)),
)
# As many batches in turns as make the rows of most of them leave the caches.
_ALPHA, _MADE, _WARM_UP, _TIMEOUT_S = 1.1, 16, 20, 300.0
_AHEAD = 24  # batches that a loader may have sent and the rank not trained: the loader must not have ended
_SERVERS = 2
_ROLES = {
    **{f"embedding-parameter-server-{index}": job_costs.SERVERS for index in range(_SERVERS)},
    "embedding-worker-0": job_costs.WORKERS,
    "data-loader-0": job_costs.LOADERS,
    "nats": job_costs.BROKER,
    "nn-worker": job_costs.RANKS,
}


def calibrate() -> Constants:
    """Runs the jobs."""
    found: dict[str, list[tuple[Work, float]]] = {}
    server_mib = 0.0
    for size, dim, is_new in _RUNS:
        click.echo(f"measuring batches of {size} samples, dim {dim}{', new IDs' * is_new}", err=True)
        job, torch_s = _job(size, dim, is_new), _torch_s(size, dim)
        done = work(job, Traffic.of(job, _SERVERS, 1), _SERVERS)
        measured, server_mib = _cluster(size, dim, is_new)
        alone = _one_process(size, dim, is_new)
        for times, name in ((measured, job_costs.RANKS), (alone, job_costs.ONE_PROCESS)):
            loop_s = times.pop(job_costs.LOOP)
            times[name] = times.pop(job_costs.RANKS) - loop_s
            for role, seconds in (times | {job_costs.LOOP: max(loop_s - torch_s, 1e-9)}).items():
                found.setdefault(role, []).append((done[role], seconds))
    return Constants(
        server_mib=round(server_mib), **{role: _solve(measured) for role, measured in found.items()}
    )


def _solve(measured: Sequence[tuple[Work, float]]) -> RoleCost:
    """The constants of a role, none below 0, by least squares of the seconds of a batch."""
    rows = np.array([[one.num_messages, one.items, one.words, one.new_rows] for one, _ in measured])
    seconds = np.array([value for _, value in measured])
    kept = [column for column in range(4) if rows[:, column].any()]
    while True:
        # Relative errors: a small batch counts as much as a large one.
        found = np.linalg.lstsq(rows[:, kept] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    values = dict(zip(kept, found, strict=True))
    units = {"batch_us": 1e6, "item_ns": 1e9, "word_ns": 1e9, "new_row_ns": 1e9}
    costs = {name: float(f"{values.get(column, 0.0) * units[name]:.3g}") for column, name in enumerate(units)}
    return RoleCost(**costs)


def _batches(size: int, is_new: bool) -> list[list[Any]]:
    count = _num_batches(size) if is_new else _MADE
    made = SyntheticClicks(num_batches=count, batch_size=size, alpha=_ALPHA)
    return [[ids.astype(np.uint64) for ids in made.columns(number)[1]] for number in range(count)]


def _job(size: int, dim: int, is_new: bool) -> Job:
    slots = []
    for index, columns in enumerate(zip(*_batches(size, is_new), strict=True)):
        distinct = float(np.mean([len(np.unique(ids)) for ids in columns]))
        counted = columns[_WARM_UP:]
        before = np.unique(np.concatenate(columns[:_WARM_UP]))
        new = len(np.union1d(before, np.concatenate(counted))) - len(before) if is_new else 0
        load = SlotLoad(name=f"cat_{index}.bin", rows=0, distinct=distinct, new=new / max(len(counted), 1))
        slots.append(load)
    return Job(batch_size=size, dim=dim, optimizer="adagrad", slots=slots)


def _slots(dim: int) -> dict[str, Any]:
    return {"slots_config": {f"cat_{index}.bin": {"dim": dim} for index in range(26)}}


def _cluster(size: int, dim: int, is_new: bool) -> tuple[dict[str, float], float]:
    """Seconds of a batch by role, and MiB of a server without rows."""
    with LocalCluster(
        embedding_config=_slots(dim), parameter_servers=_SERVERS, env={"OMP_NUM_THREADS": "1"}
    ) as cluster:
        cluster.start_loader(__file__, "load", str(size), str(int(is_new)))
        pids = {process.name: process.pid for process in cluster.processes}
        statm = Path(f"/proc/{pids['embedding-parameter-server-0']}/statm").read_text()
        words = str(size), str(dim), str(int(is_new)), json.dumps(pids)
        rank = cluster.start_nn_worker(__file__, "train", *words)
        if cluster.wait(rank, _TIMEOUT_S):
            raise RuntimeError(rank.output)
        seconds = _last_json(rank.output)
    mib = int(statm.split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    of_roles: dict[str, float] = {}
    for name, value in seconds.items():
        of_roles[_ROLES.get(name, name)] = of_roles.get(_ROLES.get(name, name), 0.0) + value
    return of_roles, mib


def _one_process(size: int, dim: int, is_new: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "alone", str(size), str(dim), str(int(is_new)), "{}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S
    )
    return {_ROLES.get(name, name): value for name, value in _last_json(done.stdout).items()}


def _last_json(output: str) -> dict[str, float]:
    found: dict[str, float] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found


def _num_batches(size: int) -> int:
    return _WARM_UP + max(24, (1 << 18) // size) + _AHEAD


def _made(size: int, is_new: bool) -> Iterator[Any]:
    columns, dense = _batches(size, is_new), np.zeros((size, 13), np.float32)
    label = np.zeros((size, 1), np.float32)
    for number in range(_num_batches(size)):
        ids = [
            IDTypeFeatureWithSingleID(f"cat_{slot}.bin", values)
            for slot, values in enumerate(columns[number % len(columns)])
        ]
        yield PersiaBatch(ids, [NonIDTypeFeature(dense)], [Label(label)], requires_grad=True)


def _load(size: int, is_new: bool) -> None:
    with DataCtx() as ctx:
        for batch in _made(size, is_new):
            ctx.send_data(batch)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, _dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return self.weight * sum(rows.sum(dim=1) for rows in embeddings)


def _torch_s(size: int, dim: int) -> float:
    """Processor time of torch alone for the model of a batch, which is no cost of persia."""
    model, threads = _Model(), torch.get_num_threads()
    embeddings = [torch.randn(size, dim, requires_grad=True) for _ in range(26)]
    optimizer, begin, repeated = torch.optim.SGD(model.parameters(), lr=1e-6), 0.0, 10
    torch.set_num_threads(1)
    for number in range(-2, repeated):
        begin = time.thread_time() if number == 0 else begin
        for rows in embeddings:
            rows.grad = None
        model([], embeddings).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    return (time.thread_time() - begin) / repeated


def _train(size: int, dim: int, is_new: bool, pids: Mapping[str, int], *, alone: bool) -> None:
    """Prints the seconds of a batch of this process, of its loop, and of the processes in `pids`."""
    pids = {**pids, "nn-worker": os.getpid()}
    model = _Model()
    dense = torch.optim.SGD(model.parameters(), lr=1e-6)
    slots = _slots(dim) if alone else None
    dataset = StreamingDataset(loader=partial(_load, size, is_new))  # which a cluster does not call
    sparse = optim.Adagrad(lr=1e-6)

    def spent() -> dict[str, float]:
        of_all = {name: process_seconds(pid) for name, pid in pids.items()}
        return of_all | {job_costs.LOOP: time.thread_time()}

    begin: dict[str, float] = {}
    with TrainCtx(sparse, dense, model=model, embedding_config=EmbeddingConfig(), slots=slots) as ctx:
        for batch in DataLoader(dataset, embedding_staleness=8):
            output, _ = ctx.forward(batch)
            ctx.backward(output.mean())
            sparse.set_lr(1e-6 / ctx.step)  # as with a schedule, which tells the servers at each step
            if ctx.step == _WARM_UP:
                begin = spent()
            if ctx.step == _num_batches(size) - _AHEAD:
                end = spent()
    counted = _num_batches(size) - _AHEAD - _WARM_UP
    print(json.dumps({name: (end[name] - begin[name]) / counted for name in begin}))


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
        _load(int(sys.argv[2]), sys.argv[3] == "1")
    elif sys.argv[1:2] in (["train"], ["alone"]):
        size, dim, is_new, pids = sys.argv[2:]
        _train(int(size), int(dim), is_new == "1", json.loads(pids), alone=sys.argv[1] == "alone")
    else:
        main()
