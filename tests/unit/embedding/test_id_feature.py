"""ID features made of compressed rows, strings, columns of data frames and torchrec's tensors; weights."""

from __future__ import annotations

import importlib
import itertools
import struct
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import _native
from persia.embedding.data import (
    MAX_BATCH_SIZE,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    PersiaBatch,
    hash_strings,
)
from persia.errors import CorruptionError, InvalidArgumentError, InvalidTypeError, PersiaError

Samples = list[list[int]]


def u64(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def f32(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


def samples_of(feature: IDTypeFeature) -> Samples:
    bounds = feature.offsets.tolist()
    return [feature.ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]


def through_bytes(feature: IDTypeFeature) -> IDTypeFeature:
    """What arrives of it."""
    message = PersiaBatch([feature], requires_grad=False, labels=[]).to_bytes()
    return PersiaBatch.from_bytes(message).id_type_features[0]


# --- signed IDs and tensors ---


SIGNED: dict[str, Callable[[], IDTypeFeature]] = {
    "lil": lambda: IDTypeFeature("a", [np.array([-1, 3]), np.array([], np.int64), u64(7)]),
    "lil strided": lambda: IDTypeFeature("a", [np.array([-1, 0, 3])[::2], u64(), u64(7)]),
    "lil tensors": lambda: IDTypeFeature(
        "a", [torch.tensor([-1, 3]), torch.empty(0, dtype=torch.int64), torch.tensor([7])]
    ),
    "csr tensors": lambda: IDTypeFeature.from_csr("a", torch.tensor([-1, 3, 7]), torch.tensor([0, 2, 2, 3])),
}


@pytest.mark.parametrize("case", SIGNED)
def test_signed_ids_are_the_unsigned_ones_of_the_same_bits(case: str) -> None:
    assert samples_of(through_bytes(SIGNED[case]())) == [[2**64 - 1, 3], [], [7]]


@pytest.mark.parametrize("ids", [np.array([-1, 3]), torch.tensor([-1, 3]), torch.tensor([-1, 0, 3])[::2]])
@pytest.mark.parametrize("skip", ["0", "1"])
def test_single_signed_ids(ids: Any, skip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_SKIP_CHECK_DATA", skip)
    feature = IDTypeFeatureWithSingleID("a", ids, f32(0.5, 2.0))
    assert samples_of(through_bytes(feature)) == [[2**64 - 1], [3]]


def test_a_tensor_of_another_dtype_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="'a' is an array of float32: pass a numpy array of uint64 or"):
        IDTypeFeatureWithSingleID("a", torch.ones(2))


# --- compressed rows ---


def test_compressed_rows_are_kept_as_they_are() -> None:
    values, offsets = u64(5, 6, 7), np.array([0, 2, 2, 3], np.uint32)
    feature = IDTypeFeature.from_csr("a", values, offsets)
    assert np.shares_memory(feature.ids, values)
    assert np.shares_memory(feature.offsets, offsets)
    assert samples_of(through_bytes(feature)) == [[5, 6], [], [7]]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_offsets_of_any_integers_and_negative_ids(dtype: str) -> None:
    feature = IDTypeFeature.from_csr("a", np.array([-1, 3]), np.array([0, 0, 2], dtype))
    assert samples_of(feature) == [[], [2**64 - 1, 3]]


def offsets(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


BAD_ROWS: dict[str, tuple[Callable[[], object], type[PersiaError], str]] = {
    "values list": (
        lambda: IDTypeFeature.from_csr("a", [1], offsets(0, 1)),
        InvalidTypeError,
        "values is a list",
    ),  # type: ignore[arg-type]
    "values dtype": (
        lambda: IDTypeFeature.from_csr("a", np.zeros(1), offsets(0, 1)),
        InvalidTypeError,
        "values is an array of float64",
    ),
    "values ndim": (
        lambda: IDTypeFeature.from_csr("a", u64(1).reshape(1, 1), offsets(0, 1)),
        InvalidArgumentError,
        r"values has shape \(1, 1\)",
    ),
    "offsets dtype": (
        lambda: IDTypeFeature.from_csr("a", u64(1), np.array([0.0, 1.0])),
        InvalidTypeError,
        "offsets is an array of float64",
    ),
    "offsets missing": (
        lambda: IDTypeFeature.from_csr("a", u64(), offsets()),
        InvalidArgumentError,
        "-1 samples",
    ),
    "no samples": (lambda: IDTypeFeature.from_csr("a", u64(), offsets(0)), InvalidArgumentError, "0 samples"),
    "too many samples": (
        lambda: IDTypeFeature.from_csr("a", u64(), np.zeros(MAX_BATCH_SIZE + 2, np.int64)),
        InvalidArgumentError,
        "65536 samples",
    ),
    "offsets first": (
        lambda: IDTypeFeature.from_csr("a", u64(1), offsets(1, 1)),
        InvalidArgumentError,
        "begin with 1",
    ),
    "offsets last": (
        lambda: IDTypeFeature.from_csr("a", u64(1), offsets(0, 2)),
        InvalidArgumentError,
        "end with 2",
    ),
    "offsets fall": (
        lambda: IDTypeFeature.from_csr("a", u64(1), offsets(0, 2, 1)),
        InvalidArgumentError,
        "decrease",
    ),
    "offsets below 0": (
        lambda: IDTypeFeature.from_csr("a", u64(1), offsets(0, -1, 1)),
        InvalidArgumentError,
        "decrease",
    ),
    "name": (lambda: IDTypeFeature.from_csr("", u64(1), offsets(0, 1)), InvalidTypeError, "name"),
    "weights dtype": (
        lambda: IDTypeFeature.from_csr("a", u64(1), offsets(0, 1), np.ones(1)),  # type: ignore[arg-type]
        InvalidTypeError,
        "weights of feature 'a' is an array of float64",
    ),
    "weights number": (
        lambda: IDTypeFeature.from_csr("a", u64(1), offsets(0, 1), f32(1, 2)),
        InvalidArgumentError,
        "1 IDs and 2 weights",
    ),
    "weights nan": (
        lambda: IDTypeFeature.from_csr("a", u64(1), offsets(0, 1), f32(float("nan"))),
        InvalidArgumentError,
        "'a' has a weight that is NaN",
    ),
    "lil weights": (
        lambda: IDTypeFeature("a", [u64(1), u64(1, 2)], [f32(1), f32(1)]),
        InvalidArgumentError,
        "sample 1: 2 IDs and 1 weights",
    ),
    "lil weights samples": (
        lambda: IDTypeFeature("a", [u64(1), u64()], [f32(1)]),
        InvalidArgumentError,
        "2 samples of IDs and 1 of weights",
    ),
    "lil weights dtype": (
        lambda: IDTypeFeature("a", [u64(1)], [np.ones(1)]),  # type: ignore[list-item]
        InvalidTypeError,
        "weights of feature 'a', sample 0: expected dtype float32, found float64",
    ),
    "lil weights infinite": (
        lambda: IDTypeFeature("a", [u64(1)], [f32(float("inf"))]),
        InvalidArgumentError,
        "'a' has a weight",
    ),
    "lil weights none": (
        lambda: IDTypeFeature("a", [u64(1)], 5),
        InvalidTypeError,
        "weights of feature 'a' is a int",
    ),  # type: ignore[arg-type]
    "single weights": (
        lambda: IDTypeFeatureWithSingleID("a", u64(1), f32(1, 2)),
        InvalidArgumentError,
        "1 IDs and 2 weights",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_what_does_not_fit_is_named(case: str) -> None:
    make, error, message = BAD_ROWS[case]
    with pytest.raises(error, match=message):
        make()


# --- weights ---


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**64 - 1), st.floats(-9, 9, width=32)), max_size=4), min_size=1
    )
)
def test_weights_survive_their_bytes(samples: list[list[tuple[int, float]]]) -> None:
    ids = [u64(*(i for i, _ in sample)) for sample in samples]
    weights = [f32(*(w for _, w in sample)) for sample in samples]
    found = through_bytes(IDTypeFeature("a", ids, weights))
    assert samples_of(found) == [[i for i, _ in sample] for sample in samples]
    expected = [w for sample in samples for _, w in sample]
    assert (found.weights.tolist() if found.weights is not None else []) == expected


