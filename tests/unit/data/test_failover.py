"""Batches whose embedding worker has died continue on another one, and are updated once."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from persia import _native
from persia._native import BatchReference
from persia.errors import (
    InvalidArgumentError,
    NotFoundError,
    PersiaError,
    UnavailableError,
)
from persia.messaging.discovery import EventKind, ServiceEvent
from persia.pipeline import workers as worker_module
from persia.pipeline.backend import ClusterBackend
from persia.pipeline.exact import ExactCalls
from persia.pipeline.failover import AbandonedBatches
from persia.pipeline.send import BatchSender
from persia.pipeline.staleness import served_slots
from persia.pipeline.workers import HeldBatches, is_down
from persia.waiting import Attempts
from tests.unit.data.worker_cluster import (
    GRADIENT,
    IDS,
    Cluster,
    WorkerDirectory,
    info,
    register,
    seem_dead,
)

FIRST, SECOND, THIRD = BatchReference(0, 7, 1), BatchReference(1, 8, 1), BatchReference(0, 9, 1)


class Workers:
    def __init__(self, *successors: BatchReference) -> None:
        self.successors = list(successors)
        self.dead: set[int] = set()
        self.registered: list[tuple[bytes | memoryview, BatchReference]] = []
        self.abandoned: list[BatchReference] = []

    def abandon(self, reference: BatchReference) -> None:
        self.abandoned.append(reference)

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
    assert workers.abandoned == [FIRST, SECOND]
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


def test_a_batch_that_ends_during_a_call_is_not_registered_again() -> None:
    workers = Workers(SECOND)
    workers.dead = {7}
    held = HeldBatches(workers, deadline_s=60.0)
    held.keep(FIRST, b"ids")

    def end_and_fail(reference: BatchReference) -> None:
        held.forget(reference)
        raise UnavailableError("dead")

    with pytest.raises(UnavailableError):
        held.call(FIRST, end_and_fail)
    assert workers.registered == []
    assert held.forget(SECOND) is SECOND  # nothing is kept


@pytest.mark.parametrize("sent", [True, False])
def test_an_update_that_the_dead_worker_sent_is_not_applied_again(cluster: Cluster, sent: bool) -> None:
    client = cluster.client
    message = IDS
    first = client.lookup_direct(0, message, requires_grad=True)
    before = first.slots[0].rows.copy()
    gradient = GRADIENT
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


def test_a_port_without_a_listener_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert not is_down(address)
    assert is_down(address)


def test_a_host_whose_name_is_not_found_may_be_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "create_connection", fail)
    assert not is_down("worker:1")


def test_gradients_go_on_to_another_worker_when_theirs_dies(
    cluster: Cluster, backend: ClusterBackend, log: Any
) -> None:
    reference = register(cluster, 1)
    before = backend.lookup(reference, requires_grad=True, id_features=IDS).slots[0].rows.copy()
    cluster.workers[1].stop()  # the monitor finds out
    assert backend.return_gradients(reference, GRADIENT, scale=1.0).num_updated == 1
    after = backend.lookup_direct(IDS, requires_grad=False).slots[0].rows
    np.testing.assert_allclose(after, before - 1.0, atol=1e-6)
    assert backend.is_gone(reference)
    for _ in Attempts(30.0, pause_s=0.01):  # the monitor says so after it has acted
        if "has died: its batches continue on other workers" in log.text:
            return
    pytest.fail(log.text)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_batch_that_its_worker_has_released_for_a_new_rank_is_looked_up_again(
    cluster: Cluster, backend: ClusterBackend, requires_grad: bool
) -> None:
    reference = register(cluster, 1)
    assert [worker.release_waiting() for worker in cluster.workers] == [0, 1]
    result = backend.lookup(reference, requires_grad=requires_grad, id_features=IDS)
    before = result.slots[0].rows.copy()
    if requires_grad:
        assert backend.return_gradients(result.reference, GRADIENT, scale=1.0).num_updated == 1
        after = backend.lookup_direct(IDS, requires_grad=False).slots[0].rows
        np.testing.assert_allclose(after, before - 1.0, atol=1e-6)
    assert backend._held._batches == {}


def test_an_exact_context_looks_a_released_batch_up_again(cluster: Cluster, backend: ClusterBackend) -> None:
    slots = [_native.SlotConfig(name="a", dim=2)]
    backend.client.begin_exact(slots=slots, feature_index_prefix_bit=8, served=served_slots(("",)))
    backend.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))
    exact = ExactCalls(backend)
    reference = register(cluster, 1)
    cluster.workers[1].release_waiting()
    moved = exact.look_up(reference, IDS).reference
    before = exact.pool(moved).slots[0].rows.copy()
    exact.apply(moved, GRADIENT, 1.0)
    assert backend.return_gradients(moved, GRADIENT, scale=1.0).num_updated == 1
    after = backend.lookup_direct(IDS, requires_grad=False).slots[0].rows
    np.testing.assert_allclose(after, before - 1.0, atol=1e-6)
    assert backend._held._batches == {}
    backend.client.end_exact()


def test_an_evaluation_goes_on_at_another_worker(cluster: Cluster, backend: ClusterBackend) -> None:
    reference = register(cluster, 1)
    cluster.workers[1].stop()
    result = backend.lookup(reference, requires_grad=False, id_features=IDS)
    assert result.reference.worker_index == 0
    assert backend._held._batches == {}


def test_the_only_worker_is_not_dropped(
    cluster: Cluster, backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    seem_dead(monkeypatch, *cluster.addresses)
    backend._workers.drop_dead({None})
    assert sorted(backend._workers._used) == [0, 1]


def test_only_the_workers_of_slow_calls_are_looked_at(
    cluster: Cluster, backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    monkeypatch.setattr(worker_module, "is_down", looked_at.append)
    backend._workers.drop_dead({1})
    assert looked_at == [cluster.addresses[1]]


def test_a_worker_that_only_seemed_dead_is_used_again(
    cluster: Cluster, backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    seem_dead(monkeypatch, cluster.addresses[1])
    backend._workers.drop_dead({1})
    reference = register(cluster, 1)
    result = backend.lookup(reference, requires_grad=True, id_features=IDS)
    assert result.reference.worker_index == 0
    seem_dead(monkeypatch)
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 3600)
    reference = register(cluster, 1)
    result = backend.lookup(reference, requires_grad=True, id_features=IDS)
    assert result.reference.worker_index == 1
    assert not backend.is_gone(reference)


def test_batches_that_continued_elsewhere_are_released_at_a_worker_that_only_seemed_dead(
    cluster: Cluster, backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PROBE_S", 1.0)
    backend._abandoned._pause_s = 0.05
    seem_dead(monkeypatch, cluster.addresses[1])
    references = [register(cluster, 1) for _ in range(3)]
    backend._workers.drop_dead({1})
    for reference in references:
        assert backend.lookup(reference, requires_grad=True, id_features=IDS).reference.worker_index == 0
    assert cluster.workers[1].stats()["num_buffered"] == 3
    seem_dead(monkeypatch)
    for _ in Attempts(60.0):
        if cluster.workers[1].stats()["num_released"] == 3:
            break
    assert cluster.workers[1].stats()["num_buffered"] == 0


def test_batches_of_a_worker_that_was_replaced_are_forgotten(backend: ClusterBackend) -> None:
    backend._abandoned._pause_s = 0.01
    backend.abandon(BatchReference(1, 99, 1))
    for _ in Attempts(60.0):
        if not backend._abandoned._batches:
            return
    raise AssertionError(backend._abandoned._batches)


def test_a_failed_look_for_a_worker_leaves_its_batches_to_the_next_one() -> None:
    looks: list[bool | PersiaError] = [UnavailableError("the broker is away"), True, False]
    released: list[BatchReference] = []

    def is_gone(_reference: BatchReference) -> bool:
        look = looks.pop(0)
        if isinstance(look, PersiaError):
            raise look
        return look

    batches = AbandonedBatches(is_gone, released.append, pause_s=0.01)
    batches.add(FIRST)
    for _ in Attempts(60.0):
        if not batches._batches:
            break
    assert released == [FIRST]


def test_a_call_is_repeated_at_a_worker_that_was_given_up_under_it_and_lives(
    cluster: Cluster, backend: ClusterBackend, directory: WorkerDirectory
) -> None:
    reference, calls = register(cluster, 1), []

    def call(at: BatchReference) -> str:
        calls.append(at)
        if len(calls) == 1:
            backend._workers._num_dropped += 1  # and the worker has answered another thread since
            raise UnavailableError("the channel was closed")
        return "answer"

    assert backend._call_worker(call, reference) == "answer"
    with pytest.raises(UnavailableError):
        backend._call_worker(lambda _: (_ for _ in ()).throw(UnavailableError("busy")), reference)


def test_a_worker_that_has_left_is_no_dead_one(
    cluster: Cluster, backend: ClusterBackend, directory: WorkerDirectory, log: Any
) -> None:
    reference = register(cluster, 1)
    backend.lookup(reference, requires_grad=True, id_features=IDS)
    directory.tell(ServiceEvent(EventKind.LEFT, directory.here[1]))
    cluster.workers[1].stop()
    assert backend.return_gradients(reference, GRADIENT, scale=1.0).num_updated == 1
    assert sorted(backend._workers._used) == [0]
    assert "has died" not in log.text


def test_a_worker_is_gone_once_another_one_answers_at_its_index(
    cluster: Cluster, backend: ClusterBackend, directory: WorkerDirectory
) -> None:
    reference = register(cluster, 1)
    assert not backend.is_gone(reference)
    here = directory.here.pop()
    assert not backend.is_gone(reference), "no answer is no death"
    directory.here.append(info(1, 99, here.address))
    assert backend.is_gone(reference)
    assert backend._workers._used[1].incarnation == 99
    assert backend.is_gone(reference)


def test_a_call_is_repeated_though_as_many_workers_are_dead_as_before(
    backend: ClusterBackend, directory: WorkerDirectory
) -> None:
    calls: list[int] = []

    def call() -> str:
        calls.append(1)
        if len(calls) == 1:
            backend._workers._use(info(1, 99, directory.here[1].address))
            backend._workers._dead.clear()  # as when a worker is found that only seemed dead
            raise UnavailableError("dead")
        return "answer"

    assert backend._call_any(call) == "answer"


def test_the_first_lookup_of_a_successor_is_no_repetition_of_its_predecessor(
    cluster: Cluster, backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers would not apply its update, as the predecessor has sent one under the same key."""
    reference = register(cluster, 1)
    backend.lookup(reference, requires_grad=True, id_features=IDS)
    backend.return_gradients(reference, GRADIENT, scale=1.0)
    cluster.workers[1].stop()
    seem_dead(monkeypatch, cluster.addresses[1])
    result = backend.lookup(reference, requires_grad=True, id_features=IDS)
    before = result.slots[0].rows.copy()
    backend.return_gradients(result.reference, GRADIENT, scale=1.0)
    after = backend.lookup_direct(IDS, requires_grad=False).slots[0].rows
    np.testing.assert_allclose(after, before - 1.0, atol=1e-6)


