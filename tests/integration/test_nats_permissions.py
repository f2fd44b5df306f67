"""A real broker lets each role publish and subscribe what the table in docs/security.md says, and no more."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from persia.errors import PermissionDeniedError
from persia.messaging.session import NatsSession
from persia.messaging.subjects import ROLES as SERVICES
from persia.observability.targets import TargetsFile
from persia.security import nats_login, secret
from persia.security.secret import (
    ADMIN,
    INFERENCE,
    LOADER,
    MONITOR,
    ROLES,
    SERVER,
    TRAINER,
    WORKER,
    Credential,
)
from persia.testing import LocalNats

DEADLINE_S = 60.0
WHO = [f"who.{service}" for service in SERVICES]
# By hand, and not from the product's table: what a role must be able to do, and nothing else.
PUBLISH = {
    TRAINER: {
        "advertise.nn-worker",
        "advertise.embedding-worker",
        "advertise.data-loader",
        "ids.0",
        "batch.0",
    }
    | {"end.0", "position.0", "taken.0", "checkpoint.0", "checkpoint.training"},
    LOADER: {"advertise.data-loader", "ids.0", "batch.0", "end.0", "position.0"},
    WORKER: {"advertise.embedding-worker"},
    SERVER: {"advertise.embedding-parameter-server", "replica.0.all"},
    INFERENCE: {"advertise.serving"},
    MONITOR: set(),
    ADMIN: {"checkpoint.0", "checkpoint.training", "resize", "resize.1.0"},
}
SUBSCRIBE = {
    TRAINER: {f"advertise.{service}" for service in SERVICES}
    | {"who.nn-worker", "who.embedding-worker", "who.data-loader", "ids.0", "batch.0", "end.0"}
    | {"position.0", "taken.0", "checkpoint.training"},
    LOADER: {"who.data-loader", "advertise.nn-worker", "advertise.embedding-worker"},
    WORKER: {"who.embedding-worker", "advertise.embedding-worker", "ids.0"}
    | {"advertise.nn-worker", "advertise.embedding-parameter-server"},
    SERVER: {"who.embedding-parameter-server", "checkpoint.0", "replica.0.all", "resize.1.0"}
    | {"advertise.embedding-parameter-server"},
    INFERENCE: {"who.serving"},
    MONITOR: {f"advertise.{service}" for service in SERVICES},
    ADMIN: set(),
}
SUBJECTS = [
    *WHO,
    *(f"advertise.{service}" for service in SERVICES),
    *("ids.0", "batch.0", "end.0", "position.0", "taken.0", "checkpoint.0", "checkpoint.training", "other"),
    *("replica.0.all", "resize", "resize.1.0"),
]


@pytest.fixture
def session_of(nats_server: LocalNats, job_name: str) -> Iterator[Callable[[str], NatsSession]]:
    with ExitStack() as stack:

        def make(role: str) -> NatsSession:
            session = stack.enter_context(NatsSession(nats_server.url, job_name, name=role, role=role))
            session.connect(DEADLINE_S)
            return session

        yield make


def allowed(use: Callable[[], object]) -> bool:
    try:
        use()
    except PermissionDeniedError:
        return False
    return True


@pytest.mark.parametrize("role", ROLES)
def test_every_cell_of_the_table(session_of, job_name, role):
    session = session_of(role)
    subjects = {short: f"persia.{job_name}.{short}" for short in SUBJECTS}
    published = {
        short for short, subject in subjects.items() if allowed(lambda s=subject: session.publish(s, b""))
    }
    subscribed = {
        short
        for short, subject in subjects.items()
        if allowed(lambda s=subject: session.subscribe(s, lambda _payload: None).close())
    }
    assert published == {*WHO, *PUBLISH[role]}
    assert subscribed == SUBSCRIBE[role]
    for wildcard in (">", "persia.>", f"persia.{job_name}.>", "_INBOX.>"):
        assert not allowed(lambda s=wildcard: session.subscribe(s, lambda _payload: None))


@pytest.mark.parametrize("role", ROLES)
def test_replies_are_private(session_of, role):
    session = session_of(role)
    for other in (*ROLES, "job"):
        inbox = nats_login(other).inbox_prefix
        reads = allowed(lambda s=f"{inbox}.>": session.subscribe(s, lambda _payload: None).close())
        assert reads == (other == role)
        # A forged reply, to a question that this role was not asked.
        assert not allowed(lambda s=f"{inbox}.abc.def": session.publish(s, b"forged"))


def test_a_refused_request_fails_at_once(session_of, job_name):
    # In a thread of its own deadline: the request would wait for ten minutes.
    monitor = session_of(MONITOR)
    done = threading.Event()

    def ask() -> None:
        with pytest.raises(
            PermissionDeniedError, match=r"checkpoint\.0: .* refuses this publish to role 'monitor'"
        ):
            monitor.request(monitor.subjects.checkpoint(0), b"", 600.0)
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    assert done.wait(DEADLINE_S)


def test_a_monitor_may_keep_a_file_of_targets(session_of, tmp_path):
    TargetsFile(session_of(MONITOR), str(tmp_path / "targets.json")).write()
    assert (tmp_path / "targets.json").exists()


def test_a_receiver_may_answer(session_of):
    worker, loader = session_of(WORKER), session_of(LOADER)
    worker.respond(worker.subjects.ids(0), bytes.upper)
    assert loader.request(loader.subjects.ids(0), b"ids", DEADLINE_S) == b"IDS"
    assert loader.request(loader.subjects.ids(0), b"again", DEADLINE_S) == b"AGAIN"


def test_a_stranger_reads_nothing(nats_server):
    port = int(nats_server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stranger:
        stranger.sendall(b"CONNECT {}\r\nSUB persia.> 1\r\nPING\r\n")
        answer = b""
        while chunk := stranger.recv(4096):  # until the broker closes the connection
            answer += chunk
    assert answer.startswith(b"INFO ")
    assert answer.endswith(b"-ERR 'Authorization Violation'\r\n")


@pytest.mark.parametrize("limited", [False, True])
def test_a_wrong_secret_is_refused_at_once_with_the_remedy(nats_server, job_name, monkeypatch, limited):
    wrong = Credential.of_job(b"x" * 32, "test")
    monkeypatch.setenv("PERSIA_JOB_SECRET", (wrong.limited_to(LOADER) if limited else wrong).text)
    session = NatsSession(nats_server.url, job_name, name="wrong", role=LOADER)
    failures: list[PermissionDeniedError] = []

    def connect() -> None:
        try:
            session.connect(600.0)
        except PermissionDeniedError as error:
            failures.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert re.search("PERSIA_JOB_SECRET.*persia-launcher secret show", str(failures[0]))


def test_the_credential_of_a_role_is_enough_for_it_and_for_no_other(nats_server, job_name, monkeypatch):
    monkeypatch.setenv("PERSIA_JOB_SECRET", secret.find().limited_to(LOADER).text)
    with NatsSession(nats_server.url, job_name, name="loader", role=LOADER) as session:
        session.connect(DEADLINE_S)
    with (
        NatsSession(nats_server.url, job_name, name="admin", role=ADMIN) as session,
        pytest.raises(PermissionDeniedError, match="secret show --role admin"),
    ):
        session.connect(DEADLINE_S)


def test_a_session_ends_when_its_broker_comes_back_with_another_secret(job_name):
    with LocalNats() as broker, NatsSession(broker.url, job_name, name="client", role=LOADER) as session:
        session.connect(DEADLINE_S)
        (process,) = broker._supervisor.processes
        config = Path(process.spec.command[-1])
        assert config.stat().st_mode & 0o077 == 0
        password = nats_login(LOADER).password
        config.write_text(config.read_text().replace(password, password[::-1]))
        broker.restart()
        # "was lost" until the client has tried to log in again.
        for _ in range(100):
            try:
                session.request(session.subjects.ids(0), b"", 1.0)
            except PermissionDeniedError:
                return
            except (ConnectionError, TimeoutError):
                pass
            threading.Event().wait(0.1)
    pytest.fail("the session tries its old credentials again and again")


def test_no_password_is_in_a_command_line(nats_server):
    (process,) = nats_server._supervisor.processes
    line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert nats_login(LOADER).password.encode() not in line