def test_features_with_and_without_weights_go_together() -> None:
    batch = PersiaBatch(
        [
            IDTypeFeatureWithSingleID("a", u64(1, 2), f32(0.5, -1)),
            IDTypeFeature("b", [u64(), u64(3)]),
            IDTypeFeature("c", [u64(4), u64(5)], [f32(2), f32(0)]),
        ],
        labels=[Label(np.zeros(2))],
    )
    found = PersiaBatch.from_bytes(batch.to_bytes()).id_type_features
    assert found[0].weights is not None
    assert found[2].weights is not None
    assert [found[0].weights.tolist(), found[1].weights, found[2].weights.tolist()] == [
        [0.5, -1],
        None,
        [2, 0],
    ]


def test_damaged_weights_are_corrupt() -> None:
    message = bytearray(
        PersiaBatch([IDTypeFeatureWithSingleID("a", u64(1), f32(1.5))], requires_grad=False).to_bytes()
    )
    at = message.index(f32(1.5).tobytes())
    message[at : at + 4] = f32(float("inf")).tobytes()
    with pytest.raises(CorruptionError, match="weight"):
        PersiaBatch.from_bytes(message)


@pytest.mark.parametrize("version", [1, 2])
def test_batches_of_older_builds_are_read(version: int) -> None:
    ids = struct.pack("<4sIII", b"PIDB", version, 1, 2)
    ids += struct.pack("<IIQ8sIIIIQQQ", 1, version - 1, 3, b"a", 0, 1, 3, 0, 7, 8, 9)
    ids += struct.pack("<3f4x", 0.5, 1, 2) if version == 2 else b""
    ((_, values, offsets, weights),) = _native.decode_id_features(ids)
    assert values.tolist() == [7, 8, 9]
    assert offsets.tolist() == [0, 1, 3]
    assert (weights is None) == (version == 1)


