"""Who is the server of an index, in the moments that a job rarely meets: real servers and a real broker."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from persia._native import ParameterServer
from persia.checkpoint.protocol import Request, Verb
from persia.checkpoint.server_job import ServerShare
from persia.checkpoint.service import CheckpointService
from persia.errors import FailedPreconditionError, PersiaError, UnavailableError
from persia.messaging.discovery import Advertiser, Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.interface import Registration
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.replica import Message, Presence, Question, Replica, Sign, starts_as_standby
from persia.roles.standby import Primary, Standby
from persia.waiting import Attempts

DEADLINE_S = 60.0  # of a standby: longer than a busy machine pauses
CONFIG = "settings"


class Index:
    """The processes of parameter server 0: a primary, and a standby that follows it once it is attached."""

    def __init__(self, make_session: Callable[[str], NatsSession], stack: ExitStack) -> None:
        self._stack, self._make_session = stack, make_session
        self.server, self.replica = self.process("primary", is_standby=False)
        share = ServerShare(store=self.server.store, index=0, replicas=1, schema=None, num_threads=1)
        checkpoints = stack.enter_context(closing(CheckpointService(share)))
        self.primary = Primary(self.replica, CONFIG, DEADLINE_S, checkpoints)

    def process(self, name: str, *, is_standby: bool) -> tuple[ParameterServer, Replica]:
        server = ParameterServer(
            replica_index=0,
            replica_size=1,
            capacity=100,
            num_internal_shards=1,
            standby_deadline_s=DEADLINE_S,
            is_standby=is_standby,
        )
        port = server.start("127.0.0.1", 0)
        self._stack.callback(server.stop, 1.0)
        replica = Replica(self._make_session(name), server, 0, f"127.0.0.1:{port}")
        self._stack.callback(replica.close)
        return server, replica

    def attach(self) -> Standby:
        """A standby that has every row, and runs no thread of its own."""
        server, replica = self.process("standby", is_standby=True)
        standby = Standby(replica, CONFIG, DEADLINE_S, is_forced=True)
        server.follow(self.server.incarnation)
        assert agrees(replica, Question.ATTACH, index=self)
        self.await_state("replicating")
        return standby

    def attach_dead(self) -> socket.socket:
        """A standby that accepts connections and answers nothing."""
        listener = self._stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        _, other = self.process("attaching", is_standby=True)
        other.address = address
        other.handle(Question.END, lambda _: None)
        assert agrees(other, Question.ATTACH, index=self)
        return listener

    def await_state(self, state: str) -> None:
        for _ in Attempts(120):
            if self.server.replication == state:
                return
        raise AssertionError(self.server.replication)


def agrees(replica: Replica, verb: Question, *, index: Index) -> bool | None:
    """What the primary answers; None: it does not."""
    _, answer = replica.ask(verb, index.replica.incarnation, config=CONFIG, timeout_s=60)
    return None if answer is None else answer.agrees


def info(index: Index, **more: Any) -> ServiceInfo:
    return ServiceInfo(
        role=EMBEDDING_PARAMETER_SERVER,
        index=0,
        replicas=1,
        incarnation=index.server.incarnation,
        address=index.replica.address,
        **more,
    )


@pytest.fixture
def index(make_session: Callable[[str], NatsSession]) -> Iterator[Index]:
    with ExitStack() as stack:
        yield Index(make_session, stack)


def test_a_standby_that_asks_a_stopping_primary_is_not_told_to_renounce(index: Index) -> None:
    standby = index.attach()
    index.server.fence("it has stopped")  # the first step of `close`; LEFT is still to come
    sign, answer = standby._replica.ask(Question.POLL, index.replica.incarnation)
    assert (sign, answer) == (Sign.SILENT, None)


def test_a_primary_that_stops_hands_over(index: Index) -> None:
    standby = index.attach()
    standby._primary = info(index)
    index.primary.close()
    assert index.server.replication == "fenced"
    assert standby._confirm()
    assert standby._is_dead()
    assert standby._take_over()


def test_a_primary_whose_start_has_failed_hands_over(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.attach()

    def fail() -> list[ServiceInfo]:
        raise UnavailableError("the broker is away")

    monkeypatch.setattr(index.replica, "others", fail)
    with pytest.raises(UnavailableError, match="the broker is away"):
        index.primary.start(Advertiser(index.replica.session, info(index)))
    index.primary.close()
    assert index.server.replication == "fenced"


def test_a_primary_that_stops_is_not_ended_by_a_server_that_joins(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not hand over."""
    ends: list[str] = []
    callbacks: list[Callable[[ServiceEvent], None]] = []
    monkeypatch.setattr(index.primary, "_end", ends.append)
    watch = Directory.watch

    def watch_and_keep(self: Directory, role: str, callback: Callable[[ServiceEvent], None]) -> Registration:
        callbacks.append(callback)
        return watch(self, role, callback)

    monkeypatch.setattr(Directory, "watch", watch_and_keep)
    index.primary.start(Advertiser(index.replica.session, info(index)))
    successor = replace(info(index), incarnation=99, term=1 << 50, has_rows=True)
    index.primary._is_closing.set()
    callbacks[0](ServiceEvent(EventKind.JOINED, successor))
    assert ends == []
    index.primary.close()


