"""The session without a broker: what callers rely on, as with NATS."""

from __future__ import annotations

import pytest

from persia.errors import FailedPreconditionError, InternalError, NotFoundError, UnavailableError
from persia.messaging.discovery import Advertiser, Directory, ServiceInfo
from persia.messaging.local_session import LocalBroker, LocalSession
from persia.messaging.subjects import EMBEDDING_WORKER


@pytest.fixture
def broker() -> LocalBroker:
    return LocalBroker()


@pytest.fixture
def session(broker: LocalBroker) -> LocalSession:
    return LocalSession(broker, name="test")


def test_requests_are_answered_until_the_registration_ends(
    broker: LocalBroker, session: LocalSession
) -> None:
    registration = session.respond("a", lambda payload: payload[::-1])
    assert LocalSession(broker, name="other").request("a", b"123", 1.0) == b"321"
    registration.close()
    with pytest.raises(UnavailableError, match="no listener on a"):
        session.request("a", b"", 1.0)


def test_errors_of_handlers_reach_the_asker_by_their_class(session: LocalSession) -> None:
    def missing(payload: bytes) -> bytes:
        raise NotFoundError("gone")

    session.respond("known", missing)
    session.respond("bug", lambda payload: payload[payload])  # type: ignore[index]
    with pytest.raises(NotFoundError, match="gone"):
        session.request("known", b"", 1.0)
    with pytest.raises(InternalError, match="TypeError"):
        session.request("bug", b"", 1.0)


def test_all_who_listen_are_heard_and_coroutines_too(session: LocalSession) -> None:
    async def answer(payload: bytes) -> bytes:
        return payload + b"!"

    session.respond("a", answer)
    session.respond("a", lambda payload: None)
    session.respond("a", lambda payload: payload)
    assert session.request_many("a", b"x", 1.0) == [b"x!", b"x"]
    assert session.request_many("a", b"x", 1.0, enough=lambda reply: True) == [b"x!"]
    assert session.request_many("nobody", b"x", 1.0) == []


def test_a_closed_session_neither_listens_nor_sends(broker: LocalBroker, session: LocalSession) -> None:
    heard: list[bytes] = []
    session.subscribe("a", heard.append)
    other = LocalSession(broker, name="other")
    other.publish("a", b"1")
    session.close()
    session.close()
    other.publish("a", b"2")
    assert heard == [b"1"]
    assert not session.is_connected
    with pytest.raises(FailedPreconditionError, match="test of the embedded job is closed"):
        session.publish("a", b"3")


def test_discovery_works_over_it(broker: LocalBroker, session: LocalSession) -> None:
    info = ServiceInfo(role=EMBEDDING_WORKER, index=0, replicas=1, incarnation=7, slot_modes=("",))
    Advertiser(session, info).start()
    other = LocalSession(broker, name="other")
    assert Directory(other).wait_for(EMBEDDING_WORKER, 1.0) == [info]
    twin = ServiceInfo(role=EMBEDDING_WORKER, index=0, replicas=1, incarnation=8, slot_modes=("",))
    with pytest.raises(FailedPreconditionError, match="running already"):
        Advertiser(other, twin).start()
