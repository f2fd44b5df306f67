"""The dense section byte by byte: what docs/wire_format.md writes down, and what a decoder must refuse."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia.embedding.dense_codec import DTYPES, decode_dense, encode_dense
from persia.errors import CorruptionError, InvalidTypeError

BOOL, UINT8, FLOAT32 = 0, 5, 8


def header(batch_size: int = 2, num_tensors: int = 1, meta_bytes: int = 0xFFFFFFFF) -> bytes:
    return struct.pack("<6I", 0x534E4450, 1, batch_size, num_tensors, meta_bytes, 0)


def tensor(
    shape: tuple[int, ...], data: bytes = b"", *, role: int = 0, dtype: int = FLOAT32, name: bytes = b""
) -> bytes:
    sizes = struct.pack("<4BI", role, dtype, len(shape), 0, len(name)) + struct.pack(
        f"<{len(shape)}Q", *shape
    )
    return sizes + padded(name) + padded(data)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def test_the_bytes_are_those_of_the_documentation() -> None:
    features = [("age", np.array([[1.5], [2.5]], np.float32))]
    labels = [("y", np.array([True, False]))]
    expected = (
        header(num_tensors=2, meta_bytes=2)
        + padded(b"hi")
        + tensor((2, 1), struct.pack("<2f", 1.5, 2.5), name=b"age")
        + tensor((2,), b"\x01\x00", role=1, dtype=BOOL, name=b"y")
    )
    assert encode_dense(features, labels, b"hi", 2) == expected


def test_no_meta_and_empty_meta_differ() -> None:
    assert decode_dense(encode_dense([], [], None, 1)).meta is None
    assert decode_dense(encode_dense([], [], b"", 1)).meta == b""


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from(DTYPES), st.text(max_size=9), st.booleans())
def test_arrays_survive_in_every_layout(
    data: st.DataObject, batch_size: int, dtype: np.dtype[np.generic], name: str, transposed: bool
) -> None:
    shape = (batch_size, *data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)))
    array = data.draw(hnp.arrays(dtype, shape[::-1] if transposed else shape))
    array = array.T if transposed else array  # not contiguous
    (found,) = decode_dense(encode_dense([(name, array)], [], None, batch_size)).features
    assert found[0] == name
    assert found[1].dtype == dtype
    assert found[1].shape == shape
    np.testing.assert_array_equal(found[1], array)


def test_arrays_lie_in_the_message() -> None:
    message = bytearray(encode_dense([("x", np.zeros(2, np.float32))], [], None, 2))
    (_, found) = decode_dense(memoryview(message)).features[0]
    assert np.shares_memory(found, np.frombuffer(message, np.uint8))


@pytest.mark.parametrize("dtype", ["uint64", ">f4", "complex64", "U3", "object", "datetime64[s]"])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(InvalidTypeError, match="'x' has dtype"):
        encode_dense([("x", np.zeros(2, dtype))], [], None, 2)


def test_every_truncation_is_refused() -> None:
    message = encode_dense([("a", np.ones((2, 3)))], [("b", np.ones(2, np.int8))], b"meta", 2)
    for length in range(len(message)):
        with pytest.raises(CorruptionError):
            decode_dense(message[:length])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (header(num_tensors=0) + bytes(8), "8 bytes left over"),
        (b"XXXX" + header(num_tensors=0)[4:], "magic"),
        (header(num_tensors=0, meta_bytes=2**32 - 2), "meta needs"),
        (header() + tensor((2,), role=2), "role 2"),
        (header() + tensor((2,), dtype=len(DTYPES)), "dtype 11"),
        (header() + tensor(()), "0 dimensions"),
        (header() + tensor((3,)), "3 rows in a batch of 2"),
        (header() + tensor((2, 2**63), bytes(8)), "tensor 0"),
        (header() + tensor((2, 0, 2**64 - 1)), "impossible shape"),
        (header() + tensor((2, 0, 2**62, 2**62)), "impossible shape"),
        (header() + tensor((2,), bytes(8), name=b"\xff"), "not UTF-8"),
        (header() + tensor((2,), b"\x02\x01", dtype=BOOL), "bytes other than 0 and 1"),
        (header(num_tensors=2**32 - 1) + tensor((2,), b"ab", dtype=UINT8), "tensor 1"),
    ],
)
def test_what_is_no_dense_section_is_refused(message: bytes, named: str) -> None:
    with pytest.raises(CorruptionError, match=named):
        decode_dense(message)
