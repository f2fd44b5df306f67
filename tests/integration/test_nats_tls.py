"""A broker of persia with PERSIA_TLS_DIR: who may connect to it, and that it takes new certificates."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia.errors import PermissionDeniedError, PersiaError
from persia.launcher.local_cluster import LocalNats
from persia.launcher.nats_server import find_nats_server
from persia.messaging.session import NatsSession
from persia.security import certificates
from persia.security.tls import TlsFiles
from tests.ports import free_port

DEADLINE_S = 120.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PERSIA_TLS_DIR of this process."""
    (job,) = certificates.create(tmp_path / "certificates", ["job"], days=1)
    monkeypatch.setenv("PERSIA_TLS_DIR", str(job))
    return job


@contextlib.contextmanager
def session(url: str, job_name: str) -> Iterator[NatsSession]:
    with NatsSession(url, job_name, name="test") as made:
        made.connect(DEADLINE_S)
        yield made


def info_of(url: str) -> tuple[socket.socket, dict[str, object]]:
    """A connection to the broker, and what it says first, before the handshake."""
    host, _, port = url.rpartition("://")[2].rpartition(":")
    connection = socket.create_connection((host, int(port)), DEADLINE_S)
    return connection, json.loads(connection.recv(65536).partition(b" ")[2])


def certificate_of(url: str, files: TlsFiles) -> bytes | None:
    """The broker's certificate."""
    connection, _ = info_of(url)
    with connection, files.client_context().wrap_socket(connection) as secured:
        return secured.getpeercert(binary_form=True)


def test_all_is_encrypted_in_both_directions(
    folder: Path, job_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalNats() as broker, session(broker.url, job_name) as one, session(broker.url, job_name) as other:
        connection, info = info_of(broker.url)
        connection.close()
        assert info["tls_required"]
        one.respond("persia.test", lambda payload: payload + b"!")
        big = os.urandom(1 << 20)
        assert other.request("persia.test", big, DEADLINE_S) == big + b"!"
        # A name that is in no certificate, as of a pod: names are not compared.
        with session(broker.url.replace("127.0.0.1", "0.0.0.0"), job_name) as third:
            assert third.request("persia.test", b"x", DEADLINE_S) == b"x!"
    assert "eof_received" not in caplog.text


def test_nobody_without_a_certificate_of_the_job(
    folder: Path, tmp_path: Path, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (foreign,) = certificates.create(tmp_path / "foreign", ["job"], days=1)
    with LocalNats() as broker:
        connection, _ = info_of(broker.url)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        # TLS 1.3 tells the refusal with the first byte that would be read.
        with context.wrap_socket(connection) as secured, pytest.raises(ssl.SSLError, match="(?i)certificate"):
            secured.recv(1)
        monkeypatch.setenv("PERSIA_TLS_DIR", str(foreign))
        stranger = NatsSession(broker.url, job_name, name="stranger")
        with pytest.raises(PermissionDeniedError, match="agree on TLS.*PERSIA_TLS_DIR"):
            stranger.connect(DEADLINE_S)
        monkeypatch.setenv("PERSIA_TLS_DIR", str(folder))
        with session(broker.url, job_name):
            pass


def test_a_plain_listener_gets_no_password(folder: Path, job_name: str) -> None:
    """Someone took the broker's port, and says that there is no TLS."""
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(DEADLINE_S)
                        connection.sendall(
                            b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576}\r\n'
                        )
                        while piece := connection.recv(65536):
                            received.extend(piece)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        for scheme in ("nats", "tls"):
            url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(PermissionDeniedError, match="does not encrypt"):
                NatsSession(url, job_name, name="victim").connect(DEADLINE_S)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert received == b""


def test_new_certificates_without_a_restart(folder: Path, job_name: str) -> None:
    with LocalNats() as broker, session(broker.url, job_name) as before:
        before.respond("persia.test", lambda payload: payload)
        first = certificate_of(broker.url, TlsFiles.of_folder(folder))
        certificates.create(folder.parent, ["job"], days=2, replace=True)
        deadline = time.monotonic() + DEADLINE_S
        while certificate_of(broker.url, TlsFiles.of_folder(folder)) == first:
            assert time.monotonic() < deadline, "the broker still shows the old certificate"
            time.sleep(0.1)
        with session(broker.url, job_name) as after:  # and the old connection has stayed
            assert after.request("persia.test", b"x", DEADLINE_S) == b"x"
        broker.restart()
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(PersiaError), session(broker.url, job_name) as after:
                assert after.request("persia.test", b"y", DEADLINE_S) == b"y"
                break
            assert time.monotonic() < deadline


def test_the_broker_of_a_procfile(folder: Path, job_name: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "persia.launcher", "nats-server", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = f"nats://127.0.0.1:{port}"
        with session(url, job_name):
            first = certificate_of(url, TlsFiles.of_folder(folder))
        certificates.create(folder.parent, ["job"], days=2, replace=True)
        deadline = time.monotonic() + DEADLINE_S
        while certificate_of(url, TlsFiles.of_folder(folder)) == first:
            assert time.monotonic() < deadline, "the broker still shows the old certificate"
            time.sleep(0.1)
    finally:
        server.terminate()
        _, said = server.communicate(timeout=DEADLINE_S)  # its helper has ended as well: the pipe is closed
    assert "permission denied" not in said


def test_a_broker_of_the_users_own(folder: Path, tmp_path: Path, job_name: str) -> None:
    """Any NATS server with tls:// and a certificate of the CA; it knows users of its own."""
    config = tmp_path / "own.conf"
    config.write_text(
        f'port: -1\nhost: "127.0.0.1"\nports_file_dir: "{tmp_path}"\n'
        f'tls {{ cert_file: "{folder}/tls.crt", key_file: "{folder}/tls.key" }}\n'
        "authorization { user: me, password: mine }\n"
    )
    server = subprocess.Popen([find_nats_server(), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        ports, deadline = tmp_path / f"nats-server_{server.pid}.ports", time.monotonic() + DEADLINE_S
        while not ports.exists() or not ports.read_text().endswith("}"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        address = json.loads(ports.read_text())["nats"][0].rpartition("//")[2]
        for scheme in ("tls", "nats"):
            with session(f"{scheme}://me:mine@{address}", job_name) as own:
                own.respond("persia.test", lambda payload: payload)
                assert own.request("persia.test", b"x", DEADLINE_S) == b"x"
    finally:
        server.terminate()
        server.wait(DEADLINE_S)
