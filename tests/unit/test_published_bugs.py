"""Defects that the published system is known for, each by what a user saw of it. They must not come back.

Those that need more than one process or a checkpoint have their tests where that is, by the names
`test_bug_N_...`: 4 and 21 inference, 5, 6, 8 and 20 checkpoints, 9 packets of changes, 15 lost batches and
gradients, 17 batches that never expire (native), 19 `PersiaServiceCtx`, 20 Bagua as well, 22 order, 23 jobs
on Kubernetes, 24 groups of metrics.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from persia import _native
from persia.config import HashStackConfig, parse_embedding_config
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.errors import ConfigError, CorruptionError, InvalidArgumentError, InvalidTypeError
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.batch import embedding_tensors, leaf_gradients

DIM = 4
BITS = 8
REPOSITORY = Path(__file__).parents[2]


def client_of(
    optimizer: Optimizer, *, admit: float = 1.0, bound: float = 0.0, **slot: Any
) -> _native.EmbeddedClient:
    config = _native.SlotConfig(name="a", dim=DIM, index_prefix=1 << (64 - BITS), **slot)
    client = _native.EmbeddedClient(slots=[config], feature_index_prefix_bit=BITS)
    rows = EmbeddingConfig(emb_initialization=(0.5, 1.0), admit_probability=admit, weight_bound=bound, seed=1)
    client.configure(optimizer.train_config(rows))
    return client


def encoded(ids: list[int]) -> bytes:
    feature = IDTypeFeatureWithSingleID("a", np.array(ids, np.uint64))
    return PersiaBatch([feature], requires_grad=False).encode_id_features()


def read(client: _native.EmbeddingClient, ids: list[int]) -> NDArray[np.float32]:
    return np.array(client.lookup_direct(0, encoded(ids), requires_grad=False).slots[0].rows)


def train(client: _native.EmbeddingClient, ids: list[int], gradient: NDArray[np.float32]) -> Any:
    result = client.lookup_direct(0, encoded(ids), requires_grad=True)
    return client.return_gradients(result.reference, [("a", gradient)])


class Batches(IterableDataset):
    def __init__(self, batches: list[PersiaBatch]) -> None:
        super().__init__(buffer_size=2)
        self._batches = batches

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield from self._batches


class Model(torch.nn.Module):
    """The sum of the embedding, times a weight that stays 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return embeddings[0].sum(dim=1, keepdim=True) * self.weight


def train_ctx(client: _native.EmbeddedClient, **options: Any) -> TrainCtx:
    model = Model()
    return TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=1.0),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        mixed_precision=False,
        backend=EmbeddingBackend(client, deadline_s=30.0),
        **options,
    )


def labelled(ids: list[int]) -> PersiaBatch:
    feature = IDTypeFeatureWithSingleID("a", np.array(ids, np.uint64))
    return PersiaBatch([feature], labels=[Label(np.zeros((len(ids), 1), np.float32))])


def test_every_bug_has_a_test_named_after_it() -> None:
    here = re.findall(r"^def test_(\d+)_", Path(__file__).read_text(), re.MULTILINE)
    elsewhere = [
        number
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for number in re.findall(r"^def test_bug_(\d+)_", path.read_text(), re.MULTILINE)
    ]
    native = [
        number
        for path in (REPOSITORY / "native").rglob("*_test.cc")
        for number in re.findall(r"^TEST\(\w+, Bug(\d+)[A-Z]", path.read_text(), re.MULTILINE)
    ]
    assert {int(number) for number in (*here, *elsewhere, *native)} == set(range(1, 27))


def test_1_a_missing_row_does_not_shift_the_gradients_of_the_others() -> None:
    client = client_of(SGD(lr=1.0), admit=0.5)
    ids = list(range(64))
    before = read_after_insertion(client, ids)
    is_there = before.any(axis=1)
    assert 0 < is_there.sum() < len(ids)
    gradient = np.arange(len(ids) * DIM, dtype=np.float32).reshape(-1, DIM)
    report = train(client, ids, gradient)
    assert (report.num_updated, report.num_missing) == (is_there.sum(), (~is_there).sum())
    np.testing.assert_array_equal(read(client, ids), np.where(is_there[:, None], before - gradient, 0))


def read_after_insertion(client: _native.EmbeddingClient, ids: list[int]) -> NDArray[np.float32]:
    result = client.lookup_direct(0, encoded(ids), requires_grad=True)
    client.release(result.reference)
    return read(client, ids)


