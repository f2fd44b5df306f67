"""Whether a checkpoint is whole: every file read, every checksum compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from persia.checkpoint.rows import Span
from persia.errors import CorruptionError, PersiaError
from persia.storage.location import Location
from persia.storage.manifest import FileEntry, Manifest
from persia.storage.shard_file import ShardFile

__all__ = ["check_files"]

_READ_BYTES = 16 << 20


def check_files(
    directory: Location, manifest: Manifest, on_bytes: Callable[[int], None] = lambda _: None
) -> dict[str, str | None]:
    """By path, what is wrong with a file; None for one that is whole."""
    outcome: dict[str, str | None] = {}
    dense = () if manifest.dense is None else manifest.dense.files.values()
    rows = () if manifest.embeddings is None else manifest.embeddings.files
    checks = [(entry, _check_dense) for entry in dense] + [(entry, _check_rows) for entry in rows]
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