def test_a_primary_stops_at_once_while_its_standby_is_filled(index: Index) -> None:
    index.attach_dead()
    index.primary.close()
    assert index.server.replication == "fenced"


@pytest.mark.parametrize("verb", [Verb.DUMP, Verb.LOAD, Verb.POLL])
def test_a_primary_that_may_have_been_replaced_takes_part_in_no_checkpoint(index: Index, verb: Verb) -> None:
    request = Request(verb=verb, operation="a").encode()
    with pytest.raises(PersiaError) as refused:
        index.primary.handle_checkpoint(request)
    assert not isinstance(refused.value, UnavailableError)  # the request itself is wrong
    index.attach_dead()
    index.await_state("stalled")
    with pytest.raises(UnavailableError, match="may have replaced it"):
        index.primary.handle_checkpoint(request)
    index.server.fence("it was replaced")
    with pytest.raises(UnavailableError, match="may have replaced it"):
        index.primary.handle_checkpoint(request)


def test_a_pause_and_a_cut_of_a_process_begin_its_presence_anew() -> None:
    session, now = SimpleNamespace(num_reconnects=0), [100.0]
    presence = Presence(session, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(5):
        now[0] += 2
        presence.lasts_s()
    assert presence.lasts_s() == 10
    assert presence.lasts_s(at=107) == 3
    now[0] += 60
    assert presence.lasts_s() == 0
    now[0] += 2
    assert presence.lasts_s(at=107) == 2
    session.num_reconnects = 1
    assert presence.lasts_s() == 0
    now[0] += 1
    presence.end()
    assert presence.lasts_s() == 0


def test_a_primary_that_was_frozen_itself_does_not_count_that_as_silence_of_its_standby(index: Index) -> None:
    index.attach_dead()
    index.primary._answered_at = time.monotonic() - 3 * DEADLINE_S
    standby = index.primary._standby
    assert standby is not None
    index.primary._resolve(standby, is_broken=True)
    assert index.primary._standby is standby
    index.primary._presence._since = index.primary._answered_at  # asked all the time
    index.primary._presence._seen_at = time.monotonic()
    index.primary._resolve(standby, is_broken=True)
    assert index.primary._standby is None


def test_a_standby_that_was_started_again_on_its_port_takes_the_place_of_the_old_one(index: Index) -> None:
    index.attach_dead()
    known = index.primary._standby
    assert known is not None
    _, other = index.process("of another port", is_standby=True)
    with pytest.raises(FailedPreconditionError, match="has a standby already"):
        agrees(other, Question.ATTACH, index=index)
    other.address = known.address
    assert agrees(other, Question.ATTACH, index=index)
    assert index.primary.status()["standby"] == known.address


def test_an_open_port_of_another_process_is_no_sign_of_the_old_one(index: Index) -> None:
    listener = index.attach_dead()
    known = index.primary._standby
    assert known is not None
    assert not index.replica.has_ended(known.address, known.incarnation)
    _, other = index.process("started again", is_standby=True)
    other.address = known.address
    assert index.replica.has_ended(known.address, known.incarnation)
    other.close()
    assert not index.replica.has_ended(known.address, known.incarnation)
    listener.close()
    assert index.replica.has_ended(known.address, known.incarnation)


def test_a_process_that_does_not_hear_the_first_answer_asks_again(
    make_session: Callable[[str], NatsSession],
) -> None:
    session = make_session("others")
    assert not starts_as_standby(session, 0)
    asked = threading.Event()

    def answer(_: bytes) -> bytes | None:
        if not asked.is_set():
            asked.set()
            return None
        return Message(verb=Question.WHO, incarnation="1", address="").encode()

    session.respond(session.subjects.replica(0, "all"), answer)
    assert starts_as_standby(session, 0)


def test_a_process_does_not_take_its_own_answer_for_that_of_another_one(index: Index) -> None:
    replica = index.attach()._replica
    index.replica.close()  # the primary has died
    assert starts_as_standby(replica.session, 0)
    assert not starts_as_standby(replica.session, 0, replica.incarnation)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_standby_waits_for_a_primary_that_is_cut_off_from_the_broker(
    index: Index, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    replica, server, is_cut = index.replica, index.server, threading.Event()
    Advertiser(replica.session, info(index), is_serving=lambda: not is_cut.is_set()).start()
    _, other = index.process("standby", is_standby=True)

    def lose_question(_: Message) -> None:
        is_cut.set()

    def ask(*arguments: Any) -> bool:
        if has_ended:
            server.fence("it stops")
            server.stop(1.0)
        found = starts_as_standby(*arguments)
        if not has_ended:  # the network is mended
            replica.handle(Question.ATTACH, index.primary._attach)
            is_cut.clear()
        return found

    replica.handle(Question.ATTACH, lose_question)
    replica.handle(Question.WHO, lambda _: None if is_cut.is_set() else True)
    monkeypatch.setattr("persia.roles.replica._ROUNDS_S", 0.5)
    monkeypatch.setattr("persia.roles.standby._ATTACH_S", 1.0)
    monkeypatch.setattr("persia.roles.standby.starts_as_standby", ask)
    standby = Standby(other, CONFIG, DEADLINE_S, is_forced=False)
    assert standby._attach() is not has_ended


def test_a_standby_that_has_every_row_is_attached_though_the_answer_is_lost(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_died = threading.Event()
    Advertiser(index.replica.session, info(index), is_serving=lambda: not has_died.is_set()).start()
    _, other = index.process("standby", is_standby=True)

    def lose_answer(message: Message) -> None:
        index.primary._attach(message)
        index.await_state("replicating")
        has_died.set()
        index.server.fence("it dies")
        index.server.stop(1.0)

    index.replica.handle(Question.ATTACH, lose_answer)
    monkeypatch.setattr("persia.roles.standby._ATTACH_S", 0.5)
    standby = Standby(other, CONFIG, DEADLINE_S, is_forced=False)
    assert standby._attach()
    assert other.server.has_copy
    index.replica.close()
    assert standby.follow()


def test_a_process_that_does_not_reach_the_broker_asks_until_it_does(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persia.roles.replica._ROUNDS_S", 0.3)
    connected = [False] * 8

    class Cut:
        """A session that is not connected at first."""

        num_reconnects = property(lambda _: int(not connected))
        is_connected = property(lambda _: not connected or connected.pop())

        def request_many(self, *arguments: Any, **named: Any) -> list[bytes]:
            return session.request_many(*arguments, **named) if not connected else []

        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

    session = index.attach()._replica.session
    assert starts_as_standby(Cut(), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("was_paused", [False, True])
def test_an_empty_newcomer_does_not_end_a_server_that_was_there(
    index: Index,
    make_session: Callable[[str], NatsSession],
    monkeypatch: pytest.MonkeyPatch,
    has_rows: bool,
    was_paused: bool,
) -> None:
    ended, joined = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())
    advertiser = Advertiser(index.replica.session, info(index, term=5))
    advertiser.start()
    index.primary.start(advertiser)
    if not was_paused:
        index.primary._presence._since -= 60

    def on_event(event: ServiceEvent) -> None:
        if event.info.incarnation == index.server.incarnation and event.info.term == 8:
            joined.set()

    session = make_session("newcomer")
    watch = Directory(session).watch(EMBEDDING_PARAMETER_SERVER, on_event)
    newcomer = replace(info(index, term=7, has_rows=has_rows), incarnation=1)
    session.publish(
        session.subjects.advertise(EMBEDDING_PARAMETER_SERVER),
        ServiceEvent(EventKind.JOINED, newcomer).encode(),
    )
    is_right = not has_rows and not was_paused
    assert (joined if is_right else ended).wait(60)
    assert ended.is_set() is not is_right
    assert advertiser.info.has_rows is is_right
    watch.close()
    index.primary.close()


def test_a_successor_asks_again_before_others_know_it(index: Index) -> None:
    standby = index.attach()
    standby._primary = info(index)
    standby._confirmed = time.monotonic(), 0
    standby._check_succession()
    known = index.primary._standby
    assert known is not None
    index.primary._release(known, "it was too late")
    with pytest.raises(FailedPreconditionError, match="may have continued without this standby"):
        standby._check_succession()


def test_a_successor_that_was_paused_for_too_long_ends_unless_its_primary_has_ended(index: Index) -> None:
    standby = index.attach()
    standby._primary = info(index)
    standby._confirmed = time.monotonic() - 3 * DEADLINE_S, 0
    index.replica.close()
    with pytest.raises(FailedPreconditionError, match="may have continued without this standby"):
        standby._check_succession()
    index.server.fence("it stops")
    index.server.stop(1.0)
    standby._check_succession()


def test_a_server_that_waits_for_its_standby_is_not_found_and_keeps_its_index(index: Index) -> None:
    Advertiser(index.replica.session, info(index), is_serving=lambda: index.replica.is_serving).start()
    directory = Directory(index.replica.session)
    assert len(directory.present(EMBEDDING_PARAMETER_SERVER, 1.0)) == 1
    index.attach_dead()
    index.await_state("stalled")
    assert directory.present(EMBEDDING_PARAMETER_SERVER, 1.0) == []
    assert starts_as_standby(index.replica.session, 0)


def test_a_server_that_did_not_serve_when_it_was_asked_for_says_later_that_it_has_joined(
    index: Index, make_session: Callable[[str], NatsSession]
) -> None:
    advertiser = Advertiser(index.replica.session, info(index), is_serving=lambda: index.replica.is_serving)
    advertiser.start()
    index.attach_dead()
    index.await_state("stalled")
    session, joined = make_session("connected again"), threading.Event()
    watch: Any = Directory(session).watch(EMBEDDING_PARAMETER_SERVER, lambda _: joined.set())
    watch._ask(session, EMBEDDING_PARAMETER_SERVER)  # as after a lost connection: once
    assert not joined.is_set()
    index.server.release_standby()
    index.primary._standby = None
    index.primary.start(advertiser)
    assert joined.wait(60)
    watch.close()
    index.primary.close()
