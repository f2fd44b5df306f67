"""What fails in a network, the job that it fails for, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.job import Outcome, Settings, differences, undisturbed
from benchmarks.network.hosts import Network
from benchmarks.network.job import Job, Shape, started

__all__ = ["FAULTS", "Fault", "Measured", "measure", "problems"]

_CUT_S = 15.0
_FIRST_STEP = 20  # of the training: the fault begins after it
_STANDBY_DEADLINE_S = 10
_RANK_DEADLINE_S = 30  # after twice this, a rank gives up waiting for another one


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`begin` makes it; the network is mended after `lasts_s`, or never where that is 0.

    `ends_ranks`: the ranks end by errors; then the network is mended, and the job starts again.
    """

    title: str
    begin: Callable[[Network], object]
    lasts_s: float = _CUT_S
    ranks: int = 1
    workers: int = 1
    standby_deadline_s: int = 0
    ends_ranks: bool = False
    batches: int = 150
    at_most_s: float = 18.0  # of pauses in all


@dataclass(frozen=True)
class Measured:
    """`paused_s`: the sum of the pauses of more than a second."""

    paused_s: float
    outcome: Outcome


def _cut(host: str, other: str | None = None) -> Callable[[Network], object]:
    return lambda network: network.cut(host, other)


def _lose(fraction: float) -> Callable[[Network], object]:
    return lambda network: network.lose(fraction)


FAULTS = {
    "rank-worker": Fault(title="15 s between rank and embedding worker", begin=_cut("rank0", "worker0")),
    "worker-server": Fault(
        title="15 s between embedding worker and server", begin=_cut("worker0", "server0")
    ),
    "nats": Fault(title="15 s between NATS and all others", begin=_cut("nats")),
    "rank-nats": Fault(title="15 s between rank and NATS", begin=_cut("rank0", "nats")),
    "loader-nats": Fault(title="15 s between loader and NATS", begin=_cut("loader", "nats")),
    "rank": Fault(title="15 s between the rank and all others", begin=_cut("rank0")),
    "worker": Fault(title="15 s between the only embedding worker and all others", begin=_cut("worker0")),
    "server": Fault(title="15 s between a server without standby and all others", begin=_cut("server0")),
    "standby": Fault(
        title="15 s between a standby and all others",
        begin=_cut("standby0"),
        standby_deadline_s=_STANDBY_DEADLINE_S,
        at_most_s=2 * _STANDBY_DEADLINE_S + 8,
    ),
    "ranks": Fault(title="15 s between two ranks", begin=_cut("rank0", "rank1"), ranks=2, batches=800),
    "parted-ranks": Fault(
        title="between two ranks, until both have ended and the job starts again",
        begin=_cut("rank0", "rank1"),
        lasts_s=0,
        ranks=2,
        batches=300,
        ends_ranks=True,
        at_most_s=2 * _RANK_DEADLINE_S + 45,
    ),
    "loss-1": Fault(title="1 % of the packets lost", begin=_lose(0.01), lasts_s=0),
    "loss-5": Fault(title="5 % of the packets lost", begin=_lose(0.05), lasts_s=0),
    "lost-worker": Fault(
        title="the host of one of two embedding workers vanishes",
        begin=_cut("worker1"),
        lasts_s=0,
        workers=2,
        batches=300,
    ),
    "lost-server": Fault(
        title="the host of a server with a standby vanishes",
        begin=_cut("server0"),
        lasts_s=0,
        standby_deadline_s=_STANDBY_DEADLINE_S,
    ),
}


def measure(folder: Path, fault: Fault) -> Measured:
    """Runs a job that the fault meets."""
    shape = Shape(
        batches=fault.batches,
        ranks=fault.ranks,
        workers=fault.workers,
        standby_deadline_s=fault.standby_deadline_s,
        **({"every_steps": 10, "deadline_s": _RANK_DEADLINE_S} if fault.ends_ranks else {}),
    )
    with started(folder / "met", shape) as job:
        _await_start(job, fault)
        at = time.monotonic()
        fault.begin(job.network)
        if fault.lasts_s:
            time.sleep(fault.lasts_s)
            job.network.mend()
        if fault.ends_ranks:
            job.await_failure_of_ranks()
            job.network.mend()
            job.start_again()
        outcome = job.finish()
        return Measured(job.paused_s(at), outcome)


def _await_start(job: Job, fault: Fault) -> None:
    if fault.standby_deadline_s:
        job.await_log("server0", "has every row and change")
    job.await_step(_FIRST_STEP)


def problems(folder: Path, fault: Fault, outcome: Outcome) -> list[str]:
    """In what the result is not that of a job that nothing met; nothing, if it is equal bit for bit."""
    if outcome.exit_code:
        return [f"the rank ended with exit code {outcome.exit_code}:\n{outcome.output}"]
    if sorted(outcome.trained) != list(range(fault.batches)) or (outcome.wasted and not fault.ends_ranks):
        return ["not every batch was trained exactly once"]
    if fault.ranks > 1:  # which are not reproducible
        return []
    return differences(undisturbed(folder / "undisturbed", Settings(batches=fault.batches)), outcome)
