"""Batches whose embedding worker has died continue on another one, and are updated once."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from persia import _native
from persia._native import BatchReference
from persia.errors import NotFoundError, UnavailableError
from persia.pipeline.failover import HeldBatches, accepts_connections

FIRST, SECOND, THIRD = BatchReference(0, 7, 1), BatchReference(1, 8, 1), BatchReference(0, 9, 1)


class Workers:
    def __init__(self, *successors: BatchReference) -> None:
        self.successors = list(successors)
        self.dead: set[int] = set()
        self.registered: list[tuple[bytes | memoryview, BatchReference]] = []

    def is_gone(self, reference: BatchReference) -> bool:
        return reference.worker_incarnation in self.dead

    def register(self, id_features: bytes | memoryview, original: BatchReference) -> BatchReference:
        self.registered.append((id_features, original))
        return self.successors.pop(0)

    def call(self, reference: BatchReference) -> BatchReference:
        if self.is_gone(reference):
            raise UnavailableError("dead")
        return reference


def test_calls_follow_a_batch_from_worker_to_worker_under_its_first_reference() -> None:
    workers = Workers(SECOND, THIRD)
    held = HeldBatches(workers, deadline_s=60.0)
    held.keep(FIRST, b"ids")
    assert held.call(FIRST, workers.call) is FIRST
    workers.dead = {7, 8}
    assert held.call(FIRST, workers.call) is THIRD
    assert held.call(SECOND, workers.call) is THIRD
    assert workers.registered == [(b"ids", FIRST), (b"ids", FIRST)]
    assert held.forget(SECOND) is THIRD
    with pytest.raises(UnavailableError):  # nothing is kept of a batch that has ended
        held.call(FIRST, workers.call)


def test_errors_of_a_worker_that_lives_are_raised() -> None:
    workers = Workers(SECOND)
    held = HeldBatches(workers, deadline_s=60.0)
    held.keep(FIRST, b"ids")

    def expired(reference: BatchReference) -> None:
        raise NotFoundError("expired")

    with pytest.raises(NotFoundError, match="expired"):
        held.call(FIRST, expired)
    assert workers.registered == []


class Cluster:
    """A parameter server and two embedding workers, in this process."""

    def __init__(self) -> None:
        self.server = _native.ParameterServer(
            replica_index=0, replica_size=1, capacity=100, num_internal_shards=1
        )
        address = f"127.0.0.1:{self.server.start('127.0.0.1', 0)}"
        self.workers, self.client = [], _native.RemoteClient(2)
        for index in range(2):
            slots = [_native.SlotConfig(name="a", dim=2)]
            worker = _native.EmbeddingWorker(slots=slots, feature_index_prefix_bit=8, num_servers=1)
            worker.set_server(0, address)
            self.client.set_worker(index, f"127.0.0.1:{worker.start('127.0.0.1', 0)}")
            self.workers.append(worker)
        self.client.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for worker in cluster.workers:
        worker.stop()
    cluster.server.stop()


@pytest.mark.parametrize("sent", [True, False])
def test_an_update_that_the_dead_worker_sent_is_not_applied_again(cluster: Cluster, sent: bool) -> None:
    client = cluster.client
    message = _native.encode_id_features(
        1, [("a", np.array([5], dtype=np.uint64), np.array([0, 1], dtype=np.uint32))]
    )
    first = client.lookup_direct(0, message, requires_grad=True)
    before = first.slots[0].rows.copy()
    gradient = [("a", np.ones((1, 2), dtype=np.float32))]
    if sent:
        client.return_gradients(first.reference, gradient)
    cluster.workers[0].stop()
    client.drop_worker(0)
    with pytest.raises(UnavailableError):
        client.return_gradients(first.reference, gradient, timeout_s=0.2)
    again = client.lookup_direct(0, message, requires_grad=True, original=first.reference)
    assert again.reference.worker_index == 1
    client.return_gradients(again.reference, gradient)
    after = client.lookup_direct(0, message, requires_grad=False).slots[0].rows
    np.testing.assert_allclose(after, before - 1.0, atol=1e-6)


def test_a_port_that_nobody_listens_at_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert accepts_connections(address)
    assert not accepts_connections(address)
