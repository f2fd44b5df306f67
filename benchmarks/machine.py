"""The machine a result belongs to."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["available_memory_bytes", "describe_machine", "resident_bytes"]


def available_memory_bytes() -> int:
    """What a new process may use without swapping."""
    return _meminfo()["MemAvailable"]


def resident_bytes() -> int:
    """This process's memory that is present."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def describe_machine() -> dict[str, Any]:
    """Processor, memory, kernel, and what else could bear on a timed figure."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    cpu = {key.strip(): value.strip() for key, _, value in pairs}
    return {
        "processor": cpu.get("model name", platform.processor()),
        "family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "cache": cpu.get("cache size", "?"),
        "simd": [flag for flag in ("avx2", "avx512f") if flag in cpu.get("flags", "").split()],
        "cores": sorted(os.sched_getaffinity(0)),
        "memory_bytes": _meminfo()["MemTotal"],
        "transparent_huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"
