"""How much of the processors a dump takes while its rows are trained."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["max_processors"]

_LEAST = 0.05  # a coordinator waits only so long for a dump's next byte
_LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/cpu.max")  # "microseconds period", or "max period"


def max_processors(percent: int) -> float:
    """`percent` of those that this process may use; 0, any number, for all of them."""
    return 0.0 if percent == 100 else max(_LEAST, percent / 100 * _available())


def _available() -> float:
    available = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = _LIMIT_OF_CONTAINER.read_text().split()
        return available if quota == "max" else min(available, int(quota) / int(period))
    except (OSError, ValueError):  # no container with a limit, or one of cgroup version 1
        return available