def test_a_batch_whose_gradients_are_refused_is_not_kept(cluster: Cluster, backend: ClusterBackend) -> None:
    reference = register(cluster, 0)
    backend.lookup(reference, requires_grad=True, id_features=IDS)
    with pytest.raises(InvalidArgumentError):
        backend.return_gradients(reference, [("a", np.ones((3, 5), dtype=np.float32))], scale=1.0)
    assert backend._held._batches == {}


def test_workers_are_looked_at_side_by_side(
    cluster: Cluster, backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that do not answer take two seconds each."""
    together = threading.Barrier(2)

    def is_down(address: str) -> bool:
        together.wait(120)  # BrokenBarrierError: they were asked one after the other
        return address == cluster.addresses[1]

    monkeypatch.setattr(worker_module, "is_down", is_down)
    assert worker_module.find_down(list(backend._workers._used.values())) == [backend._workers._used[1]]


def test_a_look_that_fails_leaves_no_threads(
    backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixtures of every test look for threads."""
    monkeypatch.setattr(worker_module, "is_down", int)  # the address is no number
    with pytest.raises(ValueError, match="invalid literal"):
        worker_module.find_down(list(backend._workers._used.values()))


def test_the_dense_part_of_a_message_is_not_kept() -> None:
    message = b"i" * 1000 + b"d" * 1_000_000
    held = HeldBatches(Workers(), deadline_s=60.0)
    tracemalloc.start()
    try:
        held.keep(FIRST, memoryview(message)[:1000])
        held.keep(SECOND, memoryview(view := bytes(1000))[100:])
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()
    kept = held._batches[(7, 1)].id_features
    assert kept == b"i" * 1000
    assert isinstance(kept, bytes), "a view keeps the whole message"
    # Most of the message: not worth a copy.
    assert isinstance(other := held._batches[(8, 1)].id_features, memoryview)
    assert other.obj is view


def test_a_loader_gives_up_when_no_worker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.pipeline.send._UNAVAILABLE_S", 0.0)  # each can always be replaced
    give_up = time.monotonic() + 60

    def request(*_: Any) -> bytes:
        assert time.monotonic() < give_up, "it asks the two workers in turn for ever"
        raise UnavailableError("nothing listens")

    session: Any = SimpleNamespace(request=request, subjects=SimpleNamespace(ids=str), is_connected=True)
    directory: Any = None
    sender = BatchSender(session, directory, 0, 1, 0.3)
    sender._workers = {0: 7, 1: 8}
    with pytest.raises(UnavailableError, match="no embedding worker answered"):
        sender._register(b"ids")
