"""Reads a checkpoint for tools: its rows block by block, in spans that fit into memory, or all files to check
them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import CorruptionError, PersiaError
from persia.storage.location import Location
from persia.storage.manifest import NUM_VIRTUAL_SHARDS, EmbeddingSection, FileEntry, Manifest
from persia.storage.schema import RowSchema
from persia.storage.shard_file import ShardFile
from persia.storage.versions import resolve

if TYPE_CHECKING:
    from persia._native import BlockRows, SnapshotPart

_READ_BYTES = 16 << 20
_HEAD_BYTES = 256  # enough for any header


@dataclass(frozen=True)
class Span:
    """The virtual shards from `first` to `last`, both included."""

    first: int = 0
    last: int = NUM_VIRTUAL_SHARDS - 1

    def __call__(self, shards: NDArray[np.uint32]) -> NDArray[np.bool_]:
        within: NDArray[np.bool_] = (shards >= self.first) & (shards <= self.last)
        return within

    @classmethod
    def split(cls, num_spans: int) -> list[Span]:
        """All virtual shards, in about `num_spans` parts."""
        ends = np.unique(
            np.linspace(0, NUM_VIRTUAL_SHARDS, min(num_spans, NUM_VIRTUAL_SHARDS) + 1, dtype=int)
        )
        return [cls(int(first), int(end) - 1) for first, end in itertools.pairwise(ends)]


class RowReader:
    """Reads the rows of a checkpoint. The index of every file is checked when it is made."""

    def __init__(self, url: Any) -> None:
        """NotFoundError: no checkpoint there, or one without embeddings; CorruptionError names the file."""
        self.location = resolve(Location.of(url))
        self.manifest, _ = Manifest.read(self.location)
        self.section: EmbeddingSection = self.manifest.require_embeddings(self.location)
        self.section.require_files(self.location)
        self._files = [ShardFile(self.location, entry) for entry in self.section.files]

    def blocks(
        self, span: Span | None = None, on_bytes: Callable[[int], None] = lambda _: None
    ) -> Iterator[BlockRows]:
        """The blocks of some virtual shards, checked. `on_bytes` is called with the size of every read."""
        from persia import _native

        span = span or Span()
        for file in self._files:
            for chunk in file.chunks_of(span):
                with file.naming(chunk):
                    blocks = _native.decode_checkpoint_blocks(file.read(chunk))
                on_bytes(chunk.num_bytes)
                # A chunk also has the blocks between those of the span, as one large read is faster.
                yield from (block for block in blocks if span.first <= block.virtual_shard <= span.last)


class RowGroups:
    """Which slots a row belongs to, by the feature group in its sign."""

    def __init__(self, schema: RowSchema | None) -> None:
        # Where the checkpoint does not say what its signs are made of, they are IDs of one group.
        self._num_id_bits = np.uint64(64 if schema is None else 64 - schema.feature_index_prefix_bit)
        self._names: dict[int, str] = {}
        for name, slot in ({} if schema is None else schema.slots).items():
            others = self._names.get(slot.group)
            self._names[slot.group] = f"{others}+{name}" if others else name

    def ids(self, signs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The signs without their groups: IDs, or buckets of a hash stack."""
        ids: NDArray[np.uint64] = signs & np.uint64((1 << int(self._num_id_bits)) - 1)
        return ids

    def split(self, signs: NDArray[np.uint64]) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """(slots joined by "+", positions in `signs`) of every group that has any."""
        # A shift by all 64 bits gives 0 in numpy, unlike in C.
        groups = signs >> self._num_id_bits
        for group in np.unique(groups):
            yield self._names.get(int(group), f"group{group}"), np.flatnonzero(groups == group)


def snapshot_blocks(part: SnapshotPart) -> memoryview:
    """The blocks of a snapshot's part: its bytes are those of a file, without header, index and trailer."""
    from persia import _native

    # Grown in place: pieces joined at the end would need the memory twice.
    file = bytearray()
    while piece := part.read(_READ_BYTES):
        file += piece
    content = memoryview(file)
    begin = _native.parse_checkpoint_header(content[:_HEAD_BYTES])["header_bytes"]
    end, _ = _native.parse_checkpoint_trailer(content[-_native.CHECKPOINT_TRAILER_BYTES :])
    assert isinstance(begin, int), "as the stub says of it"
    return content[begin:end]


def check_files(
    directory: Location, manifest: Manifest, on_bytes: Callable[[int], None] = lambda _: None
) -> dict[str, str | None]:
    """Returns the error of each file by its path; None for one that is whole."""
    outcome: dict[str, str | None] = {}
    dense = () if manifest.dense is None else manifest.dense.files.values()
    rows = () if manifest.embeddings is None else manifest.embeddings.files
    checks = [(entry, _check_dense) for entry in dense] + [(entry, _check_rows) for entry in rows]
    # All files, also after a damaged one: the report shows how much of the checkpoint is whole.
    for entry, check in checks:
        try:
            check(directory, entry, on_bytes)
            outcome[entry.path] = None
        except PersiaError as failure:
            outcome[entry.path] = str(failure)
    return outcome


def _check_dense(directory: Location, entry: FileEntry, on_bytes: Callable[[int], None]) -> None:
    path = directory / entry.path
    num_bytes = path.size()
    # By its size first: a file that was cut short is reported without being read.
    if num_bytes != entry.num_bytes:
        raise CorruptionError(f"{path} has {num_bytes} bytes, the manifest says {entry.num_bytes}")
    digest = hashlib.sha256()
    for offset in range(0, num_bytes, _READ_BYTES):
        content = path.read_range(offset, _READ_BYTES)
        digest.update(content)
        on_bytes(len(content))
    if digest.hexdigest() != entry.checksum:
        raise CorruptionError(f"{path} is damaged: its checksum is not the manifest's")


def _check_rows(directory: Location, entry: FileEntry, on_bytes: Callable[[int], None]) -> None:
    from persia import _native

    file = ShardFile(directory, entry)
    for chunk in file.chunks_of(Span()):
        with file.naming(chunk):
            _native.decode_checkpoint_blocks(file.read(chunk))
        on_bytes(chunk.num_bytes)
