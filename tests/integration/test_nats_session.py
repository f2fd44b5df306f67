"""The session against a real NATS server: replies, errors, back-pressure, lost connections, ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging import session as session_module
from persia.messaging.session import NatsSession
from persia.testing import LocalNats

DEADLINE_S = 60.0


async def echo(payload: bytes) -> bytes:
    return payload


def test_request_gets_the_reply(make_session):
    make_session("server").respond("echo.reply", echo)
    assert make_session("client").request("echo.reply", b"hello", DEADLINE_S) == b"hello"


def test_a_64_mib_message_arrives_and_a_larger_one_names_size_limit_and_remedy(make_session):
    limit = 64 << 20
    make_session("server").respond("echo.large", echo)
    client = make_session("client")
    payload = os.urandom(1 << 20) * 64
    assert client.request("echo.large", payload, 4 * DEADLINE_S) == payload
    with pytest.raises(InvalidArgumentError, match=f"{limit + 1} bytes.*{limit} bytes.*max_payload"):
        client.request("echo.large", payload + b"x", DEADLINE_S)


def test_a_request_to_nobody_is_unavailable(make_session):
    with pytest.raises(UnavailableError, match=r"echo\.absent"):
        make_session("client").request("echo.absent", b"", DEADLINE_S)


def test_the_error_of_a_handler_that_has_no_listener_is_unavailable_too(make_session):
    server = make_session("server")
    server.respond("echo.passed_on", lambda payload: server.request("echo.absent", payload, DEADLINE_S))
    with pytest.raises(UnavailableError, match=r"echo\.absent"):
        make_session("client").request("echo.passed_on", b"", DEADLINE_S)


def test_a_request_without_reply_ends_by_its_timeout(make_session):
    never = threading.Event()
    server = make_session("server")
    registration = server.respond("echo.never", lambda _: never.wait(DEADLINE_S) and b"")
    with pytest.raises(DeadlineExceededError, match=r"echo\.never within 0\.1 s"):
        make_session("client").request("echo.never", b"", 0.1)
    never.set()
    registration.close()


def test_an_interrupted_request_is_unavailable(make_session):
    asked = threading.Event()
    make_session("server").respond("lost", lambda _: asked.set())  # answers nothing
    client = make_session("client")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(client.request, "lost", b"", 10 * DEADLINE_S)
        assert asked.wait(DEADLINE_S)
        client.interrupt("another")
        client.interrupt("lost")
        with pytest.raises(UnavailableError):
            reply.result(DEADLINE_S)


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (ResourceExhaustedError("the buffer is full"), ResourceExhaustedError, "the buffer is full"),
        (KeyError("oops"), InternalError, "KeyError: 'oops'"),
    ],
)
@pytest.mark.parametrize("on_loop", [True, False])
def test_a_handler_that_raises_answers_with_the_error(make_session, raised, expected, text, on_loop):
    def fail(_payload):
        raise raised

    async def fail_on_loop(_payload):
        raise raised

    make_session("server").respond("fail", fail_on_loop if on_loop else fail)
    with pytest.raises(expected, match=text):
        make_session("client").request("fail", b"", DEADLINE_S)


def test_a_waiting_handler_holds_up_neither_its_own_subject_nor_others(make_session):
    together = threading.Barrier(4)
    server = make_session("server")
    server.respond("wait", lambda _: str(together.wait(DEADLINE_S)).encode(), max_concurrency=4)
    server.respond("echo.meanwhile", echo)
    client = make_session("client")
    replies: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: replies.append(client.request("wait", b"", DEADLINE_S)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert client.request("echo.meanwhile", b"x", DEADLINE_S) == b"x"
    assert not replies
    client.request("wait", b"", DEADLINE_S)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(replies) == 3


def test_no_more_handlers_run_than_allowed(make_session):
    running = 0
    largest = 0
    two_run = asyncio.Event()

    async def count(_payload):
        nonlocal running, largest
        running += 1
        largest = max(largest, running)
        if running == 2:
            two_run.set()
        # On a busy machine requests come one by one.
        await asyncio.wait_for(two_run.wait(), DEADLINE_S)
        await asyncio.sleep(0.01)
        running -= 1
        return b""

    make_session("server").respond("count", count, max_concurrency=2)
    client = make_session("client")
    threads = [threading.Thread(target=client.request, args=("count", b"", DEADLINE_S)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert largest == 2


def test_subscribers_get_all_messages_in_order(make_session):
    seen: list[int] = []
    done = threading.Event()

    def take(payload):
        seen.append(int(payload))
        if len(seen) == 200:
            done.set()

    make_session("listener").subscribe("numbers", take)
    sender = make_session("sender")
    for number in range(200):
        sender.publish("numbers", str(number).encode())
    assert done.wait(DEADLINE_S)
    assert seen == list(range(200))


def test_request_many_collects_the_replies_of_all(make_session):
    for name in (b"a", b"b", b"c"):

        async def answer(_payload, name=name):
            return name

        make_session(name.decode()).respond("who", answer)
    client = make_session("client")
    seen: set[bytes] = set()

    def enough(reply):
        seen.add(reply)
        return len(seen) == 3

    assert sorted(client.request_many("who", b"", DEADLINE_S, enough=enough)) == [b"a", b"b", b"c"]
    assert client.request_many("who.nobody", b"", DEADLINE_S) == []


def test_a_closed_registration_is_no_longer_asked(make_session):
    registration = make_session("server").respond("echo.closed", echo)
    client = make_session("client")
    assert client.request("echo.closed", b"x", DEADLINE_S) == b"x"
    registration.close()
    registration.close()
    with pytest.raises(UnavailableError):
        client.request("echo.closed", b"x", DEADLINE_S)


def test_closing_a_registration_does_not_block_the_loop(make_session, monkeypatch):
    sleepers, sleep = [], time.sleep

    def record(duration_s):
        sleepers.append(threading.current_thread())
        sleep(duration_s)  # without it, another test's thread that waits here would spin

    monkeypatch.setattr("persia.waiting.time.sleep", record)
    server = make_session("server")
    for _ in range(3):
        server.respond("work", bytes.upper).close()
    assert not [thread for thread in sleepers if thread.name == "persia-nats-server"]
    assert threading.current_thread() not in sleepers


def test_a_handler_on_the_loop_may_not_wait_for_the_loop(make_session):
    session = make_session("server")

    async def call_back(_payload):
        return session.request("echo.other", b"", DEADLINE_S)

    session.respond("call-back", call_back)
    with pytest.raises(FailedPreconditionError, match="handler"):
        make_session("client").request("call-back", b"", DEADLINE_S)


def test_connect_waits_for_a_broker_that_starts_later(job_name):
    with LocalNats() as broker:
        broker.kill()
        with NatsSession(broker.url, job_name, name="early") as session:
            thread = threading.Thread(target=session.connect, args=(DEADLINE_S,))
            thread.start()
            broker.restart()
            thread.join(DEADLINE_S)
            session.respond("echo.early", echo)
            assert session.request("echo.early", b"x", DEADLINE_S) == b"x"


def test_connect_gives_up_naming_the_url_without_the_password(job_name):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody else takes the port
        url = f"nats://user:secret@127.0.0.1:{unused.getsockname()[1]}"
        session = NatsSession(url, job_name, name="lonely")
        with pytest.raises(UnavailableError, match=r"nats://127\.0\.0\.1:\d+ after 0\.3 s") as caught:
            session.connect(0.3)
    assert "secret" not in str(caught.value)


def test_a_port_of_another_program_is_named_as_the_reason(job_name):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        session = NatsSession(f"nats://127.0.0.1:{other.getsockname()[1]}", job_name, name="lonely")
        with pytest.raises(UnavailableError, match=r"no answer; another program may use the port"):
            session.connect(0.3)


@pytest.mark.parametrize("url", ["", "127.0.0.1:4222", "http://localhost:4222", "nats://"])
def test_a_url_that_is_none_is_refused_at_once(url):
    with pytest.raises(InvalidArgumentError, match="PERSIA_NATS_URL"):
        NatsSession(url, "job", name="bad")


def test_a_lost_connection_fails_the_requests_under_way_and_comes_back(job_name):
    with (
        LocalNats() as broker,
        NatsSession(broker.url, job_name, name="server") as server,
        NatsSession(broker.url, job_name, name="client") as client,
    ):
        server.connect(DEADLINE_S)
        client.connect(DEADLINE_S)
        asked, release = threading.Event(), threading.Event()
        reconnected = [threading.Event(), threading.Event()]
        server.on_reconnect(reconnected[0].set)
        client.on_reconnect(reconnected[1].set)

        def wait(_payload):
            asked.set()
            release.wait(DEADLINE_S)
            return b""

        server.respond("wait", wait)
        server.respond("echo", echo)
        failures: list[Exception] = []

        def request():
            try:
                client.request("wait", b"", 10 * DEADLINE_S)
            except UnavailableError as error:
                failures.append(error)

        thread = threading.Thread(target=request)
        thread.start()
        assert asked.wait(DEADLINE_S)
        broker.kill()
        thread.join(DEADLINE_S)
        assert "lost" in str(failures)
        release.set()
        broker.restart()
        assert all(event.wait(DEADLINE_S) for event in reconnected)
        assert client.request("echo", b"again", DEADLINE_S) == b"again"


def test_a_broker_that_does_not_read_for_a_while_keeps_its_connection(job_name):
    with LocalNats() as broker, NatsSession(broker.url, job_name, name="client") as client:
        client.connect(DEADLINE_S)
        client.respond("echo.large", echo)
        (process,) = broker._supervisor.processes
        os.kill(process.pid, signal.SIGSTOP)
        payload = bytes(32 << 20)  # more than the buffers of the connection take
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(client.request, "echo.large", payload, 10 * DEADLINE_S)
            time.sleep(6.5)  # longer than the silence after which a connection is cut, 5 s
            os.kill(process.pid, signal.SIGCONT)
            assert reply.result(DEADLINE_S) == payload
        assert client.num_reconnects == 0


def test_an_answer_to_a_publish_that_has_given_up_does_not_end_the_reading(job_name):
    """The client would read nothing more until its pings found the connection stale, after a minute."""
    with LocalNats() as broker, NatsSession(broker.url, job_name, name="client") as client:
        client.connect(DEADLINE_S)
        client.respond("echo", echo)
        (process,) = broker._supervisor.processes
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with pytest.raises((UnavailableError, DeadlineExceededError)):
                client.publish("news", b"without a reader")
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert client.request("echo", b"hello", DEADLINE_S) == b"hello"
        assert client.num_reconnects == 0


@pytest.mark.parametrize("lasts", [True, False])
def test_only_a_lost_connection_that_lasts_is_reported(job_name, monkeypatch, lasts):
    monkeypatch.setattr(session_module, "_LOSS_REPORT_S", 0.01 if lasts else 10 * DEADLINE_S)
    warned, back = threading.Event(), threading.Event()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.set() if "lost the connection" in record.getMessage() else None
    logger = get_default_logger()
    logger.addHandler(handler)
    try:
        with LocalNats() as broker, NatsSession(broker.url, job_name, name="client") as client:
            client.connect(DEADLINE_S)
            client.on_reconnect(back.set)
            broker.kill()
            if lasts:
                assert warned.wait(DEADLINE_S)
            broker.restart()
            assert back.wait(DEADLINE_S)
            assert client._loss_report is None
            assert warned.is_set() is lasts
    finally:
        logger.removeHandler(handler)


def test_close_finishes_handlers_is_idempotent_and_final(make_session):
    asked = threading.Event()

    def slow(_payload):
        asked.set()
        return b"finished"

    server, client = make_session("server"), make_session("client")
    server.respond("slow", slow)
    replies: list[bytes] = []
    thread = threading.Thread(target=lambda: replies.append(client.request("slow", b"", DEADLINE_S)))
    thread.start()
    assert asked.wait(DEADLINE_S)
    server.close()
    server.close()
    thread.join(DEADLINE_S)
    assert replies == [b"finished"]
    with pytest.raises(FailedPreconditionError, match="closed"):
        server.publish("x", b"")


def test_close_refuses_a_handler_that_does_not_end(make_session):
    asked, never = threading.Event(), threading.Event()

    def stuck(_payload):
        asked.set()
        never.wait(DEADLINE_S)
        return b""

    server, client = make_session("server"), make_session("client")
    server.respond("stuck", stuck)
    failures: list[Exception] = []

    def request():
        try:
            client.request("stuck", b"", DEADLINE_S)
        except UnavailableError as error:
            failures.append(error)

    thread = threading.Thread(target=request)
    thread.start()
    assert asked.wait(DEADLINE_S)
    server.close()
    thread.join(DEADLINE_S)
    never.set()
    assert "shutting down" in str(failures)


def test_close_ends_a_request_under_way(make_session):
    asked, never = threading.Event(), threading.Event()
    server, client = make_session("server"), make_session("client")
    server.respond("stuck", lambda _: (asked.set(), never.wait(DEADLINE_S), b"")[2])
    failures: list[Exception] = []

    def request():
        try:
            client.request("stuck", b"", 10 * DEADLINE_S)
        except UnavailableError as error:
            failures.append(error)

    thread = threading.Thread(target=request)
    thread.start()
    assert asked.wait(DEADLINE_S)
    client.close()
    thread.join(DEADLINE_S)
    never.set()
    assert len(failures) == 1


def test_close_with_the_broker_gone_ends(job_name):
    with LocalNats() as broker:
        session = NatsSession(broker.url, job_name, name="orphan")
        session.connect(DEADLINE_S)
        session.respond("echo", echo)
        broker.kill()
        session.close()


def test_a_process_that_forgets_to_close_still_exits(nats_server, job_name):
    script = f"""
import threading
from persia.messaging.session import NatsSession
session = NatsSession({nats_server.url!r}, {job_name!r}, name="forgetful")
session.connect(10)
asked = threading.Event()
def stuck(_):
    asked.set()
    threading.Event().wait()
session.respond("stuck", stuck)
threading.Thread(target=lambda: session.request("stuck", b"", 1000), daemon=True).start()
asked.wait(120)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], timeout=240, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
