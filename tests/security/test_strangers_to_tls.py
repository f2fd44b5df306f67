"""A job with PERSIA_TLS_DIR: without a certificate of its CA nobody is answered, on any port."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.attacks import intruder
from benchmarks.attacks.job import AttackedJob, attacked_job
from persia import _native
from persia.errors import UnavailableError
from persia.messaging.session import NatsSession
from persia.observability.status import fetch_json
from persia.security import certificates, http_token, nats_login
from persia.security.secret import ROLES, TRAINER
from persia.security.tls import TlsFiles

DEADLINE_S = 120.0
PORTS = ("server", "worker", "broker", *(f"status of {role}" for role in AttackedJob.roles))
REFUSED = (None, 10)  # closed, or kPermissionDenied


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """PERSIA_TLS_DIR of this process and the job."""
    (made,) = certificates.create(tmp_path_factory.mktemp("tls") / "certificates", ["job"], days=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERSIA_TLS_DIR", str(made))
        yield made


@pytest.fixture(scope="module")
def job(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedJob]:
    with attacked_job(tmp_path_factory.mktemp("job") / "report") as started:
        yield started


def anonymous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def answer_to(address: str, name: str, context: ssl.SSLContext, request: bytes) -> bytes:
    """What a port sends, inside TLS, to a request. Empty: it has refused the certificate."""
    received = b""
    with intruder.connect(address, DEADLINE_S) as plain, contextlib.suppress(OSError):
        if name == "broker":
            assert plain.recv(65536).startswith(b"INFO ")  # it says that TLS is needed
        with context.wrap_socket(plain) as secured:
            secured.sendall(request)
            while piece := secured.recv(65536):
                received += piece
    return received


def request_of(name: str) -> bytes:
    """One that a port of a job without TLS and secret would answer."""
    if name == "broker":
        return b'CONNECT {"verbose":false}\r\nPING\r\nSUB persia.> 1\r\nPING\r\n'
    if name.startswith("status"):
        return b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    return intruder.frame(intruder.SERVER_METHODS["CountRows"])


@pytest.mark.parametrize("name", PORTS)
def test_nobody_without_a_certificate(job: AttackedJob, name: str) -> None:
    assert set(job.ports) == set(PORTS)
    assert answer_to(job.ports[name], name, anonymous(), request_of(name)) == b""


@pytest.mark.parametrize("name", PORTS)
def test_nobody_with_a_certificate_of_another_ca(job: AttackedJob, name: str, tmp_path: Path) -> None:
    (foreign,) = certificates.create(tmp_path, ["job"], days=1)
    context = anonymous()
    context.load_cert_chain(foreign / "tls.crt", foreign / "tls.key")
    assert answer_to(job.ports[name], name, context, request_of(name)) == b""


@pytest.mark.parametrize("name", PORTS)
def test_an_old_version_of_tls(job: AttackedJob, folder: Path, name: str) -> None:
    context = anonymous()
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert answer_to(job.ports[name], name, context, request_of(name)) == b""


def test_a_certificate_alone_is_no_secret(job: AttackedJob, folder: Path) -> None:
    context = TlsFiles.of_folder(folder).client_context()
    said = answer_to(job.broker, "broker", context, request_of("broker"))
    assert b"-ERR 'Authorization Violation'" in said
    assert b"PONG" not in said
    for name in ("server", "worker"):
        said = answer_to(job.ports[name], name, context, request_of(name))
        assert intruder.HEADER.unpack_from(said)[4] in REFUSED
    for name in PORTS[3:]:
        request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert answer_to(job.ports[name], name, context, request).startswith(b"HTTP/1.0 401")
        # The same port and certificate, for what everybody may ask: so the refusals above are of the CA.
        assert answer_to(job.ports[name], name, context, request_of(name)).startswith(b"HTTP/1.0 200")


def test_nobody_in_plain_text(job: AttackedJob) -> None:
    for name, method in (("server", 17), ("server", 21), ("worker", 38)):
        assert intruder.call(job.ports[name], method).status in REFUSED
    said = intruder.nats_refuses(job.broker, b"SUB persia.> 1\r\n")
    assert b"PONG" not in said
    assert b"MSG" not in said
    for role in job.roles:
        for path in ("/metrics", "/status"):
            status, answer = intruder.http(job.status[role], path)
            assert status == 401
            assert b"persia_" not in answer


class Eavesdropper:
    """Relays connections to `address`, and keeps every byte of both directions."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = bytearray()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """After the connections have ended."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = intruder.connect(self._address, DEADLINE_S)
                pair = [
                    threading.Thread(target=self._relay, args=ends) for ends in ((near, far), (far, near))
                ]
                self._threads += [threading.Thread(target=_run, args=(pair, near, far))]
                self._threads[-1].start()

    def _relay(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            source.settimeout(DEADLINE_S)
            while piece := source.recv(65536):
                self.heard.extend(piece)
                to.sendall(piece)
            to.shutdown(socket.SHUT_WR)


def _run(pair: list[threading.Thread], *ends: socket.socket) -> None:
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    for end in ends:
        end.close()


def test_who_reads_the_network_learns_no_secret(job: AttackedJob) -> None:
    payload = b"labels and IDs of a batch"
    ears = {name: Eavesdropper(job.ports[name]) for name in ("broker", PORTS[3], "worker")}
    try:
        with NatsSession(f"nats://{ears['broker'].address}", "eavesdropped", name="test") as session:
            session.connect(DEADLINE_S)
            session.respond("persia.eavesdropped.ids.0", lambda message: message)
            assert session.request("persia.eavesdropped.ids.0", payload, DEADLINE_S) == payload
        assert fetch_json(ears[PORTS[3]].address, "/status")["ready"]
        job.cluster.join(TRAINER)
        client = _native.RemoteClient(1)
        client.set_worker(0, ears["worker"].address)
        assert client.sizes(timeout_s=DEADLINE_S)
        del client
    finally:
        for one in ears.values():
            one.close()
    secrets = [
        http_token(),
        *(nats_login(role).password for role in ("job", *ROLES)),
        "eavesdropped",
        "ready",
    ]
    for name, one in ears.items():
        assert len(one.heard) > 1000, name  # it was heard, and not understood
        for text in (payload, *(secret.encode() for secret in secrets)):
            assert text not in one.heard, name


def test_who_takes_an_address_learns_no_token(job: AttackedJob) -> None:
    """A process that may advertise a service names a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = bytearray()

        def listen() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.extend(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises((PermissionError, UnavailableError)):
            fetch_json(f"127.0.0.1:{listener.getsockname()[1]}", "/status")
        thread.join()
    assert http_token().encode() not in heard
