"""All rows of a collection, read through a snapshot of its store while training may go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from persia import _native

if TYPE_CHECKING:
    from persia.nn.embedding_bag_collection import EmbeddingBagCollection

__all__ = ["all_rows"]

_PART_BYTES = 64 << 20  # read and decoded at a time
_READ_BYTES = 4 << 20
_HEAD_BYTES = 256


def all_rows(collection: EmbeddingBagCollection) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    """Signs [n] and rows [n, dim], every row once, in no order.

    Raises:
        FailedPreconditionError: a snapshot of the store is under way already.
        ResourceExhaustedError: other threads train faster than rows can be read.
    """
    num_parts = max(1, collection.stats().memory_bytes // _PART_BYTES)
    snapshot = collection._own_store().begin_snapshot(num_parts)
    try:
        for index in range(num_parts):
            yield from _rows_of(snapshot.part(index))
    finally:
        snapshot.close()


def _rows_of(part: _native.SnapshotPart) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    """A part has the bytes of a checkpoint file: header, blocks, footer, trailer."""
    file = bytearray()
    while chunk := part.read(_READ_BYTES):
        file += chunk
    header = _native.parse_checkpoint_header(bytes(file[:_HEAD_BYTES]))
    begin = header["header_bytes"]
    end, _ = _native.parse_checkpoint_trailer(bytes(file[-_native.CHECKPOINT_TRAILER_BYTES :]))
    assert isinstance(begin, int)
    by_dim: dict[int, list[_native.BlockRows]] = {}
    for block in _native.decode_checkpoint_blocks(memoryview(file)[begin:end]):
        by_dim.setdefault(block.dim, []).append(block)
    for blocks in by_dim.values():
        yield (
            np.concatenate([block.signs for block in blocks]),
            np.concatenate([block.embeddings for block in blocks]),
        )
