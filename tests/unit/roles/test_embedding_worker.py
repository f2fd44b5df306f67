"""The embedding worker's part in discovery and registration, with a worker that only takes notes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from persia.messaging.discovery import Advertiser, Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.local_session import LocalBroker, LocalSession
from persia.messaging.payloads import FlowReply, IdsRequest, ReplyStatus
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER
from persia.pipeline.send import RegisterBatchHandler
from persia.roles.embedding_worker import ServerLinks, count_workers, drain, watch_ranks


class Worker:
    incarnation = 77

    def __init__(self, failure: Exception | None = None) -> None:
        self.servers: list[tuple[int, str]] = []
        self.replaced: list[list[str]] = []
        self.placements: list[tuple[int, Any]] = []
        self.registered: list[tuple[int, bytes]] = []
        self.num_released = 0
        self._failure = failure

    def set_server(self, index: int, address: str) -> None:
        self.servers.append((index, address))

    def replace_servers(self, addresses: list[str], *, generation: int, moved_shards: Any) -> None:
        self.replaced.append(addresses)
        self.placements.append((generation, moved_shards))

    def release_waiting(self) -> int:
        self.num_released += 1
        return 1

    def register_batch(self, loader_index: int, id_features: Any) -> tuple[int, int]:
        if self._failure is not None:
            raise self._failure
        self.registered.append((loader_index, bytes(id_features)))
        return self.incarnation, 5


def server(incarnation: int, address: str, index: int = 0, replicas: int = 2, **more: Any) -> ServiceInfo:
    return ServiceInfo(
        role=EMBEDDING_PARAMETER_SERVER,
        index=index,
        replicas=replicas,
        incarnation=incarnation,
        address=address,
        **more,
    )


def rank(incarnation: int) -> ServiceInfo:
    return ServiceInfo(role=NN_WORKER, index=0, replicas=1, incarnation=incarnation, address="h:1")


def test_waiting_batches_are_released_when_a_rank_joins_but_not_when_it_leaves():
    broker, worker = LocalBroker(), Worker()
    watch_ranks(Directory(LocalSession(broker, name="worker")), worker)
    advertiser = Advertiser(LocalSession(broker, name="rank"), rank(1))
    advertiser.start()
    assert worker.num_released == 1
    advertiser.stop()
    assert worker.num_released == 1


def test_a_rank_that_runs_already_keeps_its_batches_when_it_says_again_that_it_has_joined():
    broker, worker = LocalBroker(), Worker()
    predecessor = Advertiser(LocalSession(broker, name="rank"), rank(1))
    predecessor.start()
    watch_ranks(Directory(LocalSession(broker, name="worker")), worker)
    predecessor.publish_again()
    assert worker.num_released == 0
    predecessor.stop()
    Advertiser(LocalSession(broker, name="successor"), rank(2)).start()
    assert worker.num_released == 1


def test_links_follow_restarts_and_ignore_repetitions():
    worker = Worker()
    links = ServerLinks(worker, 2)
    links.connect(server(1, "h:1"))
    links.on_event(ServiceEvent(EventKind.JOINED, server(1, "h:1")))
    links.on_event(ServiceEvent(EventKind.LEFT, server(1, "h:1")))
    links.on_event(ServiceEvent(EventKind.JOINED, server(2, "h:2")))
    links.on_event(ServiceEvent(EventKind.JOINED, server(3, "h:3", index=1)))
    assert worker.servers == [(0, "h:1"), (0, "h:2"), (1, "h:3")]


def test_links_ignore_a_server_that_was_replaced_and_wakes():
    worker = Worker()
    links = ServerLinks(worker, 2)
    links.connect(server(2, "h:2", term=2))
    links.connect(server(1, "h:1", term=1))
    links.connect(server(3, "h:3", term=3))
    links.connect(server(3, "h:3", term=5))  # it has taken a higher term
    links.connect(server(4, "h:4", term=4))
    assert worker.servers == [(0, "h:2"), (0, "h:3")]


def test_callers_do_not_find_a_server_that_does_not_serve():
    broker, serves = LocalBroker(), [False]
    session = LocalSession(broker, name="test")
    one = server(1, "h:1", replicas=1)
    Advertiser(session, one, is_serving=lambda: serves[0]).start()
    assert Directory(session).present(EMBEDDING_PARAMETER_SERVER, 1.0) == []
    with pytest.raises(FailedPreconditionError, match="is running already"):  # newcomers see it
        Advertiser(LocalSession(broker, name="newcomer"), replace(one, incarnation=2)).start()
    serves[0] = True
    assert Directory(session).present(EMBEDDING_PARAMETER_SERVER, 1.0) == [one]


def test_a_server_of_another_shape_is_not_used():
    worker = Worker()
    ServerLinks(worker, 2).connect(server(1, "h:1", replicas=3))
    assert not worker.servers


def test_servers_of_the_next_generation_replace_those_of_before_once_all_are_known():
    worker = Worker()
    links = ServerLinks(worker, 2)
    links.connect(server(1, "h:1"))
    links.connect(server(12, "n:2", index=2, replicas=3, generation=1))
    links.connect(server(10, "n:0", index=0, replicas=3, generation=1))
    links.connect(server(2, "h:2", index=1))  # training continues meanwhile
    assert worker.replaced == []
    links.connect(server(11, "n:1", index=1, replicas=3, generation=1))
    assert worker.replaced == [["n:0", "n:1", "n:2"]]
    links.connect(server(3, "h:3"))  # of before
    links.connect(server(21, "n:3", index=1, replicas=3, generation=1))  # started again
    assert worker.servers == [(0, "h:1"), (1, "h:2"), (1, "n:3")]


def test_servers_of_two_generations_are_never_used_together():
    worker = Worker()
    links = ServerLinks(worker, 1)
    links.connect(server(20, "b:0", index=0, replicas=3, generation=2))
    links.connect(server(11, "a:1", index=1, replicas=3, generation=1))
    links.connect(server(22, "b:2", index=2, replicas=3, generation=2))
    assert worker.replaced == []
    links.connect(server(21, "b:1", index=1, replicas=3, generation=2))
    assert worker.replaced == [["b:0", "b:1", "b:2"]]


def test_a_server_with_another_placement_is_not_used_until_all_have_it():
    worker, moved = Worker(), ((5, 1),)
    links = ServerLinks(worker, 2)
    for index in range(2):
        links.connect(server(index, f"h:{index}", index=index))
    for index in range(2):
        links.connect(server(10 + index, f"n:{index}", index=index, generation=1, moved_shards=moved))
    assert worker.placements == [(1, moved)]
    # One that has restarted, and was told of the placement.
    links.connect(server(20, "n:2", index=0, generation=1, moved_shards=moved))
    assert worker.servers[-1] == (0, "n:2")
    # All have restarted, and none knows it.
    links.connect(server(30, "n:3", index=0, generation=1))
    assert (worker.servers[-1], len(worker.replaced)) == ((0, "n:2"), 1)
    links.connect(server(31, "n:4", index=1, generation=1))
    assert worker.replaced[-1] == ["n:3", "n:4"]
    assert worker.placements[-1] == (1, ())


def test_two_placements_in_one_generation_are_an_error_until_the_servers_agree(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, moved = Worker(), ((5, 1),)
    links = ServerLinks(worker, 2, 1, moved)
    for index in range(2):
        links.connect(server(index, f"h:{index}", index=index, generation=1, moved_shards=moved))
    restarted = server(20, "n:0", generation=1)
    for _ in range(2):
        links.connect(restarted)
    (error,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert f"{restarted} has 0 moved virtual shards, and this worker knows 1" in error
    links.connect(replace(restarted, incarnation=21, address="n:1", moved_shards=moved))
    assert worker.servers[-1] == (0, "n:1")


def test_servers_that_a_worker_cannot_use_do_not_replace_those_of_before() -> None:
    worker = Worker()
    links = ServerLinks(worker, 1)
    links.connect(server(1, "h:1", replicas=1))

    def refuse(*_args: Any, **_more: Any) -> None:
        raise InvalidArgumentError("a shard twice")

    replace_servers, worker.replace_servers = worker.replace_servers, refuse  # type: ignore[method-assign]
    new = server(2, "n:0", replicas=1, generation=1)
    with pytest.raises(InvalidArgumentError):
        links.connect(new)
    worker.replace_servers = replace_servers  # type: ignore[method-assign]
    links.connect(server(3, "h:3", replicas=1))
    assert worker.servers[-1] == (0, "h:3")
    links.connect(new)
    assert worker.replaced == [["n:0"]]


def test_watchers_hear_of_the_end_of_servers_that_were_replaced():
    broker = LocalBroker()
    old = Advertiser(LocalSession(broker, name="old"), server(1, "h:1", index=1))
    old.start()
    events: list[tuple[EventKind, str]] = []
    watch = Directory(LocalSession(broker, name="watcher")).watch(
        EMBEDDING_PARAMETER_SERVER, lambda event: events.append((event.kind, event.info.address))
    )
    new = server(2, "n:0", replicas=1, generation=1)
    Advertiser(LocalSession(broker, name="new"), new).start()
    old.publish_again()  # as after a reconnect
    old.stop()
    assert events == [(EventKind.JOINED, "n:0"), (EventKind.LEFT, "h:1")]
    watch.close()


def test_callers_find_the_servers_of_the_latest_generation():
    broker, has_rows = LocalBroker(), [True]
    session = LocalSession(broker, name="test")
    Advertiser(session, server(1, "h:1", replicas=1), is_serving=lambda: has_rows[0]).start()
    announced: list[str] = []
    watch = Directory(session).watch(
        EMBEDDING_PARAMETER_SERVER, lambda event: announced.append(event.info.address)
    )
    new = [server(10 + index, f"n:{index}", index=index, generation=1) for index in range(2)]
    for info in new:
        advertiser = Advertiser(LocalSession(broker, name=info.address), info)
        advertiser.start(is_silent=True)
        assert info.address not in announced
        advertiser.publish_again()
    assert announced == ["n:0", "n:1"]
    has_rows[0] = False
    assert Directory(session).wait_for(EMBEDDING_PARAMETER_SERVER, 60.0) == new
    watch.close()
    with pytest.raises(FailedPreconditionError):  # a newcomer of before
        Advertiser(LocalSession(broker, name="old"), server(5, "h:5", replicas=1)).start()


def test_registration_answers_with_the_reference():
    worker = Worker()
    reply = FlowReply.decode(RegisterBatchHandler(worker.register_batch)(IdsRequest(3, 4, b"ids").encode()))
    assert reply == FlowReply(ReplyStatus.OK, worker_incarnation=77, reference=5)
    assert worker.registered == [(3, b"ids")]


def test_a_full_buffer_asks_to_try_again():
    responder = RegisterBatchHandler(Worker(ResourceExhaustedError("full")).register_batch)
    reply = FlowReply.decode(responder(IdsRequest(0, 1, b"").encode()))
    assert reply.status is ReplyStatus.FULL
    assert 5 <= reply.retry_ms <= 20


@pytest.mark.parametrize("payload", [b"", IdsRequest(0, 1, b"").encode()])
def test_what_cannot_be_registered_is_answered_with_the_reason(payload):
    reply = FlowReply.decode(RegisterBatchHandler(Worker(CorruptionError("bad ids")).register_batch)(payload))
    assert reply.status is ReplyStatus.ERROR
    assert reply.message


def worker_info(index: int, replicas: int) -> ServiceInfo:
    return ServiceInfo(
        role=EMBEDDING_WORKER, index=index, replicas=replicas, incarnation=index + 1, slot_modes=("",)
    )


def test_a_worker_counts_those_that_come_and_go():
    session = LocalSession(LocalBroker(), name="test")
    advertiser = Advertiser(session, worker_info(0, 2))
    advertiser.start()
    watch = Directory(session).watch(EMBEDDING_WORKER, partial(count_workers, advertiser))
    newcomer = Advertiser(session, worker_info(2, 3))
    newcomer.start()
    assert advertiser.info.replicas == 3
    Advertiser(session, worker_info(1, 2)).start()
    assert advertiser.info.replicas == 3
    newcomer.stop()
    assert advertiser.info.replicas == 2
    Advertiser(session, worker_info(0, 2)).stop()  # was never started: says nothing
    watch.close()


def test_requests_are_subscribed_once_admitted_and_before_anyone_knows() -> None:
    broker, happened = LocalBroker(), []
    session = LocalSession(broker, name="test")
    watch = Directory(session).watch(EMBEDDING_WORKER, lambda event: happened.append("announced"))
    Advertiser(session, worker_info(0, 1)).start(lambda: happened.append("subscribed"))
    assert happened == ["subscribed", "announced"]
    twin = replace(worker_info(0, 1), incarnation=99)
    with pytest.raises(FailedPreconditionError, match="embedding-worker 0 is running already"):
        Advertiser(LocalSession(broker, name="twin"), twin).start(lambda: happened.append("subscribed"))
    assert happened == ["subscribed", "announced"]
    watch.close()


class Draining:
    """Batches that are fetched one at a time."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def stats(self) -> dict[str, int]:
        self.num_batches = max(0, self.num_batches - 1)
        return {
            "num_buffered": self.num_batches // 2,
            "num_in_flight": self.num_batches - self.num_batches // 2,
        }


@pytest.mark.parametrize(("rank_is_there", "left"), [(True, 0), (False, 4)])
def test_draining_lasts_until_nothing_is_held_or_nobody_comes(rank_is_there, left):
    broker = LocalBroker()
    if rank_is_there:
        rank = ServiceInfo(role=NN_WORKER, index=0, replicas=1, incarnation=1)
        Advertiser(LocalSession(broker, name="rank"), rank).start()
    worker = Draining(5)
    drain(worker, LocalSession(broker, name="worker"))
    assert worker.num_batches == left
