"""Blocks of raw Criteo logs: read, checked, counted and transformed, each on its own.

A block is the lines that begin in one range of `block_bytes` of the uncompressed text. Its output depends on
nothing but these lines and the vocabulary, so every engine and every partition writes the same bytes.
"""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from persia import _native
from persia.data.parquet import require_pyarrow
from persia.errors import CorruptionError, FailedPreconditionError

MISSING, RARE = 0, 1  # IDs of an empty field, and of a value that is below the frequency limit

_MAX_LINE_BYTES = 1 << 20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Block:
    """The text of one block of a file."""

    index: int
    data: bytes  # whole lines
    file_bytes: int  # of the file as it is stored, for progress
    is_last: bool


@dataclass
class Parsed:
    """The good records of a block."""

    labels: NDArray[np.uint8]
    numerical: NDArray[np.int64]  # [columns, records]; a missing value is 0
    ids: NDArray[np.uint64]  # [columns, records]; hashes, and MISSING
    num_lines: int
    num_bad: int
    bad: list[tuple[int, str]]  # (line from 1 in the block, reason) of the first ones


def blocks_of(path: Path, block_bytes: int, first: int = 0, end: int | None = None) -> Iterator[Block]:
    """Blocks `first` to `end` of a file; `.gz` and `.zst` are decompressed, and read from their begin.

    Raises CorruptionError for a file that cannot be decompressed, or a line of more than 1 MiB.
    """
    with open(path, "rb") as raw, _lines(path, raw) as file:
        position, index = 0, 0
        if first and file is raw:
            index = first
            raw.seek(first * block_bytes - 1)
            position = raw.tell() + len(_rest_of_line(path, file))
        stored = raw.tell()
        while end is None or index < end:
            data = _read(path, file, max(0, (index + 1) * block_bytes - position))
            if data and not data.endswith(b"\n"):
                data += _rest_of_line(path, file)
            position += len(data)
            if index == 0:
                data = data.removeprefix(codecs.BOM_UTF8)
            is_last = not _read(path, file, 0)
            if index >= first:
                yield Block(index, data, raw.tell() - stored, is_last)
                stored = raw.tell()
            if is_last:
                return
            index += 1


def parse(data: bytes, num_numerical: int, num_categorical: int) -> Parsed:
    """The records of whole lines: label, numbers and categories, separated by tabs."""
    return Parsed(*_native.parse_clicks(data, num_numerical, num_categorical))


def count_ids(parsed: Parsed) -> NDArray[np.uint64]:
    """How often each ID occurs: the ends of the columns, then all IDs in order, then all counts."""
    ends, keys, counts = [0], [], []
    for ids in parsed.ids:
        distinct, occurring = np.unique(ids, return_counts=True)
        known = distinct != MISSING
        keys.append(distinct[known])
        counts.append(occurring[known].astype(np.uint64))
        ends.append(ends[-1] + len(keys[-1]))
    return np.concatenate([np.array(ends, np.uint64), *keys, *counts])


@dataclass(frozen=True)
class Vocabulary:
    """The IDs of a column that are frequent enough, memory-mapped."""

    keys: NDArray[np.uint64]  # in order
    places: NDArray[np.int32] | None  # contiguous IDs of `keys`; None: hashed IDs stay

    @classmethod
    def open(cls, path: Path, *, contiguous: bool) -> Vocabulary:
        """Reads what `merge_counts` wrote."""
        keys: NDArray[np.uint64] = _mapped(path.with_suffix(".keys"), np.uint64)
        return cls(keys, _mapped(path.with_suffix(".ids"), np.int32) if contiguous else None)

    def apply(self, ids: NDArray[np.uint64]) -> NDArray[Any]:
        """The final ID of each hashed ID."""
        # In order, so that the search touches each page of the vocabulary once.
        ids, places = np.unique(ids, return_inverse=True)
        where = np.searchsorted(self.keys, ids)
        is_known = np.zeros(len(ids), bool)
        inside = where < len(self.keys)
        is_known[inside] = self.keys[where[inside]] == ids[inside]
        dtype = np.uint64 if self.places is None else np.int32
        final = np.where(ids == MISSING, MISSING, RARE).astype(dtype)
        final[is_known] = ids[is_known] if self.places is None else self.places[where[is_known]]
        return final[places]


def transform(parsed: Parsed, vocabularies: list[Vocabulary] | None, log_offset: float) -> Any:
    """The table of a block: label uint8, num_* float32, cat_* uint64 or int32.

    A number x becomes ln(max(x + log_offset, 1)), so that no value is negative, infinite or NaN.
    """
    import pyarrow as pa

    arrays: dict[str, NDArray[Any]] = {"label": parsed.labels}
    for index, values in enumerate(parsed.numerical):
        arrays[f"num_{index}"] = np.log(np.maximum(values + log_offset, 1.0)).astype(np.float32)
    for index, ids in enumerate(parsed.ids):
        arrays[f"cat_{index}"] = ids if vocabularies is None else vocabularies[index].apply(ids)
    return pa.table(arrays)


def _lines(path: Path, raw: IO[bytes]) -> Any:
    pa = require_pyarrow()
    if path.suffix not in _COMPRESSIONS:
        return raw
    name = _COMPRESSIONS[path.suffix]
    if not pa.Codec.is_available(name):
        raise FailedPreconditionError(
            f"{path}: this pyarrow has no {name}: install another, or decompress it"
        )
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), name), 1 << 20)


def _read(path: Path, file: Any, num_bytes: int) -> bytes:
    """`num_bytes`, or what is left; of 0, one that is not consumed."""
    try:
        return bytes(file.read(num_bytes) if num_bytes else file.peek(1)[:1])
    except OSError as error:
        raise CorruptionError(f"{path} cannot be read or decompressed ({error}): copy it again") from error


def _rest_of_line(path: Path, file: Any) -> bytes:
    line = bytes(file.readline(_MAX_LINE_BYTES))
    if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
        raise CorruptionError(
            f"{path} has a line of more than {_MAX_LINE_BYTES} bytes: it is no log in Criteo's format"
        )
    return line


def _mapped(path: Path, dtype: Any) -> Any:
    return np.memmap(path, dtype, mode="r") if os.path.getsize(path) else np.empty(0, dtype)