def test_ids_that_repeat_are_sent_once() -> None:
    ids = np.random.default_rng(1).integers(0, 2**63, 50).astype(np.uint64)
    message = PersiaBatch([IDTypeFeatureWithSingleID("a", np.tile(ids, 80))], requires_grad=False).to_bytes()
    assert len(message) < 50 * 8 + 80 * 50 + 200
    (feature,) = PersiaBatch.from_bytes(message).id_type_features
    assert feature.ids.tolist() == ids.tolist() * 80


# --- strings ---


@settings(deadline=None)
@given(st.lists(st.one_of(st.text(max_size=70), st.binary(max_size=70)), max_size=20))
def test_strings_are_xxh64(strings: list[str | bytes]) -> None:
    expected = [xxhash.xxh64_intdigest(s.encode() if isinstance(s, str) else s) for s in strings]
    assert hash_strings(strings).tolist() == expected


def test_strings_of_numpy_and_samples_of_strings() -> None:
    a, b, c = hash_strings(np.array(["a", "bä", "c"])).tolist()
    assert b == xxhash.xxh64_intdigest("bä".encode())
    feature = IDTypeFeature.from_strings("tags", [["a", "bä"], None, "c", (), np.array(["a"])])
    assert samples_of(through_bytes(feature)) == [[a, b], [], [c], [], [a]]
    assert samples_of(IDTypeFeature.from_strings("tags", np.array(["c", b"c".decode()]))) == [[c], [c]]


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ("text", InvalidTypeError, "'tags' is a str: pass a list"),
        (["a", 5], InvalidTypeError, "'tags', sample 1: expected a string.*found int"),
        ([["a", 5]], InvalidTypeError, "'tags', sample 0: expected strings, found int"),
        (["\ud800"], InvalidArgumentError, "UTF-8"),
        ([], InvalidArgumentError, "'tags' has 0 samples"),
    ],
)
def test_what_is_no_string(samples: Any, error: type[PersiaError], message: str) -> None:
    with pytest.raises(error, match=message):
        IDTypeFeature.from_strings("tags", samples)


