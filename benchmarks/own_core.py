"""A core to oneself for a moment, on a machine that others use at the same time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["own_core"]

_PRIORITY = 5


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


def _threads(processes: Iterable[int]) -> list[int]:
    return [int(task.name) for process in processes for task in Path(f"/proc/{process}/task").iterdir()]