def test_2_an_evaluation_does_not_reconfigure_the_servers() -> None:
    client = client_of(SGD(lr=1.0))
    with train_ctx(client, embedding_config=EmbeddingConfig((0.25, 0.25), weight_bound=0.0)) as ctx:
        with eval_ctx(model=ctx.model, embedding_config=EmbeddingConfig((9.0, 9.0), weight_bound=0.1)):
            pass
        for batch in DataLoader(Batches([labelled([1])])):
            output, _ = ctx.forward(batch)
            assert output.item() == 0.25 * DIM  # the training's initial values
            ctx.backward(output.sum())
    np.testing.assert_array_equal(read(client, [1]), np.full((1, DIM), 0.25 - 1.0))  # and no bound


def test_3_gradients_are_checked_in_every_batch() -> None:
    client = client_of(SGD(lr=1.0))
    before = read_after_insertion(client, [1])
    ones = np.ones((1, DIM), np.float32)
    for step in range(3):
        assert train(client, [1], ones).num_nonfinite_slots == 0, step
    assert train(client, [1], ones * np.nan).num_nonfinite_slots == 1
    np.testing.assert_array_equal(read(client, [1]), before - ones - ones - ones)


def test_7_fewer_rows_than_servers_can_be_set() -> None:
    servers = [
        _native.ParameterServer(replica_index=i, replica_size=3, capacity=100, num_internal_shards=1)
        for i in range(3)
    ]
    slots = [_native.SlotConfig(name="a", dim=DIM, index_prefix=1 << (64 - BITS))]
    worker = _native.EmbeddingWorker(slots=slots, feature_index_prefix_bit=BITS, num_servers=3)
    try:
        for index, server in enumerate(servers):
            worker.set_server(index, f"127.0.0.1:{server.start('127.0.0.1', 0)}")
        client = _native.RemoteClient(1)
        client.set_worker(0, f"127.0.0.1:{worker.start('127.0.0.1', 0)}")
        client.configure(SGD(lr=1.0).train_config(EmbeddingConfig()))
        for count in (0, 1, 2, 4):
            signs = np.arange(count, dtype=np.uint64) + (1 << (64 - BITS))
            rows = np.full((count, DIM), count, np.float32)
            client.set_embeddings(signs, rows)
            if count:
                np.testing.assert_array_equal(read(client, list(range(count))), rows)
    finally:
        worker.stop()
        for server in servers:
            server.stop()


def test_10_a_row_of_another_dim_begins_with_fresh_optimizer_state() -> None:
    """Adagrad's accumulator was 0 then, and the step lr * g / eps."""
    server = _native.ParameterServer(replica_index=0, replica_size=1, capacity=100, num_internal_shards=1)
    address = f"127.0.0.1:{server.start('127.0.0.1', 0)}"
    optimizer = Adagrad(lr=0.1, initial_accumulator_value=0.01)
    try:
        for dim in (2, 5, 3):
            slots = [_native.SlotConfig(name="a", dim=dim, index_prefix=1 << (64 - BITS))]
            worker = _native.EmbeddingWorker(slots=slots, feature_index_prefix_bit=BITS, num_servers=1)
            worker.set_server(0, address)
            client = _native.RemoteClient(1)
            client.set_worker(0, f"127.0.0.1:{worker.start('127.0.0.1', 0)}")
            client.configure(optimizer.train_config(EmbeddingConfig(weight_bound=0.0)))
            before = read_after_insertion(client, [1])
            gradient = np.full((1, dim), 3.0, np.float32)
            train(client, [1], gradient)
            step = 0.1 * 3.0 / (np.sqrt(0.01 + 9.0) + 1e-10)
            np.testing.assert_allclose(read(client, [1]), before - step, rtol=1e-5)
            worker.stop()
    finally:
        server.stop()


def test_11_a_raw_slot_sums_the_rounds_of_its_hash_stack() -> None:
    """Also where several IDs of a batch fall into one bucket."""
    stack = HashStackConfig(hash_stack_rounds=2, embedding_size=3)
    client = client_of(
        SGD(lr=1.0),
        embedding_summation=False,
        sample_fixed_size=4,
        hash_stack_rounds=stack.hash_stack_rounds,
        hash_stack_size=stack.embedding_size,
    )
    ids = [np.arange(4, dtype=np.uint64) + 4 * i for i in range(3)]
    batch = PersiaBatch([IDTypeFeature("a", ids)], requires_grad=False).encode_id_features()
    result = client.lookup_direct(0, batch, requires_grad=True)
    made = embedding_tensors(result, requires_grad=True)
    rows = made.tensors[0][..., :-1]
    # Every row is in [0.5, 1), so that the sum of two is in [1, 2).
    assert bool(((rows >= 1.0) & (rows < 2.0)).all())
    before = rows.detach().clone()
    made.tensors[0].sum().backward()
    client.return_gradients(result.reference, leaf_gradients(made.leaves))
    after = client.lookup_direct(0, batch, requires_grad=False)
    moved = before - embedding_tensors(after, requires_grad=False).tensors[0][..., :-1]
    # Each bucket gets one gradient of 1 for each ID in it: 12 IDs in 3 buckets of 2 rounds.
    assert float(moved.sum()) > 12 * 2 * DIM


