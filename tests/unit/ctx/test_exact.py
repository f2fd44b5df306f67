"""consistency="exact": random batches against the embedded engine, and what the mode refuses."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia import _native
from persia.config import SlotsConfig, parse_embedding_config
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, PersiaBatch
from persia.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from persia.pipeline.backend import ClusterBackend, EmbeddingBackend
from persia.pipeline.exact import ExactCalls
from persia.pipeline.staleness import Consistency, Mode, lookup_stages

SLOTS = parse_embedding_config(
    {
        "feature_index_prefix_bit": 8,
        "slots_config": {
            "single": {"dim": 4},
            "tags": {"dim": 3, "sqrt_scaling": True},
            "raw": {"dim": 5, "embedding_summation": False, "sample_fixed_size": 3},
            "left": {"dim": 2},
            "right": {"dim": 2, "mean_scaling": True},
            "hashed": {"dim": 2, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 30}},
        },
        "feature_groups": {"shared": ["left", "right"]},
    }
)
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"optimizer": "sgd", "lr": 0.3},
    {"optimizer": "adagrad", "lr": 0.3},
    {"optimizer": "adam", "lr": 0.05},
)


class Cluster:
    """Two parameter servers and an embedding worker in this process, behind sockets."""

    def __init__(self) -> None:
        self._roles: list[Any] = []
        worker = _native.EmbeddingWorker(
            slots=SLOTS.native_slots(), feature_index_prefix_bit=SLOTS.feature_index_prefix_bit, num_servers=2
        )
        for index in range(2):
            server = _native.ParameterServer(
                replica_index=index, replica_size=2, capacity=10_000, num_internal_shards=2
            )
            self._roles.append(server)
            worker.set_server(index, f"127.0.0.1:{server.start('127.0.0.1', 0)}")
        self._roles.append(worker)
        self.client = _native.RemoteClient(1)
        self.client.set_worker(0, f"127.0.0.1:{worker.start('127.0.0.1', 0)}")
        self.client.begin_exact(
            slots=SLOTS.native_slots(), feature_index_prefix_bit=SLOTS.feature_index_prefix_bit
        )

    def stop(self) -> None:
        for role in reversed(self._roles):
            role.stop()


def make_batch(random: np.random.Generator) -> bytes:
    size, hot = int(random.integers(1, 9)), int(random.integers(2, 20))

    def ids(most: int) -> list[Any]:
        return [random.integers(0, hot, random.integers(0, most + 1)).astype(np.uint64) for _ in range(size)]

    features: list[Any] = [
        IDTypeFeatureWithSingleID("single", random.integers(0, hot, size).astype(np.uint64)),
        *(IDTypeFeature(name, ids(4)) for name in ("tags", "raw", "left", "right", "hashed")),
    ]
    random.shuffle(features)
    return PersiaBatch(features, requires_grad=False).encode_id_features()


def rows_of(result: _native.LookupResult) -> dict[str, bytes]:
    return {slot.name: slot.rows.tobytes() for slot in result.slots}


def gradients_of(result: _native.LookupResult, step: int) -> list[tuple[str, Any]]:
    """They depend on the embeddings: one bit that differs grows from step to step."""
    gradients = [
        (slot.name, (3 * slot.rows + np.float32(0.01) * (step % 5)).astype(np.float32))
        for slot in result.slots
    ]
    if step % 6 == 4:
        gradients[step % len(gradients)] = (gradients[step % len(gradients)][0], None)
    if step % 9 == 7 and gradients[0][1] is not None and gradients[0][1].size:
        gradients[0][1].flat[0] = np.inf
    return gradients


def train_exactly(
    client: _native.RemoteClient, batches: list[bytes], in_flight: int
) -> list[dict[str, bytes]]:
    history, updates, ahead = [], deque[Future[Any]](), deque[Future[_native.LookupResult]]()
    waiting: deque[tuple[Any, list[tuple[str, Any]]]] = deque()
    anywhere = _native.BatchReference(0, 0, 0)
    with ThreadPoolExecutor(2 * in_flight) as pool:
        for step in range(len(batches)):
            while len(ahead) + len(waiting) < in_flight and step + len(ahead) < len(batches):
                ahead.append(pool.submit(client.lookup_whole, anywhere, batches[step + len(ahead)]))
            reference = ahead.popleft().result().reference
            pooled = client.pool_exact(reference)
            history.append(rows_of(pooled))
            gradients = gradients_of(pooled, step)
            client.apply_exact(reference, gradients, scale=2.0)
            waiting.append((reference, gradients))
            while len(waiting) > in_flight // 2:
                updates.append(pool.submit(client.return_gradients, *waiting.popleft(), scale=2.0))
        for late in waiting:
            updates.append(pool.submit(client.return_gradients, *late, scale=2.0))
        for update in updates:
            update.result()
    return history


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1), st.sampled_from((1, 4, 16)), st.sampled_from(OPTIMIZERS))
def test_random_batches_equal_the_embedded_engine(
    seed: int, in_flight: int, optimizer: dict[str, Any]
) -> None:
    random = np.random.default_rng(seed)
    batches = [make_batch(random) for _ in range(40)]
    config = _native.TrainConfig(**optimizer)
    embedded = _native.EmbeddedClient(
        slots=SLOTS.native_slots(), feature_index_prefix_bit=SLOTS.feature_index_prefix_bit
    )
    embedded.configure(config)
    expected = []
    for step, batch in enumerate(batches):
        result = embedded.lookup_direct(0, batch, requires_grad=True)
        expected.append(rows_of(result))
        embedded.return_gradients(result.reference, gradients_of(result, step), scale=2.0)
    cluster = Cluster()
    try:
        cluster.client.configure(config)
        assert train_exactly(cluster.client, batches, in_flight) == expected
        held = {name: value for name, _, _, value in cluster.client.exact_metrics()}
        assert held["persia_nn_replayed_rows"] > 0
        cluster.client.end_exact()
        # The rows of the servers, and by one more update their optimizer state.
        for batch in batches[:3]:
            ours = cluster.client.lookup_direct(0, batch, requires_grad=True)
            theirs = embedded.lookup_direct(0, batch, requires_grad=True)
            assert rows_of(ours) == rows_of(theirs)
            for client, result in ((cluster.client, ours), (embedded, theirs)):
                client.return_gradients(result.reference, gradients_of(result, 0))
    finally:
        cluster.stop()


def test_rows_are_set_and_cleared_only_without_batches_in_flight() -> None:
    cluster = Cluster()
    try:
        client = cluster.client
        client.configure(_native.TrainConfig(optimizer="sgd", lr=0.3))
        remote = EmbeddingBackend(client, deadline_s=30.0)
        batch = make_batch(np.random.default_rng(1))
        ids, rows = np.arange(3, dtype=np.uint64), np.ones((3, 4), np.float32)
        anywhere = _native.BatchReference(0, 0, 0)
        with client.other_rows("a checkpoint was loaded"):
            remote.set_slot_rows(SLOTS, "single", ids, rows)
            with pytest.raises(DeadlineExceededError, match="still being set, cleared or loaded"):
                client.lookup_whole(anywhere, batch, timeout_s=0.0)
        assert remote.sizes() != [0, 0]
        remote.clear()
        assert remote.sizes() == [0, 0]
        reference = client.lookup_whole(anywhere, batch).reference
        with pytest.raises(FailedPreconditionError, match="rows were set while .* 1 batches in flight"):
            remote.set_slot_rows(SLOTS, "single", ids, rows)
        with pytest.raises(FailedPreconditionError, match="rows were cleared while"):
            remote.clear()
        client.release(reference)
        remote.clear()
    finally:
        cluster.stop()


def test_an_embedded_job_trains_synchronously(make_ctx: Any, make_dataset: Any) -> None:
    from persia.data import DataLoader

    with make_ctx(consistency="exact") as ctx:
        for batch in DataLoader(make_dataset(6), embedding_staleness=4):
            ctx.backward(ctx.forward(batch)[0].sum())
        assert ctx.staleness.max == 0
        assert ctx.counters.batches_trained == 6


def begin(backend: Any, slots: SlotsConfig | None = SLOTS, **options: Any) -> ExactCalls | None:
    return ExactCalls.begin(backend, slots, **{"world_size": 1, "device": None, **options})


class Remote(ClusterBackend):
    """A backend of a cluster that is never called."""

    def __init__(self, schema: str = "", slot_modes: tuple[str, ...] = ("",)) -> None:
        self.schema, self.slot_modes = schema, slot_modes
        self.count_in_flight = lambda: 0


def test_what_is_not_exact_is_refused_with_a_remedy(backend: EmbeddingBackend) -> None:
    with pytest.raises(InvalidArgumentError, match="world_size 2: .* use consistency='synchronous'"):
        begin(backend, world_size=2)
    with pytest.raises(
        InvalidArgumentError, match="slots of .'hybrid 4'. in the embedding config: leave out"
    ):
        begin(Remote(slot_modes=("", "hybrid 4")))
    with pytest.raises(InvalidArgumentError, match="the device cuda: .* leave device_id out"):
        begin(Remote(), device=torch.device("cuda"))
    with pytest.raises(FailedPreconditionError, match="needs the job's slots: give slots="):
        begin(Remote(), slots=None)
    with pytest.raises(InvalidArgumentError, match="other slots than the embedding workers"):
        begin(Remote(schema="another"))
    assert begin(backend) is None


def test_exact_batches_are_bounded_as_hybrid_ones() -> None:
    (stage,) = lookup_stages(Mode.of(Consistency.EXACT, 4), ("",))
    assert stage.mode.bound == 4
    assert not stage.mode.synchronous
