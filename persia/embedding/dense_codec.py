"""Dense features, labels and metadata as bytes: the "dense section" of docs/wire_format.md.

Pure functions of bytes. What is read is never trusted: each length is checked against what is left before
it is used, and an array comes out as a view of the message.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from persia.errors import CorruptionError, InvalidTypeError

_MAGIC = 0x534E4450  # "PDNS"
_VERSION = 1
# Empty metadata and none are different to scripts.
_NO_META = 0xFFFFFFFF
_HEADER = struct.Struct("<6I")  # magic, version, batch_size, num_tensors, meta_bytes, reserved
_TENSOR = struct.Struct("<4BI")  # role, dtype, ndim, reserved, name_bytes
_FEATURE, _LABEL = 0, 1

# A dtype's number on the wire is its position.
DTYPES: tuple[np.dtype[np.generic], ...] = tuple(
    np.dtype(name)
    for name in (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "float32",
        "float64",
        "float16",
    )
)

DTYPE_NAMES = ", ".join(dtype.name for dtype in DTYPES)

Array = NDArray[np.generic]
NamedArray = tuple[str, Array]


@dataclass(frozen=True, kw_only=True)
class DenseSection:
    """A batch without its ID features. The arrays are views of the message they were decoded from."""

    features: list[NamedArray]
    labels: list[NamedArray]
    meta: bytes | None
    batch_size: int


def _padding(size: int) -> bytes:
    # Arrays are views of the message, and float64 and int64 must be aligned.
    return bytes(-size % 8)


def encode_dense(
    features: Sequence[NamedArray], labels: Sequence[NamedArray], meta: bytes | None, batch_size: int
) -> bytes:
    """Encodes named arrays whose first dimension is the batch. Raises InvalidTypeError for other dtypes."""
    meta_bytes = _NO_META if meta is None else len(meta)
    pieces = [_HEADER.pack(_MAGIC, _VERSION, batch_size, len(features) + len(labels), meta_bytes, 0)]
    if meta is not None:
        pieces += [meta, _padding(len(meta))]
    for role, arrays in ((_FEATURE, features), (_LABEL, labels)):
        for name, array in arrays:
            pieces += _encode_tensor(role, name, array)
    return b"".join(pieces)


def _encode_tensor(role: int, name: str, array: Array) -> list[bytes]:
    if array.dtype not in DTYPES:
        raise InvalidTypeError(f"array {name!r} has dtype {array.dtype}: use one of {DTYPE_NAMES}")
    name_utf8 = name.encode()
    data = np.ascontiguousarray(array).tobytes()
    return [
        _TENSOR.pack(role, DTYPES.index(array.dtype), array.ndim, 0, len(name_utf8)),
        struct.pack(f"<{array.ndim}Q", *array.shape),
        name_utf8,
        _padding(len(name_utf8)),
        data,
        _padding(len(data)),
    ]


class _Reader:
    def __init__(self, message: bytes | memoryview) -> None:
        self._view = memoryview(message).cast("B")
        self._position = 0

    def take(self, size: int, what: str) -> memoryview:
        """The next `size` bytes; skips their padding."""
        end = self._position + size
        # Sizes come from the message, and Python integers do not overflow, so one comparison is enough.
        if end + (-size % 8) > len(self._view):
            raise CorruptionError(
                f"dense section is cut short: {what} needs {size} bytes at {self._position} "
                f"of {len(self._view)}"
            )
        taken = self._view[self._position : end]
        self._position = end + (-size % 8)
        return taken

    def finish(self) -> None:
        if self._position != len(self._view):
            raise CorruptionError(f"dense section has {len(self._view) - self._position} bytes left over")


def decode_dense(message: bytes | memoryview) -> DenseSection:
    """Decodes a dense section in place.

    Raises:
        CorruptionError: the bytes are no dense section; the message says what is wrong with which tensor.
    """
    reader = _Reader(message)
    magic, version, batch_size, num_tensors, meta_bytes, _ = _HEADER.unpack(
        reader.take(_HEADER.size, "header")
    )
    if magic != _MAGIC or version != _VERSION:
        raise CorruptionError(
            f"not a dense section of version {_VERSION}: magic {magic:#x}, version {version}"
        )
    meta = None if meta_bytes == _NO_META else bytes(reader.take(meta_bytes, "meta"))
    features: list[NamedArray] = []
    labels: list[NamedArray] = []
    # No list is made for `num_tensors`: the number is not to be trusted until so many have been read.
    for number in range(num_tensors):
        role, named = _decode_tensor(reader, number, batch_size)
        (labels if role == _LABEL else features).append(named)
    reader.finish()
    return DenseSection(features=features, labels=labels, meta=meta, batch_size=batch_size)


def _decode_tensor(reader: _Reader, number: int, batch_size: int) -> tuple[int, NamedArray]:
    where = f"tensor {number}"
    role, dtype_number, ndim, _, name_bytes = _TENSOR.unpack(reader.take(_TENSOR.size, where))
    if role not in (_FEATURE, _LABEL) or dtype_number >= len(DTYPES) or not 1 <= ndim <= 32:
        raise CorruptionError(f"{where} has role {role}, dtype {dtype_number}, {ndim} dimensions")
    shape = struct.unpack(f"<{ndim}Q", reader.take(8 * ndim, f"{where}'s shape"))
    if shape[0] != batch_size:
        raise CorruptionError(f"{where} has {shape[0]} rows in a batch of {batch_size}")
    try:
        name = str(reader.take(name_bytes, f"{where}'s name"), "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptionError(f"{where}'s name is not UTF-8: {error}") from error
    dtype = DTYPES[dtype_number]
    data = reader.take(math.prod(shape) * dtype.itemsize, f"{where} ({name!r})")
    if dtype.kind == "b" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        # Compilers rely on it: such a byte may later count as both true and false.
        raise CorruptionError(f"{where} ({name!r}) has dtype bool, but bytes other than 0 and 1")
    try:
        return role, (name, np.frombuffer(data, dtype=dtype).reshape(shape))
    except (ValueError, OverflowError) as error:  # a shape like (batch, 0, 2**63), whose product passed
        raise CorruptionError(f"{where} ({name!r}) has an impossible shape {shape}: {error}") from error
