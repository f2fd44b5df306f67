"""Jobs that take turns: one with its rows in memory, others with theirs in pools."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.process import JsonProcess
from benchmarks.stats import Ratio, paired_ratio
from benchmarks.tiers.job import JobOptions
from benchmarks.tiers.page_cache import memory_group

__all__ = ["Comparison", "Schedule", "compare", "compare_checkpoints", "opened"]

_OPEN_DEADLINE_S = 900.0
_TURN_DEADLINE_S = 600.0
_TRIED_STEPS = 10
# A limited job keeps the memory that its steps need: else it would be now its own, now the page cache's.
_KEEPS_MEMORY = {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=0x7fffffffffff"}


@dataclasses.dataclass(frozen=True)
class Schedule:
    rounds: int
    seconds: float  # that a turn of the job in memory takes, about
    settle: int  # steps before the first turn


@dataclasses.dataclass
class Comparison:
    """`ours` and `theirs`: milliseconds a step, turn by turn; theirs is what ours is slower than."""

    name: str
    cache: float
    ours: list[float] = dataclasses.field(default_factory=list)
    theirs: list[float] = dataclasses.field(default_factory=list)
    counts: dict[str, float] = dataclasses.field(default_factory=dict)  # of ours, over all turns

    @property
    def ratio(self) -> Ratio:
        return paired_ratio(self.ours, self.theirs)

    @property
    def miss_share(self) -> float:
        """Of the rows that lookups named, each once a batch: those that came from the pool, then or ahead."""
        return self.counts["num_missed"] / max(self.counts["num_lookups"], 1)

    @property
    def miss_share_of_ids(self) -> float:
        return self.counts["num_missed"] / self.counts["num_ids"]

    def count(self, reply: dict[str, Any]) -> None:
        for name in ("num_missed", "num_prefetched", "num_lookups", "num_ids", "asking_seconds"):
            self.counts[name] = self.counts.get(name, 0) + reply[name]
        committed = float(reply["was_committed"])
        self.counts["num_committed"] = self.counts.get("num_committed", 0) + committed


class _Side:
    """A job in a child."""

    def __init__(self, child: JsonProcess, options: JobOptions) -> None:
        self.options = options
        self._child = child
        self._seed = 0

    def turn(self, seed: int, steps: int, variant: str, *, checkpoint: bool = False) -> dict[str, Any]:
        request = {"op": "run", "seed": seed, "steps": steps, "variant": variant, "checkpoint": checkpoint}
        reply = self._child.ask(request, _TURN_DEADLINE_S)
        reply["ms"] = reply["seconds"] / steps * 1e3
        return reply

    def memory(self) -> dict[str, int]:
        return self._child.ask({"op": "memory"}, _TURN_DEADLINE_S)


@contextlib.contextmanager
def opened(
    jobs: Sequence[JobOptions], schedule: Schedule, directory: Path | None, page_cache: float | None = None
) -> Iterator[list[_Side]]:
    """All of `jobs`, each with its rows made and its cache settled; pools go at the end.

    `page_cache`: what is left to each job over a pool, beside its own memory, as a share of the pool's file.
    """
    sides = []
    with contextlib.ExitStack() as stack:
        for number, job in enumerate(jobs):
            place = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
            here = dataclasses.replace(job, directory=place)
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tiers.job"]
            is_limited = page_cache is not None and job.kind != "dram"
            environment = os.environ | _KEEPS_MEMORY if is_limited else os.environ
            with contextlib.ExitStack() as opening:
                child = opening.enter_context(JsonProcess(command, environment, f"job {number} ({job.kind})"))
                group = stack.enter_context(memory_group(child.pid)) if is_limited else None
                stack.push(opening.pop_all())  # the child ends before its group goes
            child.ask({"op": "open", "job": dataclasses.asdict(here)}, _OPEN_DEADLINE_S)
            sides.append(_Side(child, job))
            sides[-1].turn(1, schedule.settle, "sparse part alone")
            if group is not None and page_cache is not None:
                sides[-1].turn(4, schedule.settle, "training")  # has the memory that it needs
                group.leave(int(next(Path(place).rglob("rows.pool")).stat().st_size * page_cache))
                sides[-1].turn(5, schedule.settle, "sparse part alone")
        yield sides


def compare(sides: Sequence[_Side], schedule: Schedule, variants: Sequence[str]) -> list[Comparison]:
    """The first of `sides`, before or after each of the others, for each variant."""
    memory, pools = sides[0], sides[1:]
    steps = {variant: _steps(memory, variant, schedule.seconds) for variant in variants}
    found = {
        (variant, pool): Comparison(variant, pool.options.cache) for variant in variants for pool in pools
    }
    for number in range(schedule.rounds):
        for place, ((variant, pool), comparison) in enumerate(found.items()):
            seed = 1000 + number * len(found) + place  # batches seen before would be in the cache
            turns = [memory, pool] if (number + place) % 2 == 0 else [pool, memory]
            replies = {side: side.turn(seed, steps[variant], variant) for side in turns}
            comparison.theirs.append(replies[memory]["ms"])
            comparison.ours.append(replies[pool]["ms"])
            comparison.count(replies[pool])
    return list(found.values())


def compare_checkpoints(sides: Sequence[_Side], schedule: Schedule) -> Comparison:
    """Two jobs over pools of the same kind; the first asks for a checkpoint when a turn begins."""
    variant = "sparse part alone"
    asking, other = sides
    steps = _steps(other, variant, schedule.seconds)
    found = Comparison(f"a checkpoint every {schedule.seconds:g} s", asking.options.cache)
    for number in range(schedule.rounds):
        turns = [asking, other] if number % 2 == 0 else [other, asking]
        replies = {
            side: side.turn(1000 + number, steps, variant, checkpoint=side is asking) for side in turns
        }
        found.ours.append(replies[asking]["ms"])
        found.theirs.append(replies[other]["ms"])
        found.count(replies[asking])
    found.counts["turn_seconds"] = sum(found.theirs) / len(found.theirs) * steps / 1e3
    return found


def _steps(side: _Side, variant: str, seconds: float) -> int:
    side.turn(2, _TRIED_STEPS, variant)
    return max(int(seconds * 1e3 / side.turn(3, _TRIED_STEPS, variant)["ms"]), _TRIED_STEPS)
