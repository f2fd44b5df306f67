"""A file of rows, which is written from front to back and read by the index at its end, and other files.

The native module encodes and decodes the bytes (docs/checkpoint_format.md). This module moves them: in a job
with another number of servers, a server reads only the ranges with its rows, in few and large reads.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from persia.errors import CorruptionError, InvalidArgumentError, NotFoundError
from persia.storage.location import Location
from persia.storage.manifest import FileEntry
from persia.storage.pages import PAGES_ENDING, PagedFile, PageHasher

if TYPE_CHECKING:
    from persia._native import SnapshotPart

# virtual shards [num_blocks] -> bool [num_blocks]
ShardFilter = Callable[[NDArray[np.uint32]], NDArray[np.bool_]]

# Both bound the memory of a thread, and are large enough that a request's latency does not count.
_WRITE_BYTES = 4 << 20
_READ_BYTES = 8 << 20
# Another request to an object store takes as long as reading this much.
_MAX_GAP_BYTES = 512 << 10
_CHECKSUM_OFFSET = 8  # of a block; blocks begin at multiples of 8


def write_shard_file(
    part: SnapshotPart,
    directory: Location,
    path: str,
    on_bytes: Callable[[int], None],
    *,
    with_pages: bool = False,
) -> FileEntry:
    """Writes all of `part` to `directory/path` and reads back its index, as the storage has it.

    `on_bytes` is called with the size of every piece; what it raises breaks the file off. `with_pages` also
    writes the digests of all pages, for a manifest that is signed.
    """
    location, num_bytes = directory / path, 0
    hasher = PageHasher() if with_pages else None
    with location.create() as file:
        while piece := part.read(_WRITE_BYTES):
            file.write(piece)
            if hasher is not None:
                hasher.update(piece)
            num_bytes += len(piece)
            on_bytes(len(piece))
    # From the storage, not from the bytes sent: the manifest must vouch for what readers will get.
    source: Location | PagedFile = location
    pages: str | None = None
    if hasher is not None:
        digests = hasher.finish()
        with (directory / f"{path}{PAGES_ENDING}").create() as file:
            file.write(digests)
        # By the digests of what was sent: the storage could answer with the index of another file.
        source, pages = PagedFile(location, num_bytes, digests), hashlib.sha256(digests).hexdigest()
    _, checksum = _read_index(location, source, num_bytes)
    num_rows = int(part.num_rows)
    return FileEntry(path=path, num_bytes=num_bytes, checksum=checksum, num_rows=num_rows, pages=pages)


def write_files(directory: Location, folder: str, contents: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Writes files of other kinds, by name, to `folder` below `directory`."""
    files = {}
    for name, content in contents.items():
        path = f"{folder}/{name}"
        with (directory / path).create() as file:
            file.write(content)
        checksum = hashlib.sha256(content).hexdigest()
        files[name] = FileEntry(path=path, num_bytes=len(content), checksum=checksum, num_rows=0)
    return files


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A range of a file to be read at once: whole blocks."""

    offset: int
    num_bytes: int
    num_rows: int  # of the blocks that were asked for
    blocks: slice  # all that are in it, in the index


class ShardFile:
    """A file of a checkpoint, its index read and checked against the manifest."""

    def __init__(self, directory: Location, entry: FileEntry) -> None:
        """NotFoundError: there is no such file; CorruptionError: it is not the one the manifest means."""
        self.location = directory / entry.path
        try:
            num_bytes = self.location.size()
        except NotFoundError as failure:
            raise NotFoundError(
                f"{self.location} is missing, and the manifest names it: the checkpoint is not whole"
            ) from failure
        if num_bytes != entry.num_bytes:
            raise CorruptionError(
                f"{self.location} has {num_bytes} bytes, the manifest says {entry.num_bytes}: it was "
                "truncated or replaced"
            )
        self._source: Location | PagedFile = self.location
        if entry.pages is not None:
            self._source = PagedFile.open(self.location, num_bytes, entry.pages)
        self.blocks, checksum = _read_index(self.location, self._source, num_bytes)
        if checksum != entry.checksum:
            raise CorruptionError(
                f"{self.location} is not the file that the manifest means: its index is another dump's"
            )
        self._starts = self.blocks["offset"].astype(np.int64)
        num_rows = int(self.blocks["num_rows"].sum(dtype=np.uint64))
        if num_rows != entry.num_rows:
            raise CorruptionError(
                f"{self.location} has {num_rows} rows by its index, {entry.num_rows} by the manifest"
            )

    def chunks_of(self, shards: ShardFilter) -> list[Chunk]:
        """Reads that hold all blocks of some virtual shards, and few others between them."""
        (mine,) = np.nonzero(shards(self.blocks["virtual_shard"]))
        starts, num_rows = self._starts[mine], self.blocks["num_rows"][mine]
        ends = starts + self.blocks["length"][mine].astype(np.int64)
        chunks, first = [], 0
        while first < len(mine):
            # As many blocks as fit into one read, at least one; then up to the first gap worth a request.
            last = max(first, int(np.searchsorted(ends, starts[first] + _READ_BYTES, side="right")) - 1)
            gaps = np.flatnonzero(starts[first + 1 : last + 1] - ends[first:last] > _MAX_GAP_BYTES)
            last = first + int(gaps[0]) if gaps.size else last
            chunks.append(
                Chunk(
                    offset=int(starts[first]),
                    num_bytes=int(ends[last] - starts[first]),
                    num_rows=int(num_rows[first : last + 1].sum(dtype=np.uint64)),
                    blocks=slice(int(mine[first]), int(mine[last]) + 1),
                )
            )
            first = last + 1
        return chunks

    def read(self, chunk: Chunk) -> bytes:
        """Reads whole blocks, and checks that each begins with the checksum that the index has."""
        content = self._source.read_range(chunk.offset, chunk.num_bytes)
        if len(content) != chunk.num_bytes:
            raise CorruptionError(f"it ends at {chunk.offset + len(content)}, shorter than before")
        # The decoder checks each block by its own checksum. This finds a sound block of another file.
        words = np.frombuffer(content, "<u8")
        checksums = words[(self._starts[chunk.blocks] - chunk.offset + _CHECKSUM_OFFSET) // words.itemsize]
        if not np.array_equal(checksums, self.blocks["checksum"][chunk.blocks]):
            raise CorruptionError("a block has another checksum than in the index: damaged or replaced")
        return content

    @contextlib.contextmanager
    def naming(self, chunk: Chunk) -> Iterator[None]:
        """Adds the file and the bytes to an error about them."""
        try:
            yield
        except (CorruptionError, InvalidArgumentError) as failure:
            where = f"{self.location}, bytes {chunk.offset} to {chunk.offset + chunk.num_bytes}"
            raise type(failure)(f"{where}: {failure}") from failure


def _read_index(
    location: Location, source: Location | PagedFile, num_bytes: int
) -> tuple[NDArray[np.void], str]:
    """The blocks of a file by its index, and the checksum that the manifest has of it. `source` reads it."""
    from persia import _native

    trailer_bytes = _native.CHECKPOINT_TRAILER_BYTES
    if num_bytes < trailer_bytes:
        raise CorruptionError(f"{location} has {num_bytes} bytes: it is no file of rows")
    # Nothing in it is trusted: offsets could lead outside of the file, or make a read as large as memory.
    trailer = source.read_range(num_bytes - trailer_bytes, trailer_bytes)
    try:
        offset, length = _native.parse_checkpoint_trailer(trailer)
        if offset + length != num_bytes - trailer_bytes:
            raise CorruptionError(f"its footer ends at {offset + length}, not at the trailer")
        footer = source.read_range(offset, length)
        blocks = _native.parse_checkpoint_footer(footer)
        ends = blocks["offset"] + blocks["length"]
        if len(blocks) and (
            ends.max() > offset or (blocks["offset"] % 8).any() or blocks["length"].min() < 48
        ):
            raise CorruptionError("its index names blocks that cannot be")
    except CorruptionError as failure:
        raise CorruptionError(f"{location}: {failure}") from failure
    # The header is in the checksum: it has the settings that the rows are decoded by.
    header = source.read_range(0, int(blocks["offset"][0]) if len(blocks) else offset)
    return blocks, hashlib.sha256(header + footer + trailer).hexdigest()