def test_12_adam_corrects_its_bias_from_the_first_step_on_and_keeps_counting() -> None:
    """Although every rank and every worker registers the optimizer again."""
    optimizer = Adam(lr=0.1)
    client = client_of(optimizer)
    before = read_after_insertion(client, [1])
    parameter = torch.nn.Parameter(torch.tensor(before, dtype=torch.float64))
    reference = torch.optim.Adam([parameter], lr=0.1)
    rows = EmbeddingConfig(emb_initialization=(0.5, 1.0), weight_bound=0.0, seed=1)
    for step in range(5):
        gradient = np.full((1, DIM), 0.5 + step, np.float32)
        train(client, [1], gradient)
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        reference.step()
        np.testing.assert_allclose(read(client, [1]), parameter.detach().numpy(), rtol=1e-5)
        client.configure(optimizer.train_config(rows))


def test_13_more_groups_than_the_prefix_bits_can_number_are_refused() -> None:
    slots = {f"slot{i}": {"dim": 1} for i in range(256)}
    with pytest.raises(
        ConfigError, match="feature_index_prefix_bit=8 has room for 255 groups.*there are 256"
    ):
        parse_embedding_config({"slots_config": slots})
    del slots["slot0"]
    parse_embedding_config({"slots_config": slots})


def test_14_id_features_are_checked() -> None:
    with pytest.raises(InvalidTypeError, match="'a', sample 1.*int32"):
        IDTypeFeature("a", [np.zeros(1, np.uint64), np.zeros(1, np.int32)])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="2 dimensions"):
        IDTypeFeature("a", [np.zeros((1, 1), np.uint64)])


def test_14_a_sample_may_have_more_than_65535_ids() -> None:
    client = client_of(SGD(lr=1.0))
    rows = read_after_insertion(client, [7, 8])
    many = np.array([7] * 65535 + [8] * 10, np.uint64)
    batch = PersiaBatch([IDTypeFeature("a", [many])], requires_grad=False)
    found = client.lookup_direct(0, batch.encode_id_features(), requires_grad=False).slots[0].rows
    np.testing.assert_allclose(found[0], 65535 * rows[0].astype(np.float64) + 10 * rows[1], rtol=2e-3)


def test_16_batches_without_gradients_are_not_counted_as_in_flight() -> None:
    client = client_of(SGD(lr=1.0))
    batches = [PersiaBatch(labelled([i]).id_type_features, requires_grad=False) for i in range(3)]
    with train_ctx(client) as ctx:
        for batch in DataLoader(Batches(batches), embedding_staleness=1):
            ctx.prepare_features(batch)
            assert ctx.staleness.in_flight == 0
        for batch in DataLoader(Batches([labelled([1]), labelled([2])]), embedding_staleness=1):
            ctx.backward(ctx.forward(batch)[0].sum())
        ctx.wait_for_gradients()
        assert ctx.staleness.in_flight == 0


def test_18_tensors_outlive_their_batch() -> None:
    client = client_of(SGD(lr=1.0))
    result = client.lookup_direct(0, encoded(list(range(1000))), requires_grad=True)
    tensor = embedding_tensors(result, requires_grad=False).tensors[0]
    expected = tensor.clone()
    reference = result.reference
    del result
    gc.collect()
    for _ in range(10):  # which would take the memory, if it were free
        client.lookup_direct(0, encoded(list(range(5000, 6000))), requires_grad=False)
    assert torch.equal(tensor, expected)
    client.release(reference)


def test_25_memory_grows_with_the_rows_and_not_with_the_capacity() -> None:
    def resident_bytes() -> int:
        text = Path("/proc/self/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        return int(found.group(1)) * 1024

    before = resident_bytes()
    client = client_of(SGD(lr=1.0))  # with the default capacity of 10^9 rows
    read_after_insertion(client, [1, 2, 3])
    assert resident_bytes() - before < 256 << 20


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flipped"])
def test_26_bytes_that_are_no_batch_are_an_error(damage: str) -> None:
    whole = labelled([1, 2, 3]).to_bytes()
    flipped = bytearray(whole)
    flipped[40] ^= 0xFF
    message = {"empty": b"", "text": b"not a batch at all", "cut": whole[:-9], "flipped": bytes(flipped)}[
        damage
    ]
    with train_ctx(client_of(SGD(lr=1.0))) as ctx, pytest.raises(CorruptionError):
        ctx.get_embedding_from_bytes(message)
