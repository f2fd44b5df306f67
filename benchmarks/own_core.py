"""A core to oneself for a moment, on a machine that others use at the same time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["own_core", "preferred"]

_PRIORITY = 5
_NICE = -19


@contextlib.contextmanager
def own_core(core: int | None, processes: Iterable[int]) -> Iterator[None]:
    """All threads of `processes` run on `core` alone, before everything else there. None: nothing changes.

    Threads that are nice keep giving way to the others. For seconds: whoever else wants the core waits.
    PermissionError without the right to set real-time priorities.
    """
    if core is None:
        yield
        return
    before = {}
    try:
        for thread in _threads(processes):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                before[thread] = os.sched_getaffinity(thread)
                priority = _PRIORITY - (os.getpriority(os.PRIO_PROCESS, thread) > 0)
                os.sched_setaffinity(thread, {core})
                os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))
        yield
    finally:
        anywhere = next(iter(before.values()), {core})
        for thread in _threads(processes):  # also those that were started meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.sched_setaffinity(thread, before.get(thread, anywhere))


@contextlib.contextmanager
def preferred(processes: Iterable[int]) -> Iterator[None]:
    """Gives `processes` most of their cores, as `nice` does, where others use them.

    Real-time threads of one core do not interrupt each other, as those of a server should. Threads that are
    nice stay behind the others. PermissionError without the right to lower nice values.
    """
    processes = list(processes)
    _renice(processes, _NICE)
    try:
        yield
    finally:
        _renice(processes, -_NICE)


def _renice(processes: Iterable[int], change: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # systems without groups for sessions
            Path(f"/proc/{process}/autogroup").write_text(str(min(change, 0)))
    for thread in _threads(processes):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + change)


def _threads(processes: Iterable[int]) -> list[int]:
    return [int(task.name) for process in processes for task in Path(f"/proc/{process}/task").iterdir()]
