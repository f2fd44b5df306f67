"""Blocks of raw Criteo logs: read, checked, counted and transformed, each on its own.

A block is the lines that begin in one range of `block_bytes` of the uncompressed text. Its output depends on
nothing but these lines and the vocabulary, so every engine and every partition writes the same bytes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from persia.data.parquet import require_pyarrow
from persia.embedding import columns
from persia.errors import CorruptionError, FailedPreconditionError

MISSING, RARE = 0, 1  # IDs of an empty field, and of a value that is below the frequency limit

_MAX_LINE_BYTES = 1 << 20
# What pyarrow reads as an integer, up to 18 digits; nothing is a missing value.
_INTEGER = r"^$|^\s*(-?0*[0-9]{1,18}|0[xX][0-9a-fA-F]{1,15})\s*$"
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
    numerical: list[NDArray[np.int64]]  # a missing value is 0
    ids: list[tuple[NDArray[np.uint64], NDArray[np.int32]]]  # distinct IDs, and the place of each record's
    num_lines: int
    bad: list[tuple[int, str]] = field(default_factory=list)  # (line from 1 in the block, reason)


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
            is_last = not _read(path, file, 0)
            if index >= first:
                yield Block(index, data, raw.tell() - stored, is_last)
                stored = raw.tell()
            if is_last:
                return
            index += 1


def parse(data: bytes, num_numerical: int, num_categorical: int) -> Parsed:
    """The records of whole lines: label, numbers and categories, separated by tabs."""
    import pyarrow as pa

    numbers = ["label", *(f"num_{index}" for index in range(num_numerical))]
    categories = [f"cat_{index}" for index in range(num_categorical)]
    types = dict.fromkeys(categories, pa.dictionary(pa.int32(), pa.string()))
    bad: list[tuple[int, str]] = []
    try:
        table = _read_csv(data, {**dict.fromkeys(numbers, pa.int64()), **types}, bad)
        wrong: list[tuple[int, str]] = []
        rows = np.ones(table.num_rows, bool)
    except pa.ArrowInvalid:
        bad = []
        table = _read_csv(data, {**dict.fromkeys(numbers, pa.string()), **types}, bad)
        table, rows, wrong = _good_numbers(table, numbers)
    num_lines = len(rows) + len(bad)
    lines = np.delete(np.arange(1, num_lines + 1), [line - 1 for line, _ in bad])
    bad += [(int(lines[row]), reason) for row, reason in wrong]
    labels = table["label"].fill_null(-1).to_numpy()
    good = (labels == 0) | (labels == 1)
    for row in np.flatnonzero(~good):
        value = "empty" if labels[row] == -1 else str(labels[row])
        bad.append((int(lines[rows][row]), f"the label is {value}, must be 0 or 1"))
    table = table.filter(pa.array(good)) if not good.all() else table
    ids = []
    for name in categories:
        column = table[name].combine_chunks()
        column = column if isinstance(column, pa.DictionaryArray) else column.chunk(0)
        ids.append((_hashed(column.dictionary), column.indices.to_numpy()))
    values = [table[name].fill_null(0).to_numpy() for name in numbers[1:]]
    return Parsed(labels[good].astype(np.uint8), values, ids, num_lines, sorted(bad))


def count_ids(parsed: Parsed) -> NDArray[np.uint64]:
    """How often each ID occurs: the ends of the columns, then all IDs in order, then all counts."""
    ends, keys, counts = [0], [], []
    for distinct, places in parsed.ids:
        occurring = np.bincount(places, minlength=len(distinct)).astype(np.uint64)
        order = np.argsort(distinct)
        order = order[(distinct[order] != MISSING) & (occurring[order] > 0)]
        keys.append(distinct[order])
        counts.append(occurring[order])
        ends.append(ends[-1] + len(order))
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
        where = np.searchsorted(self.keys, ids)
        is_known = np.zeros(len(ids), bool)
        inside = where < len(self.keys)
        is_known[inside] = self.keys[where[inside]] == ids[inside]
        dtype = np.uint64 if self.places is None else np.int32
        final = np.where(ids == MISSING, MISSING, RARE).astype(dtype)
        final[is_known] = ids[is_known] if self.places is None else self.places[where[is_known]]
        return final


def transform(parsed: Parsed, vocabularies: list[Vocabulary] | None, log_offset: float) -> Any:
    """The table of a block: label uint8, num_* float32, cat_* uint64 or int32.

    A number x becomes ln(max(x + log_offset, 1)), so that no value is negative, infinite or NaN.
    """
    import pyarrow as pa

    arrays: dict[str, NDArray[Any]] = {"label": parsed.labels}
    for index, values in enumerate(parsed.numerical):
        arrays[f"num_{index}"] = np.log(np.maximum(values + log_offset, 1.0)).astype(np.float32)
    for index, (distinct, places) in enumerate(parsed.ids):
        final = distinct if vocabularies is None else vocabularies[index].apply(distinct)
        arrays[f"cat_{index}"] = final[places]
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


def _read_csv(data: bytes, types: dict[str, Any], bad: list[tuple[int, str]]) -> Any:
    import pyarrow as pa
    import pyarrow.csv as csv

    def refuse(row: Any) -> str:
        bad.append((row.number, f"it has {row.actual_columns} fields, must have {row.expected_columns}"))
        return "skip"

    if not data:
        return pa.table({name: pa.array([], kind) for name, kind in types.items()})
    return csv.read_csv(
        pa.BufferReader(data),
        # One chunk, so that a column has one dictionary.
        csv.ReadOptions(use_threads=False, column_names=list(types), block_size=len(data) + 1),
        csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False, invalid_row_handler=refuse
        ),
        csv.ConvertOptions(check_utf8=False, null_values=[""], strings_can_be_null=False, column_types=types),
    )


def _good_numbers(table: Any, names: list[str]) -> tuple[Any, NDArray[np.bool_], list[tuple[int, str]]]:
    """The rows whose numbers are integers or empty, which rows these are, and what is wrong in others."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows, wrong = np.ones(table.num_rows, bool), []
    for name in names:
        fits = pc.match_substring_regex(table[name], _INTEGER).to_numpy()
        for row in np.flatnonzero(rows & ~fits):
            wrong.append((int(row), f"{name} is {table[name][row].as_py()[:40]!r}, must be an integer"))
        rows &= fits
    table = table.filter(pa.array(rows))
    for name in names:
        text = pc.utf8_trim_whitespace(table[name])
        number = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text).cast(pa.int64())
        table = table.set_column(table.schema.get_field_index(name), name, number)
    return table, rows, wrong


def _hashed(texts: Any) -> NDArray[np.uint64]:
    import pyarrow.compute as pc

    if not len(texts):
        return np.empty(0, np.uint64)
    ids = np.array(columns.ids_of(texts, "a categorical column")[0])
    # Two hashes of 2^64 are moved, so that MISSING and RARE are no other value's ID.
    ids[ids <= RARE] += np.uint64(2)
    ids[pc.equal(texts, "").to_numpy(zero_copy_only=False)] = MISSING
    return ids


def _mapped(path: Path, dtype: Any) -> Any:
    return np.memmap(path, dtype, mode="r") if os.path.getsize(path) else np.empty(0, dtype)
