"""Rows of a checkpoint as files for other tools: Parquet, or NumPy arrays."""

from __future__ import annotations

import contextlib
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import InvalidArgumentError, StorageError
from persia.optional import needs
from persia.rows.reader import RowGroups, RowReader

FORMATS = ("parquet", "numpy")
_ROWS_AT_A_TIME = 65_536


_Rows = dict[str, NDArray[Any]]  # of one slot and one dim: ids, ages, embeddings, state


def export(
    reader: RowReader,
    output: pathlib.Path,
    kind: str,
    *,
    with_state: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, int]:
    """Writes one file, or one set of arrays, for each slot to `output`; returns rows by file name.

    Parquet: columns `id`, `age` (batches since the row was used), `embedding` (a list of its dim) and with
    `with_state` the optimizer's `state`. NumPy: `<slot>.ids.npy`, `.embeddings.npy`, `.state.npy`.
    """
    if kind not in FORMATS:
        raise InvalidArgumentError(f"format {kind!r} is not one of {', '.join(FORMATS)}")
    try:
        output.mkdir(parents=True, exist_ok=True)
        # Files of an earlier export would be taken for slots of this checkpoint.
        if any(output.iterdir()):
            raise InvalidArgumentError(f"{output} is not empty: export to a new directory")
        if kind == "parquet":
            return _to_parquet(reader, output, with_state, on_bytes)
        return _to_numpy(reader, output, with_state, on_bytes)
    except OSError as failure:
        raise StorageError(f"{output} could not be written: {failure}") from failure


def _slots(reader: RowReader, on_bytes: Callable[[int], None]) -> Iterator[tuple[str, _Rows]]:
    """(slot, rows) of every block."""
    groups = RowGroups(reader.section.schema)
    for block in reader.blocks(on_bytes=on_bytes):
        columns: _Rows = {
            "ids": groups.ids(block.signs),
            "ages": block.ages,
            "embeddings": block.embeddings,
            "state": block.state,
        }
        # A block has one dim, and slots of that dim are mixed in it.
        for name, where in groups.split(block.signs):
            yield name, {column: values[where] for column, values in columns.items()}


def _to_parquet(
    reader: RowReader, output: pathlib.Path, with_state: bool, on_bytes: Callable[[int], None]
) -> dict[str, int]:
    with needs("Parquet needs pyarrow", "pyarrow, or export to numpy"):
        import pyarrow
        from pyarrow import parquet

    counts: dict[str, int] = defaultdict(int)
    waiting: dict[str, list[Any]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        writers: dict[str, Any] = {}

        # Blocks are small. A Parquet row group for each of them would be slow to write and to read.
        def flush(name: str) -> None:
            table = pyarrow.concat_tables(waiting.pop(name)).combine_chunks()
            if name not in writers:
                writer = parquet.ParquetWriter(str(output / name), table.schema, compression="zstd")
                writers[name] = stack.enter_context(writer)
            writers[name].write_table(table)

        for slot, rows in _slots(reader, on_bytes):
            name = f"{slot}.parquet"
            waiting[name].append(_arrow_table(pyarrow, rows, with_state))
            counts[name] += len(rows["ids"])
            if sum(table.num_rows for table in waiting[name]) >= _ROWS_AT_A_TIME:
                flush(name)
        for name in list(waiting):
            flush(name)
    return dict(counts)


def _arrow_table(pyarrow: Any, rows: _Rows, with_state: bool) -> Any:
    columns = {
        "id": pyarrow.array(rows["ids"]),
        "age": pyarrow.array(rows["ages"]),
        "embedding": _arrow_lists(pyarrow, rows["embeddings"]),
    }
    if with_state:
        columns["state"] = _arrow_lists(pyarrow, rows["state"])
    return pyarrow.table(columns)


def _arrow_lists(pyarrow: Any, matrix: NDArray[np.float32]) -> Any:
    # A list of fixed size has no size 0.
    if matrix.shape[1] == 0:
        return pyarrow.nulls(len(matrix))
    values = pyarrow.array(np.ascontiguousarray(matrix).reshape(-1))
    return pyarrow.FixedSizeListArray.from_arrays(values, matrix.shape[1])


def _to_numpy(
    reader: RowReader, output: pathlib.Path, with_state: bool, on_bytes: Callable[[int], None]
) -> dict[str, int]:
    """Twice over the rows: an array's file begins with its length."""
    counts: dict[str, int] = defaultdict(int)
    dims: dict[str, tuple[int, int]] = {}
    for slot, rows in _slots(reader, lambda _: None):
        counts[slot] += len(rows["ids"])
        dims[slot] = rows["embeddings"].shape[1], rows["state"].shape[1]
    # Mapped files: an export may be larger than memory.
    arrays: dict[str, dict[str, Any]] = {}
    for slot, num_rows in counts.items():
        dim, state = dims[slot]
        shapes = {"ids": (np.uint64, (num_rows,)), "embeddings": (np.float32, (num_rows, dim))}
        if with_state and state:
            shapes["state"] = (np.float32, (num_rows, state))
        arrays[slot] = {
            what: np.lib.format.open_memmap(output / f"{slot}.{what}.npy", "w+", dtype=dtype, shape=shape)
            for what, (dtype, shape) in shapes.items()
        }
    filled: dict[str, int] = defaultdict(int)
    for slot, rows in _slots(reader, on_bytes):
        begin = filled[slot]
        filled[slot] = begin + len(rows["ids"])
        for what, array in arrays[slot].items():
            array[begin : filled[slot]] = rows[what]
    for files in arrays.values():
        for array in files.values():
            array.flush()
    return dict(counts)
