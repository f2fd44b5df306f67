"""Leaves a process little memory for pages of files, by a memory cgroup of its own; needs root."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CgroupError", "MemoryGroup", "memory_group"]

_CGROUPS = Path("/sys/fs/cgroup")
_PATIENCE_S = 30.0


class CgroupError(RuntimeError):
    """This machine lets nobody limit a process's memory, or not this user."""


class MemoryGroup:
    """One process, in `folder`. Version 1 and 2 of cgroups have other names for the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        is_first = "memory.limit_in_bytes" in os.listdir(folder)
        self._limit = folder / ("memory.limit_in_bytes" if is_first else "memory.max")
        self._used = folder / ("memory.usage_in_bytes" if is_first else "memory.current")
        self._pages = "cache" if is_first else "file"

    def leave(self, page_cache_bytes: int) -> None:
        """The process keeps what it has of its own, and gets that much for pages of files."""
        os.sync()  # pages that are not written yet cannot be dropped
        counts = dict(line.split() for line in (self._folder / "memory.stat").read_text().splitlines())
        limit = int(self._used.read_text()) - int(counts[self._pages]) + page_cache_bytes
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._limit.write_text(str(limit))
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise CgroupError(f"{self._limit} does not take {limit}: {error}") from error
            time.sleep(0.1)


@contextlib.contextmanager
def memory_group(pid: int, cgroups: Path = _CGROUPS) -> Iterator[MemoryGroup]:
    """For a process that has just begun: pages are counted where they were read first."""
    parent = cgroups / "memory" if (cgroups / "memory").is_dir() else cgroups
    folder = parent / f"persia-benchmark-{pid}"
    try:
        if (parent / "cgroup.subtree_control").exists():
            (parent / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise CgroupError(
            f"no memory cgroup can be made in {parent} ({error}): run as root on a machine that lets you, "
            "or leave --page-cache out"
        ) from error
    try:
        yield MemoryGroup(folder)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Once the process is gone, which takes the system a moment."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
