"""Every way to pool a slot, forward and backward, against nn.EmbeddingBag and nn.Embedding in float64.

SGD with a rate of 1 moves a row by its gradient exactly once, so that the rows before and after a batch tell
the gradient of each. A second slot of the same feature group reads them one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia import _native
from persia.config import HashStackConfig, SlotConfig, SlotsConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import InvalidArgumentError
from persia.nn import EmbeddingBagCollection
from persia.pipeline.batch import embedding_tensors, leaf_gradients

NUM_IDS = 12
PREFIX = SlotsConfig(slots_config={"x": SlotConfig(dim=1)}).feature_index_prefix_bit

# float32 against float64: sums of at most some tens of products of order 1.
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


@dataclass(frozen=True)
class Case:
    """A slot and a batch of it: by sample, IDs below NUM_IDS, and weights as many."""

    slot: SlotConfig
    samples: list[list[int]]
    weights: list[list[float]] | None
    gradient_seed: int

    @property
    def rounds(self) -> int:
        return self.slot.hash_stack.hash_stack_rounds if self.slot.hash_stack else 1

    @property
    def num_rows(self) -> int:
        stack = self.slot.hash_stack
        return NUM_IDS if stack is None else stack.hash_stack_rounds * stack.embedding_size

    def rows_of(self, identity: int) -> list[int]:
        """The rows of an ID: itself, or its bucket of each round."""
        stack = self.slot.hash_stack
        if stack is None:
            return [identity]
        rows, hashed = [], identity
        for number in range(stack.hash_stack_rounds):
            hashed = farm_hash(hashed)
            rows.append(hashed % stack.embedding_size + number * stack.embedding_size)
        return rows

    def feature(self) -> IDTypeFeature:
        ids = [np.array(sample, np.uint64) for sample in self.samples]
        weights = None if self.weights is None else [np.array(w, np.float32) for w in self.weights]
        return IDTypeFeature("tested", ids, weights)

    def gradient(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.gradient_seed))


def farm_hash(value: int) -> int:
    """FarmHash64 of eight little-endian bytes, by its definition."""
    mask, k2 = 2**64 - 1, 0x9AE16A3B2F90404F
    multiplier = k2 + 16

    def rotated(x: int, bits: int) -> int:
        return (x >> bits | x << (64 - bits)) & mask

    a = (value + k2) & mask
    c = (rotated(value, 37) * multiplier + a) & mask
    d = ((rotated(a, 25) + value) * multiplier) & mask
    x = ((c ^ d) * multiplier) & mask
    x ^= x >> 47
    y = ((d ^ x) * multiplier) & mask
    y ^= y >> 47
    return (y * multiplier) & mask


def expected_pooled(case: Case, table: torch.Tensor) -> torch.Tensor:
    """float64 [batch, dim] of pooled slots, by functional.embedding_bag over all rows of the IDs."""
    weights = case.weights or [[1.0] * len(sample) for sample in case.samples]
    rows = [row for sample in case.samples for i in sample for row in case.rows_of(i)]
    # Those that were sent are float32.
    flat = [float(np.float32(w)) for sample in weights for w in sample for _ in range(case.rounds)]
    lengths = [len(sample) * case.rounds for sample in case.samples]
    offsets = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int64)
    sums = torch.nn.functional.embedding_bag(
        torch.tensor(rows, dtype=torch.int64),
        table,
        offsets,
        mode="sum",
        per_sample_weights=torch.tensor(flat, dtype=torch.float64),
        include_last_offset=True,
    )
    return sums * torch.tensor([[1 / d if d else 0.0] for d in divisors(case, weights)], dtype=torch.float64)


def divisors(case: Case, weights: list[list[float]]) -> list[float]:
    sums = [np.array(w, np.float32).astype(np.float64) for w in weights]
    if case.slot.mean_scaling:
        return [float(w.sum()) if len(w) else 1.0 for w in sums]
    if case.slot.sqrt_scaling:
        return [float(np.sqrt((w**2).sum() * case.rounds)) if len(w) else 1.0 for w in sums]
    return [1.0] * len(sums)


def expected_raw(case: Case, table: torch.Tensor) -> torch.Tensor:
    """float64 [batch, sample_fixed_size, dim + 1]."""
    scale = 1 / np.sqrt(case.rounds) if case.slot.sqrt_scaling else 1.0
    size, dim = case.slot.sample_fixed_size, case.slot.dim
    samples = []
    for sample in case.samples:
        rows = [
            torch.nn.functional.embedding(torch.tensor(case.rows_of(i)), table).sum(0) * scale
            for i in sample[:size]
        ]
        cells = [torch.cat([row, row.new_ones(1)]) for row in rows]
        samples.append(torch.stack(cells + [table.new_zeros(dim + 1)] * (size - len(cells))))
    return torch.stack(samples)


def slots_of(case: Case) -> SlotsConfig:
    return SlotsConfig(
        slots_config={"tested": case.slot, "reader": SlotConfig(dim=case.slot.dim)},
        feature_groups={"all": ("tested", "reader")},
        feature_index_prefix_bit=PREFIX,
    )


def client_of(case: Case) -> _native.EmbeddingClient:
    client = _native.EmbeddedClient(
        slots=slots_of(case).native_slots(), feature_index_prefix_bit=PREFIX, num_internal_shards=2
    )
    configure(client)
    return client


def configure(client: _native.EmbeddingClient, bounds: tuple[float, float] = (-1.0, 1.0)) -> None:
    rows = EmbeddingConfig(emb_initialization=bounds, weight_bound=0.0, seed=5)
    client.configure(SGD(lr=1.0).train_config(rows), replace=True)


def id_features(feature: IDTypeFeature) -> bytes:
    return PersiaBatch([feature], requires_grad=False).encode_id_features()


def read_rows(client: _native.EmbeddingClient, case: Case, *, insert: bool = False) -> NDArray[np.float32]:
    """All rows, float32 [num_rows, dim]."""
    ids = id_features(IDTypeFeatureWithSingleID("reader", np.arange(case.num_rows, dtype=np.uint64)))
    result = client.lookup_direct(0, ids, requires_grad=insert)
    if insert:
        client.release(result.reference)
    return np.array(result.slots[0].rows)


def follow(client: _native.EmbeddingClient, case: Case) -> tuple[torch.Tensor, NDArray[np.float32]]:
    """Looks the batch up and returns a random gradient; what was looked up and the rows agree with torch."""
    before = read_rows(client, case, insert=True)
    table = torch.tensor(before, dtype=torch.float64, requires_grad=True)
    expected = (expected_pooled if case.slot.embedding_summation else expected_raw)(case, table)
    result = client.lookup_direct(0, id_features(case.feature()), requires_grad=True)
    made = embedding_tensors(result, requires_grad=True)
    (found,) = made.tensors
    torch.testing.assert_close(found.detach().double(), expected.detach(), **TOLERANCE)
    gradient = case.gradient(*found.shape)
    found.backward(gradient)
    if expected.requires_grad:
        expected.backward(gradient.double())
    client.return_gradients(result.reference, leaf_gradients(made.leaves))
    after = read_rows(client, case)
    moved = torch.zeros_like(table) if table.grad is None else table.grad
    torch.testing.assert_close(torch.tensor(after).double(), table.detach() - moved, **TOLERANCE)
    return found.detach(), after


scalings = st.sampled_from([{}, {"sqrt_scaling": True}, {"mean_scaling": True}])
stacks = st.one_of(
    st.none(),
    st.builds(HashStackConfig, hash_stack_rounds=st.integers(1, 3), embedding_size=st.integers(1, 7)),
)
# Weights of which no few cancel to nearly nothing: a mean would divide by that.
weights_of_ids = st.one_of(st.just(0.0), st.floats(0.25, 4.0, width=32))


@st.composite
def samples_of_a_batch(draw: st.DrawFn) -> list[list[int]]:
    kind = draw(st.sampled_from(["single", "any", "empty"]))
    sizes = {"single": (1, 1), "any": (0, 6), "empty": (0, 0)}[kind]
    sample = st.lists(st.integers(0, NUM_IDS - 1), min_size=sizes[0], max_size=sizes[1])
    return draw(st.lists(sample, min_size=1, max_size=20))


@st.composite
def pooled_cases(draw: st.DrawFn) -> Case:
    slot = SlotConfig(dim=draw(st.integers(1, 40)), hash_stack_config=draw(stacks), **draw(scalings))
    samples = draw(samples_of_a_batch())
    weights = None
    if draw(st.booleans()):
        weights = [draw(st.lists(weights_of_ids, min_size=len(s), max_size=len(s))) for s in samples]
    return Case(slot, samples, weights, draw(st.integers(0, 2**32 - 1)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pooled_cases())
@example(Case(SlotConfig(dim=3, mean_scaling=True), [[1, 1, 2]], [[0.5, -0.5, 0.0]], 1))  # adds up to 0
@example(Case(SlotConfig(dim=3), [[1, 2], [1]], [[-2.0, 0.5], [3.0]], 1))
def test_pooled_slots(case: Case) -> None:
    follow(client_of(case), case)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    dim=st.integers(1, 40),
    size=st.integers(1, 5),
    sqrt_scaling=st.booleans(),
    stack=stacks,
    samples=samples_of_a_batch(),
    seed=st.integers(0, 2**32 - 1),
)
def test_raw_slots(
    dim: int,
    size: int,
    sqrt_scaling: bool,
    stack: HashStackConfig | None,
    samples: list[list[int]],
    seed: int,
) -> None:
    slot = SlotConfig(
        dim=dim,
        embedding_summation=False,
        sample_fixed_size=size,
        sqrt_scaling=sqrt_scaling,
        hash_stack_config=stack,
    )
    case = Case(slot, samples, None, seed)
    follow(client_of(case), case)


def many_weighted() -> Case:
    rng = np.random.default_rng(3)
    samples = [[int(i) for i in rng.integers(0, NUM_IDS, rng.integers(0, 6))] for _ in range(40)]
    weights = [[float(w) for w in rng.uniform(0.5, 2, len(sample))] for sample in samples]
    return Case(SlotConfig(dim=8, mean_scaling=True), samples, weights, 7)


@contextlib.contextmanager
def cluster(case: Case, wire_dtype: str) -> Iterator[_native.EmbeddingClient]:
    """An embedding worker between two parameter servers and the client, over sockets."""
    servers = [
        _native.ParameterServer(replica_index=i, replica_size=2, capacity=1000, num_internal_shards=2)
        for i in range(2)
    ]
    worker = _native.EmbeddingWorker(
        slots=slots_of(case).native_slots(), feature_index_prefix_bit=PREFIX, num_servers=2
    )
    try:
        for index, server in enumerate(servers):
            worker.set_server(index, f"127.0.0.1:{server.start('127.0.0.1', 0)}")
        client = _native.RemoteClient(1, wire_dtype=wire_dtype)
        client.set_worker(0, f"127.0.0.1:{worker.start('127.0.0.1', 0)}")
        configure(client)
        yield client
    finally:
        worker.stop()
        for server in servers:
            server.stop()


def test_a_cluster_gives_the_same_bits() -> None:
    case = many_weighted()
    with cluster(case, "float32") as client:
        found, after = follow(client, case)
    expected, expected_after = follow(client_of(case), case)
    assert torch.equal(found, expected)
    np.testing.assert_array_equal(after, expected_after)


def raw_case() -> Case:
    samples = many_weighted().samples
    return Case(SlotConfig(dim=5, embedding_summation=False, sample_fixed_size=3), samples, None, 11)


CASES_OF_16_BITS = pytest.mark.parametrize("case", [many_weighted(), raw_case()], ids=["pooled", "raw"])
DTYPES_OF_16_BITS = pytest.mark.parametrize(
    ("wire_dtype", "error"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)]
)


@CASES_OF_16_BITS
@DTYPES_OF_16_BITS
def test_16_bits_lose_of_embeddings_what_is_stated(case: Case, wire_dtype: str, error: float) -> None:
    ids, exact = id_features(case.feature()), client_of(case)
    with cluster(case, wire_dtype) as narrow:
        for client in (exact, narrow):
            read_rows(client, case, insert=True)
        expected, found = (
            np.array(client.lookup_direct(0, ids, requires_grad=False).slots[0].rows)
            for client in (exact, narrow)
        )
    np.testing.assert_allclose(found, expected, rtol=error, atol=2.0**-39)
    assert (found != expected).any()  # 16 bits indeed


@CASES_OF_16_BITS
@DTYPES_OF_16_BITS
def test_16_bits_lose_of_gradients_what_is_stated(case: Case, wire_dtype: str, error: float) -> None:
    """Rows begin with zeros and become minus their gradients, which float16 alone has no numbers for."""

    def train(client: _native.EmbeddingClient, gradient: NDArray[np.float32] | None) -> NDArray[np.float32]:
        configure(client, (0.0, 0.0))
        result = client.lookup_direct(0, id_features(case.feature()), requires_grad=True)
        client.return_gradients(result.reference, [("tested", gradient)])
        return -read_rows(client, case)

    result = client_of(case).lookup_direct(0, id_features(case.feature()), requires_grad=True)
    gradient = case.gradient(*result.slots[0].rows.shape).numpy() * np.float32(1e-9)
    expected, magnitude = train(client_of(case), gradient), train(client_of(case), np.abs(gradient))
    with cluster(case, wire_dtype) as narrow:
        found = train(narrow, gradient)
    assert (np.abs(found - expected) <= magnitude * (error + 1e-5)).all()
    assert (found != expected).any()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases=st.lists(pooled_cases(), min_size=1, max_size=3), num_threads=st.integers(1, 2))
def test_the_embedding_bag_collection(cases: list[Case], num_threads: int) -> None:
    """Slots side by side, of one batch size; weights for all of them or for none."""
    size = min(len(case.samples) for case in cases)
    has_weights = any(case.weights is not None for case in cases)
    cases = [
        Case(
            case.slot,
            case.samples[:size],
            (case.weights or [[1.0] * len(s) for s in case.samples])[:size] if has_weights else None,
            case.gradient_seed,
        )
        for case in cases
    ]
    slots = {f"slot{i}": case.slot for i, case in enumerate(cases)}
    readers = {f"reader{i}": SlotConfig(dim=case.slot.dim) for i, case in enumerate(cases)}
    collection = EmbeddingBagCollection(
        SlotsConfig(
            slots_config=slots | readers,
            feature_groups={f"group{i}": (f"slot{i}", f"reader{i}") for i in range(len(cases))},
        ),
        SGD(lr=1.0),
        embedding_config=EmbeddingConfig(emb_initialization=(-1.0, 1.0), weight_bound=0.0, seed=5),
        num_threads=num_threads,
    )
    before = read_collection(collection, cases, insert=True)
    tables = [torch.tensor(rows, dtype=torch.float64, requires_grad=True) for rows in before]
    expected = torch.cat([expected_pooled(c, t) for c, t in zip(cases, tables, strict=True)], dim=1)
    values = [i for case in cases for sample in case.samples for i in sample]
    lengths = [[len(sample) for sample in case.samples] for case in cases] + [[0] * size for _ in cases]
    weights = [w for case in cases for sample in case.weights or [] for w in sample]
    found = collection(
        torch.tensor(values, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int64),
        torch.tensor(weights, dtype=torch.float32) if has_weights else None,
    )
    width = expected.shape[1]
    torch.testing.assert_close(found.detach()[:, :width].double(), expected.detach(), **TOLERANCE)
    gradient = cases[0].gradient(size, width)
    found[:, :width].backward(gradient)
    expected.backward(gradient.double())
    for table, after in zip(tables, read_collection(collection, cases), strict=True):
        moved = torch.zeros_like(table) if table.grad is None else table.grad
        torch.testing.assert_close(torch.tensor(after).double(), table.detach() - moved, **TOLERANCE)


def read_collection(
    collection: EmbeddingBagCollection, cases: list[Case], *, insert: bool = False
) -> list[NDArray[np.float32]]:
    """All rows of each slot, through the readers."""
    size = max(case.num_rows for case in cases)
    values = torch.cat([torch.arange(case.num_rows) for case in cases])
    counts = [[int(i < case.num_rows) for i in range(size)] for case in cases]
    lengths = torch.tensor([[0] * size for _ in cases] + counts)
    with torch.set_grad_enabled(insert):
        pooled = collection(values, lengths).detach().numpy()
    columns = np.cumsum([0] + [case.slot.dim for case in cases] * 2)[len(cases) :]
    return [pooled[: case.num_rows, columns[i] : columns[i + 1]].copy() for i, case in enumerate(cases)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_the_collection(bad: float) -> None:
    collection = EmbeddingBagCollection({"a": 2}, SGD(lr=1.0))
    with pytest.raises(InvalidArgumentError, match="weight"):
        collection(torch.tensor([1]), torch.tensor([[1]]), torch.tensor([bad]))