@pytest.mark.parametrize("strings", [[None], [["a"]], [None, ["a", "b"]], "a", {"a"}])
def test_only_strings_are_hashed(strings: Any) -> None:
    with pytest.raises(InvalidTypeError, match="strings"):
        hash_strings(strings)


# --- columns ---

NESTED: list[list[int | None] | None] = [[5, 6], None, [], [7, None, 8]]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.uint64()),
        pa.list_(pa.int16()),
        pa.list_(pa.dictionary(pa.int8(), pa.int64())),
    ],
    ids=str,
)
def test_lists_of_a_column(kind: Any) -> None:
    expected = [[5, 6], [], [], [7, 8]]
    whole = pa.array(NESTED, kind)
    assert samples_of(through_bytes(IDTypeFeature.from_arrow("a", whole))) == expected
    assert samples_of(IDTypeFeature.from_arrow("a", whole[1:])) == expected[1:]
    chunks = pa.chunked_array([whole[:1], whole[1:]])
    assert samples_of(IDTypeFeature.from_arrow("a", chunks)) == expected


def test_lists_of_a_fixed_size() -> None:
    column = pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2))
    assert samples_of(IDTypeFeature.from_arrow("a", column)) == [[1, 2], [], [3]]


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), max_size=4)),
        min_size=1,
        max_size=20,
    ),
    st.data(),
)
def test_any_column_of_lists(column: list[list[int | None] | None], data: st.DataObject) -> None:
    expected = [[i % 2**64 for i in sample or [] if i is not None] for sample in column]
    begin = data.draw(st.integers(0, len(column) - 1))
    array = pa.array(column, pa.list_(pa.int64()))[begin:]
    assert samples_of(IDTypeFeature.from_arrow("a", array)) == expected[begin:]


def test_single_ids_of_a_column() -> None:
    column = pa.array([3, None, -1], pa.int32())
    assert samples_of(IDTypeFeature.from_arrow("a", column)) == [[3], [], [2**64 - 1]]
    assert samples_of(IDTypeFeature.from_arrow("a", pa.array([2**64 - 1], pa.uint64()))) == [[2**64 - 1]]
    assert samples_of(IDTypeFeature.from_arrow("a", pa.nulls(2))) == [[], []]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_strings_of_a_column(kind: Any) -> None:
    a, bc = hash_strings(["a", "bc"]).tolist()
    column = pa.array(["x", "a", None, "bc", "a"]).cast(kind)[1:]
    assert samples_of(IDTypeFeature.from_arrow("a", column)) == [[a], [], [bc], [a]]
    assert samples_of(IDTypeFeature.from_arrow("a", pa.array([["bc", None, "a"], []]))) == [[bc, a], []]


def test_columns_of_whatever_has_the_interface_of_arrow() -> None:
    series = pd.Series(pd.array([1, None, 3], "Int64"))
    assert hasattr(series, "__arrow_c_stream__")
    assert samples_of(IDTypeFeature.from_arrow("a", series)) == [[1], [], [3]]


def test_weights_of_a_column() -> None:
    column, weights = pa.array(NESTED, pa.list_(pa.int64())), pa.array([[1.0, 2.0], None, [], [3.0, 4.0]])
    found = IDTypeFeature.from_arrow("a", column, weights).weights
    assert found is not None
    assert found.tolist() == [1, 2, 3, 4]
    with pytest.raises(InvalidArgumentError, match="sample 0: 2 IDs and 1 weights"):
        IDTypeFeature.from_arrow("a", column, pa.array([[1.0], None, [], [3.0, 4.0]]))
    with pytest.raises(InvalidTypeError, match="weights of feature 'a' is a column of int64"):
        IDTypeFeature.from_arrow("a", pa.array([1]), pa.array([1]))


