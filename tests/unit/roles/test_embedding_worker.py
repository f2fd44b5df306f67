"""The embedding worker's part in discovery and registration, with a worker that only takes notes."""

from __future__ import annotations

from typing import Any

import pytest

from persia.errors import CorruptionError, ResourceExhaustedError
from persia.messaging.discovery import EventKind, ServiceEvent, ServiceInfo
from persia.messaging.payloads import IdsReply, IdsRequest, ReplyStatus
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.embedding_worker import IdsResponder, ServerLinks


class Worker:
    incarnation = 77

    def __init__(self, failure: Exception | None = None) -> None:
        self.servers: list[tuple[int, str]] = []
        self.registered: list[tuple[int, bytes]] = []
        self._failure = failure

    def set_server(self, index: int, address: str) -> None:
        self.servers.append((index, address))

    def register_batch(self, loader_index: int, id_features: Any) -> int:
        if self._failure is not None:
            raise self._failure
        self.registered.append((loader_index, bytes(id_features)))
        return 5


def server(incarnation: int, address: str, index: int = 0, replicas: int = 2) -> ServiceInfo:
    return ServiceInfo(
        role=EMBEDDING_PARAMETER_SERVER,
        index=index,
        replicas=replicas,
        incarnation=incarnation,
        address=address,
    )


def test_links_follow_restarts_and_ignore_repetitions():
    worker = Worker()
    links = ServerLinks(worker, 2)
    links.connect(server(1, "h:1"))
    links.on_event(ServiceEvent(EventKind.HELLO, server(1, "h:1")))
    links.on_event(ServiceEvent(EventKind.BYE, server(1, "h:1")))
    links.on_event(ServiceEvent(EventKind.HELLO, server(2, "h:2")))
    links.on_event(ServiceEvent(EventKind.HELLO, server(3, "h:3", index=1)))
    assert worker.servers == [(0, "h:1"), (0, "h:2"), (1, "h:3")]


def test_a_server_of_another_shape_is_not_used():
    worker = Worker()
    ServerLinks(worker, 2).connect(server(1, "h:1", replicas=3))
    assert not worker.servers


def test_registration_answers_with_the_reference():
    worker = Worker()
    reply = IdsReply.decode(IdsResponder(worker)(IdsRequest(3, 4, b"ids").encode()))
    assert reply == IdsReply(ReplyStatus.OK, worker_incarnation=77, reference=5)
    assert worker.registered == [(3, b"ids")]


def test_a_full_buffer_asks_to_try_again():
    responder = IdsResponder(Worker(ResourceExhaustedError("full")))
    reply = IdsReply.decode(responder(IdsRequest(0, 1, b"").encode()))
    assert reply.status is ReplyStatus.FULL
    assert 5 <= reply.retry_ms <= 20


@pytest.mark.parametrize("payload", [b"", IdsRequest(0, 1, b"").encode()])
def test_what_cannot_be_registered_is_answered_with_the_reason(payload):
    reply = IdsReply.decode(IdsResponder(Worker(CorruptionError("bad ids")))(payload))
    assert reply.status is ReplyStatus.ERROR
    assert reply.message
