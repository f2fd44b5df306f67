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
from typing import Any, NamedTuple

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
from persia.embedding.data import IDTypeFeature
from persia.launcher import job_costs
from persia.launcher.job_costs import Constants, Job, RoleCost, SlotLoad, Traffic, Work, work
from persia.testing import LocalCluster
from persia.utils import dump_yaml


class _Run(NamedTuple):
    """A job that is measured. A process gets it as JSON."""

    size: int  # of a batch
    dim: int
    is_new: bool = False  # each batch has new IDs
    is_multi: bool = False  # slots have several IDs a sample

    @property
    def hotness(self) -> list[int]:
        """Of each slot."""
        return [(1, 5, 20)[slot % 3] if self.is_multi else 1 for slot in range(_NUM_SLOTS)]

    @property
    def num_batches(self) -> int:
        """Of the whole job."""
        return _WARM_UP + max(24, (1 << 18) // self.size) + _AHEAD

    def columns(self) -> list[list[Any]]:
        """IDs of the batches, [slot] each."""
        count = self.num_batches if self.is_new else _MADE
        made = SyntheticClicks(num_batches=count, batch_size=self.size, alpha=_ALPHA, hotness=self.hotness)
        return [[ids.reshape(-1).astype(np.uint64) for ids in made.columns(i)[1]] for i in range(count)]


# Far enough apart to tell the costs of batches, IDs, rows, floats and new rows from each other.
_RUNS = (
    *(_Run(256, 16), _Run(4096, 16), _Run(4096, 64), _Run(16384, 8), _Run(2048, 16, is_multi=True)),
    *(_Run(1024, 16, is_new=True), _Run(4096, 64, is_new=True)),
)
_NUM_SLOTS = 26
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
    for run in _RUNS:
        click.echo(f"measuring {run}", err=True)
        job, torch_s = _job(run), _torch_s(run)
        done = work(job, Traffic.of(job, _SERVERS, 1), _SERVERS)
        measured, server_mib = _cluster(run)
        alone = _one_process(run)
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
    rows = np.array([one.units for one, _ in measured])
    seconds = np.array([value for _, value in measured])
    kept = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    while True:
        # Relative errors: a small batch counts as much as a large one.
        found = np.linalg.lstsq(rows[:, kept] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    values = dict(zip(kept, found, strict=True))
    costs = {}
    for column, name in enumerate(RoleCost.model_fields):
        unit = 1e6 if name.endswith("_us") else 1e9
        costs[name] = float(f"{values.get(column, 0.0) * unit:.3g}")
    return RoleCost(**costs)


def _job(run: _Run) -> Job:
    slots = []
    for index, columns in enumerate(zip(*run.columns(), strict=True)):
        distinct = float(np.mean([len(np.unique(ids)) for ids in columns]))
        load = SlotLoad(name=_name(index), hotness=run.hotness[index], rows=0, distinct=distinct)
        if run.is_new:
            before, counted = np.unique(np.concatenate(columns[:_WARM_UP])), columns[_WARM_UP:]
            new = len(np.union1d(before, np.concatenate(counted))) - len(before)
            load = load.model_copy(update={"new": new / len(counted)})
        slots.append(load)
    return Job(batch_size=run.size, dim=run.dim, optimizer="adagrad", slots=slots)


def _name(slot: int) -> str:
    return f"cat_{slot}.bin"


def _slots(dim: int) -> dict[str, Any]:
    return {"slots_config": {_name(slot): {"dim": dim} for slot in range(_NUM_SLOTS)}}


def _cluster(run: _Run) -> tuple[dict[str, float], float]:
    """Seconds of a batch by role, and MiB of a server without rows."""
    with LocalCluster(
        embedding_config=_slots(run.dim), parameter_servers=_SERVERS, env={"OMP_NUM_THREADS": "1"}
    ) as cluster:
        cluster.start_loader(__file__, "load", json.dumps(run))
        pids = {process.name: process.pid for process in cluster.processes}
        statm = Path(f"/proc/{pids['embedding-parameter-server-0']}/statm").read_text()
        rank = cluster.start_nn_worker(__file__, "train", json.dumps(run), json.dumps(pids))
        if cluster.wait(rank, _TIMEOUT_S):
            raise RuntimeError(rank.output)
        seconds = _last_json(rank.output)
    mib = int(statm.split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    of_roles: dict[str, float] = {}
    for name, value in seconds.items():
        of_roles[_ROLES.get(name, name)] = of_roles.get(_ROLES.get(name, name), 0.0) + value
    return of_roles, mib


def _one_process(run: _Run) -> dict[str, float]:
    command = [sys.executable, __file__, "alone", json.dumps(run), "{}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S
    )
    return {_ROLES.get(name, name): value for name, value in _last_json(done.stdout).items()}


def _last_json(output: str) -> dict[str, float]:
    found: dict[str, float] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found


def _made(run: _Run) -> Iterator[Any]:
    batches, dense = run.columns(), np.zeros((run.size, 13), np.float32)
    label = np.zeros((run.size, 1), np.float32)
    offsets = [np.arange(0, count * run.size + 1, count, dtype=np.uint32) for count in run.hotness]
    for number in range(run.num_batches):
        ids: list[IDTypeFeature] = []
        for slot, values in enumerate(batches[number % len(batches)]):
            if run.hotness[slot] == 1:
                ids.append(IDTypeFeatureWithSingleID(_name(slot), values))
            else:
                ids.append(IDTypeFeature.from_csr(_name(slot), values, offsets[slot]))
        yield PersiaBatch(ids, [NonIDTypeFeature(dense)], [Label(label)], requires_grad=True)


def _load(run: _Run) -> None:
    with DataCtx() as ctx:
        for batch in _made(run):
            ctx.send_data(batch)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, _dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return self.weight * sum(rows.sum(dim=1) for rows in embeddings)


def _torch_s(run: _Run) -> float:
    """Processor time of torch alone for the model of a batch, which is no cost of persia."""
    model, threads = _Model(), torch.get_num_threads()
    embeddings = [torch.randn(run.size, run.dim, requires_grad=True) for _ in range(_NUM_SLOTS)]
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


def _train(run: _Run, pids: Mapping[str, int], *, alone: bool) -> None:
    """Prints the seconds of a batch of this process, of its loop, and of the processes in `pids`."""
    pids = {**pids, "nn-worker": os.getpid()}
    model = _Model()
    dense = torch.optim.SGD(model.parameters(), lr=1e-6)
    slots = _slots(run.dim) if alone else None
    dataset = StreamingDataset(loader=partial(_load, run))  # which a cluster does not call
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
            if ctx.step == run.num_batches - _AHEAD:
                end = spent()
    counted = run.num_batches - _AHEAD - _WARM_UP
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
        _load(_Run(*json.loads(sys.argv[2])))
    elif sys.argv[1:2] in (["train"], ["alone"]):
        _train(_Run(*json.loads(sys.argv[2])), json.loads(sys.argv[3]), alone=sys.argv[1] == "alone")
    else:
        main()
