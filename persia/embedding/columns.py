"""Columns of a data frame as compressed rows: Arrow's arrays, and pandas' by way of them.

Arrow keeps lists as offsets and values, which is nearly the form that is wanted: what is left is to leave
nulls out and to bring integers to 64 bits. pyarrow is imported when it is first needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia import _native
from persia.errors import InvalidTypeError

_Rows = tuple[NDArray[Any], NDArray[np.uint32]]  # values, offsets


def ids_of(column: Any, what: str) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """(ids, offsets) of a column of integers or strings, or of lists of them. Raises InvalidTypeError."""
    pa = _pyarrow()
    values, offsets = _rows(pa, _array(pa, column, what))
    return _ids(pa, values, what), offsets


def weights_of(column: Any, what: str) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """(weights, offsets) of a column of floats, or of lists of them. Raises InvalidTypeError."""
    pa = _pyarrow()
    values, offsets = _rows(pa, _array(pa, column, what))
    if not (pa.types.is_floating(values.type) or pa.types.is_null(values.type)):
        raise InvalidTypeError(f"{what} is a column of {values.type}: pass floats, or lists of them")
    return values.cast(pa.float32()).to_numpy(zero_copy_only=False), offsets


def of_pandas(series: Any, what: str) -> Any:
    """The Arrow array of a pandas series. Raises InvalidTypeError for values that Arrow has no type for."""
    pa = _pyarrow()
    try:
        return pa.Array.from_pandas(series)
    except (pa.ArrowException, TypeError) as error:
        raise InvalidTypeError(f"{what} is no column of IDs: {error}") from error


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError as error:
        raise InvalidTypeError(
            f"columns need pyarrow, which cannot be imported ({error}): pip install 'persia[arrow]'"
        ) from error
    return pyarrow


def _array(pa: Any, column: Any, what: str) -> Any:
    """One array, with values in place of dictionary codes."""
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        try:
            make = pa.chunked_array if hasattr(column, "__arrow_c_stream__") else pa.array
            column = make(column)
        except (pa.ArrowException, TypeError) as error:
            raise InvalidTypeError(f"{what} is a {type(column).__name__}: pass an Arrow column") from error
    # Chunks are joined: offsets of a feature refer to one array.
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _rows(pa: Any, column: Any) -> tuple[Any, NDArray[np.uint32]]:
    """The values that are not null, and the offsets of the samples among them."""
    counts = np.ones(len(column), np.int64)
    if _is_list(pa, column.type):
        lengths = pa.compute.list_value_length(column).fill_null(0)
        counts = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
        column = pa.compute.list_flatten(column)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
    # Nulls inside lists are still counted here. The number of values that are not null before each offset
    # takes their place below.
    offsets = _offsets(counts)
    if column.null_count:
        is_there = column.is_valid().to_numpy(zero_copy_only=False)
        offsets = _offsets(is_there)[offsets]
        column = column.drop_null()
    return column, offsets.astype(np.uint32)


def _is_list(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _offsets(counts: NDArray[Any]) -> NDArray[np.int64]:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _ids(pa: Any, values: Any, what: str) -> NDArray[np.uint64]:
    kind = values.type
    if pa.types.is_null(kind):
        return np.zeros(0, np.uint64)
    if pa.types.is_integer(kind):
        # Signed integers keep their bits, as in `from_csr`: -1 is the largest ID.
        wide = pa.uint64() if pa.types.is_unsigned_integer(kind) else pa.int64()
        array: NDArray[Any] = values.cast(wide).to_numpy(zero_copy_only=False)
        return array.view(np.uint64)
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if any(is_text(kind) for is_text in text) or kind in (pa.string_view(), pa.binary_view()):
        return _hashed(pa, values)
    raise InvalidTypeError(f"{what} is a column of {kind}: pass integers or strings, or lists of them")


def _hashed(pa: Any, strings: Any) -> NDArray[np.uint64]:
    if len(strings) == 0:
        return np.zeros(0, np.uint64)
    # One layout for all kinds of text: offsets of 64 bits and one buffer of bytes, which is hashed in place.
    strings = strings.cast(pa.large_binary())
    _, offsets, data = strings.buffers()
    all_offsets = np.frombuffer(offsets, np.int64)
    part = all_offsets[strings.offset : strings.offset + len(strings) + 1]
    return _native.hash_string_buffer(part, data if data is not None else b"")
