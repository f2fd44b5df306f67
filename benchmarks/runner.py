"""Runs comparisons: both sides in turns, each in its own process, on the same cores."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from benchmarks.cases import STATE_FLOATS, Case, Comparison
from benchmarks.machine import available_memory_bytes
from benchmarks.process import ChildError, ChildProcess, Interpreters
from benchmarks.workload import Workload, make_batches, save_batches

__all__ = ["BatchFiles", "Result", "Settings", "Side", "measure"]

_OTHER_BYTES_PER_ROW = 48  # index, LRU, row-wise state
_OTHER_BYTES = 1_500_000_000  # a process with its libraries and batches


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long and how often.

    Args:
        processes: fresh pairs of processes; where memory lies differs between processes.
        rounds: windows of each side in each process, taken in turns.
        seconds: of one window.
        cores: what the children are pinned to, the first one for one thread.
        interpreters: which Python runs which system.
    """

    processes: int
    rounds: int
    seconds: float
    cores: tuple[int, ...]
    interpreters: Interpreters


@dataclasses.dataclass
class Side:
    """What one side of a comparison gave: a rate per window, or the reason why there is none."""

    system: str
    samples: list[float] = dataclasses.field(default_factory=list)
    unavailable: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    counters: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Result:
    """A measured comparison. `samples` of both sides pair up: element i of each were taken in one turn."""

    comparison: Comparison
    malloc: str
    ours: Side
    theirs: Side


class BatchFiles:
    """Makes each workload's batches once and keeps them in files for as long as it is entered."""

    def __enter__(self) -> BatchFiles:
        self._folder = tempfile.TemporaryDirectory(prefix="persia-benchmarks-")
        self._made: dict[Workload, Path] = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def folder(self, workload: Workload) -> Path:
        """The folder with the batches of `workload`."""
        workload = dataclasses.replace(workload, new_share=0.0)  # the child adds new IDs
        if workload not in self._made:
            folder = Path(self._folder.name) / str(len(self._made))
            save_batches(make_batches(workload), folder)
            self._made[workload] = folder
        return self._made[workload]


def measure(comparison: Comparison, malloc: str, settings: Settings, files: BatchFiles) -> Result:
    """Both sides in turns, the one that goes first changing each round.

    A side that is not available, or fails, gets its reason in place of samples; the other one runs alone.
    """
    result = Result(comparison, malloc, Side(comparison.ours.system), Side(comparison.theirs.system))
    refusal = _refusal(comparison, settings)
    if refusal:
        result.ours.unavailable = result.theirs.unavailable = refusal
        return result
    for _ in range(settings.processes):
        _measure_once(result, settings, files)
    return result


def _refusal(comparison: Comparison, settings: Settings) -> str | None:
    """Why this machine cannot run both sides at a time; None when it can."""
    threads = max(comparison.ours.threads, comparison.theirs.threads)
    if threads > len(settings.cores):
        return f"needs {threads} cores, --cores has {len(settings.cores)}"
    needed = _expected_bytes(comparison.ours) + _expected_bytes(comparison.theirs)
    available = available_memory_bytes()
    if needed > available:
        return f"needs about {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available"
    return None


def _expected_bytes(case: Case) -> int:
    floats = case.dim * (1 + STATE_FLOATS[case.optimizer])
    return sum(case.table_rows) * (4 * floats + _OTHER_BYTES_PER_ROW) + _OTHER_BYTES


@dataclasses.dataclass
class _Running:
    side: Side
    child: ChildProcess
    steps: int


def _measure_once(result: Result, settings: Settings, files: BatchFiles) -> None:
    with ExitStack() as stack:
        pairs = ((result.ours, result.comparison.ours), (result.theirs, result.comparison.theirs))
        running = [
            started
            for side, case in pairs
            if side.unavailable is None
            and (started := _start(stack, side, case, result.malloc, settings, files)) is not None
        ]
        try:
            for one in _turns(running, settings.rounds):
                reply = one.child.run(one.steps)
                amount = reply["ids"] if result.comparison.unit == "IDs/s" else reply["samples"]
                one.side.samples.append(amount / reply["seconds"])
            for one in running:
                one.side.counters = one.child.close()["counters"]
        except ChildError as error:
            one.side.unavailable = str(error)
            one.side.samples.clear()


def _start(
    stack: ExitStack, side: Side, case: Case, malloc: str, settings: Settings, files: BatchFiles
) -> _Running | None:
    """The side's process, ready to run; None when it is not available, with the reason noted."""
    python = settings.interpreters.of(case.system)
    if python is None:
        side.unavailable = f"no interpreter: give --{case.system}-python"
        return None
    folder = files.folder(case.workload)
    child = stack.enter_context(ChildProcess(python, case, settings.cores, malloc))
    try:
        reply = child.open(folder)
    except ChildError as error:
        side.unavailable = str(error)
        return None
    if "unavailable" in reply:
        side.unavailable = reply["unavailable"]
        return None
    side.versions = reply["versions"]
    return _Running(side, child, math.ceil(settings.seconds / reply["step_seconds"]))


def _turns(running: Sequence[_Running], rounds: int) -> Iterator[_Running]:
    for index in range(rounds):
        yield from running if index % 2 == 0 else reversed(running)