def test_columns_of_pandas() -> None:
    frame = pd.DataFrame(
        {
            "single": pd.array([1, None, 3], "Int64"),
            "lists": [[1, 2], None, [3]],
            "text": ["a", None, "bc"],
            "weight": [0.5, 1.0, 2.0],
        }
    )
    a, bc = hash_strings(["a", "bc"]).tolist()
    assert samples_of(IDTypeFeature.from_pandas("a", frame["single"])) == [[1], [], [3]]
    assert samples_of(IDTypeFeature.from_pandas("a", frame["lists"])) == [[1, 2], [], [3]]
    assert samples_of(IDTypeFeature.from_pandas("a", frame["text"])) == [[a], [], [bc]]
    assert samples_of(IDTypeFeature.from_pandas("a", frame["text"].astype("category"))) == [[a], [], [bc]]
    weighted = IDTypeFeature.from_pandas("a", pd.Series([7, 8, 9]), frame["weight"])
    assert weighted.weights is not None
    assert weighted.weights.tolist() == [0.5, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IDTypeFeature.from_arrow("a", pa.array([1.5])), "'a' is a column of double"),
        (lambda: IDTypeFeature.from_arrow("a", pa.array([True])), "'a' is a column of bool"),
        (lambda: IDTypeFeature.from_arrow("a", pa.array([[[1]]])), "'a' is a column of list"),
        (lambda: IDTypeFeature.from_arrow("a", 5), "'a' is a int: pass an Arrow column"),
        (lambda: IDTypeFeature.from_pandas("a", pd.Series([1, None])), "'a' is a column of double"),
        (lambda: IDTypeFeature.from_pandas("a", pd.Series([object()])), "'a' is no column of IDs"),
        (lambda: IDTypeFeature.from_pandas("a", pd.Series([1, "a"])), "'a' is no column of IDs"),
    ],
)
def test_columns_that_hold_no_ids(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidTypeError, match=message):
        make()


def test_without_pyarrow_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidTypeError, match=r"pip install 'persia\[arrow\]'"):
        IDTypeFeature.from_pandas("a", pd.Series([1]))


# --- torchrec ---


@pytest.fixture
def keyed_jagged_tensor() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of its import
        pytest.importorskip("torchrec", reason="torchrec is not installed", exc_type=ImportError)
        return importlib.import_module("torchrec").KeyedJaggedTensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_keyed_jagged_tensor(keyed_jagged_tensor: Any, dtype: torch.dtype) -> None:
    keyed = keyed_jagged_tensor(
        keys=["a", "b"],
        values=torch.tensor([1, -2, 3], dtype=dtype),
        lengths=torch.tensor([2, 0, 0, 1], dtype=dtype),
        weights=torch.tensor([1.0, 2.0, 3.0]),
    )
    a, b = IDTypeFeature.from_keyed_jagged_tensor(keyed)
    assert (a.name, samples_of(a), b.name, samples_of(b)) == ("a", [[1, 2**64 - 2], []], "b", [[], [3]])
    assert a.weights is not None
    assert b.weights is not None
    assert (a.weights.tolist(), b.weights.tolist()) == ([1, 2], [3])


def test_keyed_jagged_tensors_that_do_not_fit(keyed_jagged_tensor: Any) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(InvalidArgumentError, match="no keys"):
        IDTypeFeature.from_keyed_jagged_tensor(keyed_jagged_tensor(keys=[], values=nothing, lengths=nothing))
    with pytest.raises(InvalidArgumentError, match="'a' has 0 samples"):
        IDTypeFeature.from_keyed_jagged_tensor(
            keyed_jagged_tensor(keys=["a"], values=nothing, lengths=nothing)
        )
    with pytest.raises(InvalidTypeError, match="keyed is a list: pass a torchrec KeyedJaggedTensor"):
        IDTypeFeature.from_keyed_jagged_tensor([1])
    keyed = keyed_jagged_tensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(InvalidArgumentError, match="another batch size for each key"):
        IDTypeFeature.from_keyed_jagged_tensor(keyed)
