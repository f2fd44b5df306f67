"""Batches: every bad input is a typed error that names what is wrong; every good one survives its bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.embedding.data import (
    MAX_BATCH_SIZE,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    PersiaError,
)


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def batch(**changes: Any) -> PersiaBatch:
    arguments: dict[str, Any] = {
        "id_type_features": [IDTypeFeature("user", [ids(1, 1), ids()])],
        "labels": [Label(np.zeros((2, 1), np.float32))],
    }
    return PersiaBatch(**(arguments | changes))


def test_lil_features_allow_empty_samples_and_duplicates() -> None:
    feature = IDTypeFeature("user", [ids(3, 3, 4), ids(), ids(2**64 - 1)])
    assert feature.ids.tolist() == [3, 3, 4, 2**64 - 1]
    assert feature.offsets.tolist() == [0, 3, 3, 4]
    assert feature.batch_size == 3


def test_the_documented_argument_order_is_accepted_too() -> None:
    data: Any = [ids(1)]
    assert IDTypeFeature(data, "user").name == "user"  # type: ignore[arg-type]
    assert IDTypeFeatureWithSingleID(ids(1), "user").name == "user"  # type: ignore[arg-type]


def test_a_two_dimensional_array_is_a_list_of_samples() -> None:
    feature = IDTypeFeature("empty", np.zeros((5, 0), np.uint64))  # type: ignore[arg-type]
    assert feature.batch_size == 5


def test_single_ids() -> None:
    feature = IDTypeFeatureWithSingleID("user", np.arange(6, dtype=np.uint64)[::2])
    assert feature.ids.tolist() == [0, 2, 4]
    assert feature.offsets.tolist() == [0, 1, 2, 3]


BAD: dict[str, tuple[Callable[[], object], type[PersiaError], str]] = {
    "lil dtype": (lambda: IDTypeFeature("u", [ids(1), np.array([1.5])]), InvalidTypeError, "'u'.*1.*float64"),
    "lil ndim": (lambda: IDTypeFeature("u", [ids(1).reshape(1, 1)]), InvalidArgumentError, "'u'.*0"),
    "lil no array": (lambda: IDTypeFeature("u", [[1, 2]]), InvalidTypeError, "'u'.*list"),  # type: ignore[list-item]
    "lil empty": (lambda: IDTypeFeature("u", []), InvalidArgumentError, "'u' has 0 samples"),
    "lil too many": (
        lambda: IDTypeFeature("u", [ids()] * (MAX_BATCH_SIZE + 1)),
        InvalidArgumentError,
        "65536",
    ),
    "lil number": (lambda: IDTypeFeature("u", 5), InvalidTypeError, "'u' is a int"),  # type: ignore[arg-type]
    "lil single ids": (lambda: IDTypeFeature("u", ids(1, 2)), InvalidTypeError, "IDTypeFeatureWithSingleID"),  # type: ignore[arg-type]
    "name": (lambda: IDTypeFeature("", [ids(1)]), InvalidTypeError, "name"),
    "single list": (lambda: IDTypeFeatureWithSingleID("u", [1]), InvalidTypeError, "'u' is a list"),  # type: ignore[arg-type]
    "single ndim": (
        lambda: IDTypeFeatureWithSingleID("u", ids(1).reshape(1, 1)),
        InvalidArgumentError,
        r"\(1, 1\)",
    ),
    "single dtype": (lambda: IDTypeFeatureWithSingleID("u", np.array([1.0])), InvalidTypeError, "float64"),  # type: ignore[arg-type]
    "single too many": (
        lambda: IDTypeFeatureWithSingleID("u", np.zeros(MAX_BATCH_SIZE + 1, np.uint64)),
        InvalidArgumentError,
        "65536",
    ),
    "dense list": (lambda: NonIDTypeFeature([1.0]), InvalidTypeError, "list"),  # type: ignore[arg-type]
    "dense dtype": (lambda: Label(np.array(["a"])), InvalidTypeError, "<U1"),
    "dense complex": (lambda: Label(np.array([1j])), InvalidTypeError, "complex128"),
    "dense scalar": (lambda: Label(np.array(1.0)), InvalidArgumentError, "scalar"),
    "no id features": (lambda: batch(id_type_features=[]), InvalidArgumentError, "id_type_features is empty"),
    "id features none": (
        lambda: batch(id_type_features=None),
        InvalidArgumentError,
        "id_type_features is empty",
    ),
    "one feature": (
        lambda: batch(id_type_features=IDTypeFeature("u", [ids(1)])),
        InvalidTypeError,
        "id_type_features is a IDTypeFeature: pass a list",
    ),
    "one label": (lambda: batch(labels=Label(np.zeros(2))), InvalidTypeError, "labels is a Label"),
    "label array": (lambda: batch(labels=np.zeros(2)), InvalidTypeError, r"labels\[0\] is a float64"),
    "id class": (lambda: batch(id_type_features=[ids(1)]), InvalidTypeError, r"id_type_features\[0\]"),
    "dense class": (lambda: batch(non_id_type_features=[Label(np.zeros(2))]), InvalidTypeError, "Label"),
    "label class": (lambda: batch(labels=[np.zeros(2)]), InvalidTypeError, r"labels\[0\] is a ndarray"),
    "sizes": (lambda: batch(labels=[Label(np.zeros(3))]), InvalidArgumentError, "3 samples.*of 2"),
    "stated size": (lambda: batch(batch_size=3), InvalidArgumentError, "2 samples.*of 3"),
    "labels missing": (lambda: batch(labels=None), InvalidArgumentError, "add label data when requires_grad"),
    "meta": (lambda: batch(meta={"a": 1}), InvalidTypeError, "dict"),
    "twice": (
        lambda: batch(id_type_features=[IDTypeFeature("u", [ids(1), ids()])] * 2),
        InvalidArgumentError,
        "'u' occurs 2 times",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    make, error, message = BAD[case]
    with pytest.raises(error, match=message):
        make()


def test_checks_can_be_skipped_but_sizes_are_always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_SKIP_CHECK_DATA", "1")
    assert IDTypeFeatureWithSingleID("u", np.array([1, 2])).ids.dtype == np.uint64  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="of 2"):
        batch(labels=[Label(np.zeros(3))])


UNCHECKED: dict[str, tuple[Callable[[], object], type[PersiaError], str]] = {
    "lil dtype": BAD["lil dtype"],
    "lil ndim": BAD["lil ndim"],
    "single ndim": (
        lambda: IDTypeFeatureWithSingleID("u", ids(1).reshape(1, 1)),
        InvalidArgumentError,
        r"'u' has shape \(1, 1\)",
    ),
    "single text": (lambda: IDTypeFeatureWithSingleID("u", ["a"]), InvalidTypeError, "'u'.*uint64"),  # type: ignore[arg-type]
    "single too many": BAD["single too many"],
    "dense scalar": BAD["dense scalar"],
    "dense ragged": (lambda: Label([[1], [1, 2]]), InvalidTypeError, "label_anonymous"),  # type: ignore[arg-type]
    "dense dtype": (lambda: batch(labels=[Label(np.zeros(2, "U1"))]).to_bytes(), InvalidTypeError, "<U1"),
    "id class": BAD["id class"],
    "sizes": BAD["sizes"],
    "labels missing": BAD["labels missing"],
    "meta": BAD["meta"],
    "twice": BAD["twice"],
}


@pytest.mark.parametrize("case", UNCHECKED)
def test_without_checks_what_cannot_be_sent_is_still_a_typed_error(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_SKIP_CHECK_DATA", "1")
    make, error, message = UNCHECKED[case]
    with pytest.raises(error, match=message):
        make()


def test_a_numpy_bool_may_say_whether_gradients_are_expected() -> None:
    message = batch(labels=None, requires_grad=np.bool_(False)).to_bytes()
    assert PersiaBatch.from_bytes(message).requires_grad is False


def test_evaluation_batches_need_no_labels() -> None:
    assert not batch(labels=None, requires_grad=False).labels


def test_a_batch_is_sent_once() -> None:
    sent = batch()
    sent.mark_sent()
    with pytest.raises(FailedPreconditionError, match="sent already"):
        sent.mark_sent()


def test_the_largest_batch() -> None:
    samples = [ids(i) for i in range(MAX_BATCH_SIZE)]
    before = PersiaBatch(
        [IDTypeFeature("user", samples), IDTypeFeatureWithSingleID("item", np.concatenate(samples))],
        labels=[Label(np.zeros((MAX_BATCH_SIZE, 1), np.float32))],
    )
    after = PersiaBatch.from_bytes(before.to_bytes())
    assert after.batch_size == MAX_BATCH_SIZE
    for feature in after.id_type_features:
        np.testing.assert_array_equal(feature.ids, np.arange(MAX_BATCH_SIZE))


def test_text_as_meta_is_encoded() -> None:
    assert batch(meta="ü").meta == "ü".encode()


DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "float16",
    "float32",
    "float64",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 2, 2, 3), (2, 0)])
def test_dense_data_survives_its_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype)
    before = batch(non_id_type_features=[NonIDTypeFeature(array, "x")], labels=[Label(array)], meta=b"\0\xff")
    after = PersiaBatch.from_bytes(before.to_bytes())
    for found in (after.non_id_type_features[0], after.labels[0]):
        assert found.data.dtype == array.dtype
        np.testing.assert_array_equal(found.data, array)
    assert (after.meta, after.requires_grad, after.batch_size) == (b"\0\xff", True, 2)
    assert (after.non_id_type_features[0].name, after.labels[0].name) == ("x", "label_anonymous")


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=5), min_size=1, max_size=20),
    st.text(min_size=1, max_size=10),
    st.booleans(),
)
def test_ids_survive_their_bytes(samples: list[list[int]], name: str, requires_grad: bool) -> None:
    before = PersiaBatch(
        [IDTypeFeature(name, [ids(*sample) for sample in samples])],
        labels=[Label(np.zeros(len(samples)))],
        requires_grad=requires_grad,
    )
    after = PersiaBatch.from_bytes(before.to_bytes())
    (found,) = after.id_type_features
    assert found.name == name
    assert found.ids.tolist() == before.id_type_features[0].ids.tolist()
    assert found.offsets.tolist() == before.id_type_features[0].offsets.tolist()
    assert after.requires_grad == requires_grad


def test_every_truncation_is_refused() -> None:
    message = batch(non_id_type_features=[NonIDTypeFeature(np.ones((2, 3)))], meta=b"m").to_bytes()
    for length in range(len(message)):
        with pytest.raises(CorruptionError):
            PersiaBatch.from_bytes(message[:length])
    with pytest.raises(CorruptionError):
        PersiaBatch.from_bytes(message + b"\0")


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_bytes_never_crash(data: st.DataObject) -> None:
    message = bytearray(batch(non_id_type_features=[NonIDTypeFeature(np.ones((2, 3)))]).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptionError):
        PersiaBatch.from_bytes(message)


def test_ids_that_decode_to_no_valid_batch_are_corrupt() -> None:
    message = batch(id_type_features=[IDTypeFeature(name, [ids(1), ids()]) for name in "ab"]).to_bytes()
    assert message.count(b"b" + bytes(7)) == 1
    with pytest.raises(CorruptionError, match="no valid batch"):
        PersiaBatch.from_bytes(message.replace(b"b" + bytes(7), b"a" + bytes(7)))
