"""What crosses into the native module is checked; what comes out are views that keep their memory alive."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from persia import _native, errors

DIM = 4
IDS = np.array([1, 2, 3], dtype=np.uint64)
OFFSETS = np.array([0, 1, 1, 3], dtype=np.uint32)


def slots() -> list[_native.SlotConfig]:
    pooled = _native.SlotConfig(name="age", dim=DIM, index_prefix=1 << 56, group=1)
    raw = _native.SlotConfig(
        name="clicks", dim=DIM, embedding_summation=False, sample_fixed_size=2, index_prefix=2 << 56, group=2
    )
    return [pooled, raw]


@pytest.fixture
def client() -> _native.EmbeddedClient:
    client = _native.EmbeddedClient(slots=slots(), feature_index_prefix_bit=8, capacity=1000)
    client.configure(_native.TrainConfig(optimizer="sgd", lr=0.5))
    return client


def message() -> bytes:
    return _native.encode_id_features(3, [("age", IDS, OFFSETS), ("clicks", IDS, OFFSETS)])


def lookup(client: _native.EmbeddedClient, *, requires_grad: bool = True) -> _native.LookupResult:
    return client.lookup_direct(0, message(), requires_grad=requires_grad)


# --- in ---


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (IDS.astype(np.int64), "int64"),
        (IDS.astype(np.float32), "float32"),
        ([1, 2, 3], "a list"),
        (None, "a NoneType"),
        (IDS.astype(">u8"), ">u8"),
    ],
)
def test_ids_of_another_type(ids: object, found: str) -> None:
    with pytest.raises(errors.InvalidTypeError, match=f"feature 'age': ids.*uint64.*{found}"):
        _native.encode_id_features(3, [("age", ids, OFFSETS)])  # type: ignore[list-item]


def test_offsets_of_another_type() -> None:
    with pytest.raises(TypeError, match="feature 'age': offsets.*uint32.*int64"):
        _native.encode_id_features(3, [("age", IDS, OFFSETS.astype(np.int64))])


def test_strided_and_misaligned_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="C-contiguous"):
        _native.encode_id_features(3, [("age", np.repeat(IDS, 2)[::2], OFFSETS)])
    misaligned = np.frombuffer(b"\0" + IDS.tobytes(), dtype=np.uint8)[1:].view(np.uint64)
    with pytest.raises(TypeError, match="aligned"):
        _native.encode_id_features(3, [("age", misaligned, OFFSETS)])


def test_a_wrong_number_of_dimensions() -> None:
    with pytest.raises(ValueError, match="feature 'age': ids: expected 1 dimension"):
        _native.encode_id_features(3, [("age", IDS.reshape(1, 3), OFFSETS)])


def test_round_trip() -> None:
    decoded = _native.decode_id_features(message())
    assert [name for name, _, _, _ in decoded] == ["age", "clicks"]
    for _, ids, offsets, weights in decoded:
        np.testing.assert_array_equal(ids, IDS)
        np.testing.assert_array_equal(offsets, OFFSETS)
        assert ids.dtype == np.uint64
        assert offsets.dtype == np.uint32
        assert weights is None


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda m: memoryview(b"\0" + m)[1:]])
def test_messages_may_be_any_contiguous_buffer(wrap: type[bytes]) -> None:
    ((_, ids, _, _), _) = _native.decode_id_features(wrap(message()))
    np.testing.assert_array_equal(ids, IDS)


def test_a_strided_message_is_refused() -> None:
    with pytest.raises(TypeError, match="message.*contiguous"):
        _native.decode_id_features(memoryview(message())[::2])


def test_a_message_that_does_not_decode() -> None:
    with pytest.raises(errors.CorruptionError, match="ID features"):
        _native.decode_id_features(message()[:-1])
    with pytest.raises(errors.CorruptionError, match="UTF-8"):
        _native.decode_id_features(message().replace(b"age", b"\xffge"))


def test_offsets_that_do_not_fit() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="feature 'age'.*offsets"):
        _native.encode_id_features(3, [("age", IDS, np.array([0, 2, 1, 3], dtype=np.uint32))])


def test_flatten() -> None:
    samples = [IDS, np.array([], dtype=np.uint64), np.arange(6, dtype=np.uint64)[::2]]
    ids, offsets = _native.flatten_samples("age", samples)
    np.testing.assert_array_equal(ids, np.array([1, 2, 3, 0, 2, 4], dtype=np.uint64))
    np.testing.assert_array_equal(offsets, np.array([0, 3, 3, 6], dtype=np.uint32))
    ids, offsets = _native.flatten_samples("age", [])
    assert len(ids) == 0
    np.testing.assert_array_equal(offsets, np.array([0], dtype=np.uint32))


@pytest.mark.parametrize(
    ("sample", "error_class", "text"),
    [
        (np.array([1], dtype=np.int32), TypeError, r"found int32.*astype\(numpy.uint64\)"),
        ([1], TypeError, "found list"),
        (7, TypeError, "found int"),
        (np.zeros((1, 1), dtype=np.uint64), ValueError, "2 dimensions"),
        (np.uint64(7), TypeError, "found uint64"),
    ],
)
def test_flatten_names_feature_and_sample(sample: object, error_class: type[Exception], text: str) -> None:
    with pytest.raises(error_class, match=f"feature 'age', sample 1: .*{text}"):
        _native.flatten_samples("age", [IDS, sample])  # type: ignore[list-item]


def test_set_embeddings(client: _native.EmbeddedClient) -> None:
    rows = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM)
    with pytest.raises(TypeError, match="signs"):
        client.set_embeddings(np.array([1, 2]), rows)
    with pytest.raises(TypeError, match="rows.*float64"):
        client.set_embeddings(IDS[:2], rows.astype(np.float64))
    with pytest.raises(ValueError, match="2 rows for 3 signs"):
        client.set_embeddings(IDS, rows)
    signs = IDS[:2] + (np.uint64(1) << np.uint64(56))
    client.set_embeddings(signs, rows)
    age = lookup(client).slots[0]
    np.testing.assert_array_equal(age.rows[0], rows[0])


def test_gradients_are_checked_by_slot(client: _native.EmbeddedClient) -> None:
    result = lookup(client)
    wrong = np.zeros((3, DIM))
    with pytest.raises(TypeError, match="gradient of slot 'age'.*float64"):
        client.return_gradients(result.reference, [("age", wrong)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="gradient of slot 'age'"):
        client.return_gradients(result.reference, [("age", np.zeros(DIM, dtype=np.float32))])


# --- out ---


def test_rows_are_views_of_the_result(client: _native.EmbeddedClient) -> None:
    age, clicks = lookup(client).slots
    assert (age.name, age.raw, age.sample_fixed_size, age.index, age.sample_num_ids) == (
        "age",
        False,
        0,
        None,
        None,
    )
    assert age.rows.shape == (3, DIM)
    assert np.shares_memory(age.rows, age.rows)
    assert (clicks.name, clicks.raw, clicks.sample_fixed_size) == ("clicks", True, 2)
    assert clicks.rows.shape == (4, DIM)
    assert clicks.index is not None
    assert clicks.index.shape == (3, 2)
    np.testing.assert_array_equal(clicks.sample_num_ids, [1, 0, 2])
    np.testing.assert_array_equal(clicks.rows[0], np.zeros(DIM, dtype=np.float32))


def test_rows_outlive_their_result(client: _native.EmbeddedClient) -> None:
    result = lookup(client)
    rows = result.slots[0].rows
    before = rows.copy()
    del result
    gc.collect()
    for _ in range(8):  # whoever reuses freed memory writes here
        lookup(client, requires_grad=False)
    np.testing.assert_array_equal(rows, before)


def test_rows_become_tensors_without_a_copy_or_a_warning(client: _native.EmbeddedClient) -> None:
    rows = lookup(client).slots[0].rows
    tensor = torch.from_numpy(rows)
    tensor[0, 0] = 42.0
    assert rows[0, 0] == 42.0


def test_a_batch_from_registration_to_its_gradient(client: _native.EmbeddedClient) -> None:
    registered = client.register_batch(0, message())
    result = client.lookup(registered, requires_grad=True)
    assert result.batch_size == 3
    assert result.reference.reference == registered.reference
    before = result.slots[0].rows.copy()
    gradient = np.ones((3, DIM), dtype=np.float32)
    report = client.return_gradients(result.reference, [("age", gradient), ("clicks", None)])
    assert (report.num_skipped_slots, report.num_nonfinite_slots, report.num_missing) == (1, 0, 0)
    assert report.num_updated == 3
    after = lookup(client, requires_grad=False).slots[0].rows
    np.testing.assert_allclose(after[0], before[0] - 0.5, atol=1e-6)
    assert client.sizes() == [6]
