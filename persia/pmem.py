"""Pools of embedding rows on persistent memory or an ordinary file: made, looked at, checked, grown.

A pool is a directory with one file, `rows.pool`, in which every version of a row is a record of its own with
a checksum; docs/tiers.md describes it and what is durable when. Everything here works on
pools whose server is stopped; `inspect` also while one is running.

    >>> from persia import pmem
    >>> pmem.create("/mnt/pmem/ps0", size_bytes=64 << 30, kind="pmem")
    >>> pmem.inspect("/mnt/pmem/ps0").committed
    0
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia._native import HAS_PMEM, OpenPool, check_pool, create_pool, grow_pool, inspect_pool

__all__ = [
    "HAS_PMEM",
    "Pool",
    "PoolInfo",
    "PoolReport",
    "PoolRow",
    "check",
    "create",
    "grow",
    "inspect",
    "open",
]

Kind = Literal["file", "pmem"]
_EXTENT_BYTES = 16 << 20


@dataclass(frozen=True)
class PoolInfo:
    """The header of a pool."""

    pool_id: int  # drawn when the pool was made; the file `rules` beside it has the same
    committed: int  # the batch that the pool goes back to when it is opened; 0: no checkpoint yet
    num_rows: int  # of that batch
    file_bytes: int
    size_bytes: int  # that the file may grow to
    extent_bytes: int  # by which it grows
    schema: str  # what its rows consist of; empty: not known yet


@dataclass(frozen=True)
class PoolReport(PoolInfo):
    """The header of a pool, and the counts of a read of all its rows."""

    num_living: int  # rows
    num_ended: int  # versions of rows that recovery leaves out
    num_free: int  # slots without a whole record
    num_repeated: int  # signs that were found more than once
    num_unassigned_extents: int

    @property
    def is_whole(self) -> bool:
        """Whether every row of the committed batch is there, once and with its checksum."""
        # Free cells and versions that recovery leaves out are no damage.
        return self.num_living == self.num_rows and self.num_repeated == 0


class PoolRow(NamedTuple):
    """A row, and the batch that made these values."""

    embedding: NDArray[np.float32]  # [dim]
    state: NDArray[np.float32]  # [floats of the optimizer's state]
    scalar: int  # 32 bits: Adam's number of steps, or the bits of row-wise Adagrad's sum
    batch: int


class Pool(OpenPool):
    """The open pool in directory `path`, locked against other users until it is closed; a context manager.

    Opening brings the pool back to its committed batch, as a server does: `committed` is its number, and
    `signs()` are those of all rows, ascending. `close()` frees the pool for others.
    """

    def __init__(self, path: str | os.PathLike[str], *, kind: Kind = "file") -> None:
        """Raises NotFoundError (no pool), UnavailableError (in use), FailedPreconditionError (another format
        version, or kind "pmem" without libpmem) or CorruptionError (rows are lost)."""
        super().__init__(os.fspath(path), kind)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, sign: int) -> PoolRow:
        """Raises NotFoundError where the sign has no row."""
        return PoolRow(*self.row(sign))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def create(
    path: str | os.PathLike[str],
    *,
    size_bytes: int,
    kind: Kind = "file",
    schema: str = "",
    extent_bytes: int = _EXTENT_BYTES,
) -> PoolInfo:
    """Makes an empty pool in the directory `path`, which must exist and have none.

    Args:
        path: the directory.
        size_bytes: what the file may grow to; it begins small.
        kind: "file", or "pmem" for persistent memory; the file is the same, so either can open it later.
        schema: what the rows consist of; a server fills it in where it is empty.
        extent_bytes: by which the file grows, a multiple of 4096; a row must fit.

    Raises InvalidArgumentError for sizes out of range, NotFoundError where there is no such directory,
    FailedPreconditionError where it has a pool, StorageError where the system refuses.
    """
    # Read back below for the id, which this draws.
    create_pool(os.fspath(path), size_bytes, kind, schema, extent_bytes)
    return inspect(path)


def open(path: str | os.PathLike[str], *, kind: Kind = "file") -> Pool:
    """The pool of this `kind` in the directory `path`; see `Pool`."""
    return Pool(path, kind=kind)


def inspect(path: str | os.PathLike[str]) -> PoolInfo:
    """Reads the header of the pool in `path`, also while it is in use.

    Raises NotFoundError or CorruptionError.
    """
    return PoolInfo(**inspect_pool(os.fspath(path)))


def check(path: str | os.PathLike[str]) -> PoolReport:
    """Reads every row of the pool in `path`, changes nothing. Raises UnavailableError while it is in use."""
    return PoolReport(**check_pool(os.fspath(path)))


def grow(path: str | os.PathLike[str], size_bytes: int) -> PoolInfo:
    """Lets the pool in `path` grow to `size_bytes` from now on.

    Raises InvalidArgumentError where that is less than before, UnavailableError while the pool is in use.
    """
    grow_pool(os.fspath(path), size_bytes)
    return inspect(path)
