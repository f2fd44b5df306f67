"""How much of the processors a dump takes while its rows are trained."""

from __future__ import annotations

import os
from pathlib import Path

from persia.config import GlobalConfig

__all__ = ["dump_percent", "max_processors"]

_LEAST = 0.05  # of a processor: dumps must end, and a coordinator waits only so long for the next rows
# The limit of a container, where it has one of its own: "microseconds period", or "max period" ...
_CGROUP_V2 = ("cpu.max",)
# ... and of version 1; microseconds below zero are no limit.
_CGROUP_V1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
_CGROUPS = Path("/sys/fs/cgroup")


def dump_percent(config: GlobalConfig) -> int:
    """Of a server's dumps. No packet of changes is written during a dump, so there dumps do not rest."""
    if config.embedding_parameter_server_config.enable_incremental_update:
        return 100
    return config.common_config.checkpointing_config.dump_percent


def max_processors(percent: int) -> float:
    """`percent` of those that this process may use; 0, any number, for all of them."""
    return 0.0 if percent == 100 else max(_LEAST, percent / 100 * _available())


def _available() -> float:
    available = float(len(os.sched_getaffinity(0)))
    for names in (_CGROUP_V2, _CGROUP_V1):
        try:
            quota, period = " ".join((_CGROUPS / name).read_text() for name in names).split()
            if quota != "max" and int(quota) > 0:
                return min(available, int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue  # none of this version
    return available
