"""One side of a comparison, in a process of its own: `python -m benchmarks.child CORE...`.

Own threads, own malloc, own cores (those named). It reads one JSON object a line from standard input and
answers each with one on standard output:

    {"op": "open", "case": ..., "folder": ...}  ->  {"step_seconds": ..., "versions": {...}}
                                                    or {"unavailable": reason}, and the process ends
    {"op": "run", "steps": n}                   ->  {"seconds": ..., "ids": ..., "samples": ...}
    {"op": "close"}                             ->  {"counters": {...}}, and the process ends

What fails otherwise ends the process with a traceback on standard error, which the runner shows.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks.cases import Case
from benchmarks.systems import System, UnavailableError, load_system
from benchmarks.workload import Batch, FreshIds, load_batches

__all__ = ["Measurement", "main"]

_FRESH_SEED = 7


class Measurement:
    """An open case: its system, its batches, and the loop that is timed."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.system: System = load_system(case.system)(case)
        self._batches = load_batches(folder)
        self._feed = self._prepared(case)

    def _prepared(self, case: Case) -> Iterator[tuple[Batch, Any]]:
        """Batches with their prepared inputs, without end; new IDs are made as they are asked for."""
        if case.workload.new_share == 0:
            return itertools.cycle([(batch, self.system.prepare(batch)) for batch in self._batches])
        fresh = FreshIds(case.workload.new_share, _FRESH_SEED)
        renewed = (fresh.renew(batch) for batch in itertools.cycle(self._batches))
        return ((batch, self.system.prepare(batch)) for batch in renewed)

    def warm_up(self) -> float:
        """Runs every batch once, so that its rows are there and its pages present; seconds a step."""
        self.run(1)  # libraries do some of their set-up in the first call
        return float(self.run(len(self._batches))["seconds"]) / len(self._batches)

    def run(self, steps: int) -> dict[str, float]:
        """Times `steps` steps; their inputs are ready before the clock starts."""
        window = list(itertools.islice(self._feed, steps))
        step = self.system.step
        gc.collect()
        gc.disable()
        begin = time.perf_counter()
        for _, prepared in window:
            step(prepared)
        self.system.finish()
        seconds = time.perf_counter() - begin
        gc.enable()
        return {
            "seconds": seconds,
            "ids": sum(batch.num_ids for batch, _ in window),
            "samples": sum(len(batch.labels) for batch, _ in window),
        }


def _serve(requests: IO[str], replies: IO[str]) -> None:
    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    request = _next(requests, "open")
    try:
        measurement = Measurement(Case.from_json(request["case"]), Path(request["folder"]))
    except UnavailableError as reason:
        reply(unavailable=str(reason))
        return
    with contextlib.closing(measurement.system) as system:
        reply(step_seconds=measurement.warm_up(), versions=system.versions())
        while (request := _next(requests, "run", "close"))["op"] == "run":
            reply(**measurement.run(request["steps"]))
        reply(counters=system.counters())


def _next(requests: IO[str], *allowed: str) -> dict[str, Any]:
    """The next request; the end of the input counts as "close"."""
    line = requests.readline()
    request: dict[str, Any] = json.loads(line) if line else {"op": "close"}
    if request["op"] not in allowed:
        raise ValueError(f"op {request['op']!r}: {' or '.join(allowed)} must come next")
    return request


def main() -> None:
    os.sched_setaffinity(0, map(int, sys.argv[1:]))  # before any library starts threads, which inherit it
    # Libraries print to standard output: keep it for replies, and send theirs to standard error.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
