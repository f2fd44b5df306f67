"""The HTTP port of a process with PERSIA_TLS_DIR, and its clients."""

from __future__ import annotations

import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia.errors import PermissionDeniedError, UnavailableError
from persia.observability.http import HttpPort, json_answer
from persia.observability.status import fetch_json
from persia.security import certificates, http_token
from persia.security.tls import TlsFiles


@pytest.fixture
def port(certified: Path) -> Iterator[HttpPort]:
    routes = {
        ("GET", "/healthz"): lambda _query: json_answer("ok"),
        ("GET", "/status"): lambda query: json_answer(dict(query)),
    }
    made = HttpPort("127.0.0.1", 0, routes)
    yield made
    made.close()


def plain(address: str, path: str) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {http_token()}"}
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture
def certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PERSIA_TLS_DIR of this process."""
    (folder,) = certificates.create(tmp_path / "certificates", ["job"], days=1)
    monkeypatch.setenv("PERSIA_TLS_DIR", str(folder))
    return folder


def test_with_certificates_only_probes_are_answered_without_tls(certified: Path, port: HttpPort) -> None:
    address = f"127.0.0.1:{port.port}"
    assert fetch_json(address, "/status?a=1") == {"a": "1"}
    assert plain(address, "/healthz") == (200, b'"ok"')
    status, body = plain(address, "/status")  # with the token
    assert status == 401
    assert b"use https" in body
    context = TlsFiles.of_folder(certified).client_context()
    request = urllib.request.Request(f"https://{address}/status")  # without the token
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(request, context=context, timeout=60)
    refused.value.close()


def test_a_monitor_of_another_ca_is_refused(
    certified: Path, port: HttpPort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (foreign,) = certificates.create(tmp_path / "foreign", ["job"], days=1)
    monkeypatch.setenv("PERSIA_TLS_DIR", str(foreign))
    with pytest.raises(PermissionDeniedError, match="agree on TLS"):
        fetch_json(f"127.0.0.1:{port.port}", "/status")
    monkeypatch.delenv("PERSIA_TLS_DIR")
    with pytest.raises(PermissionDeniedError, match="PERSIA_TLS_DIR"):
        fetch_json(f"127.0.0.1:{port.port}", "/status")
    stranger = ssl.create_default_context()
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    before = port.num_refused
    with pytest.raises(OSError):  # noqa: PT011 - an alert or a reset, by who is faster
        urllib.request.urlopen(f"https://127.0.0.1:{port.port}/healthz", context=stranger, timeout=60)
    deadline = time.monotonic() + 60
    while port.num_refused == before:  # counted on the server's thread
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_refused_certificate_is_named_by_its_cause(
    certified: Path, port: HttpPort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS 1.3 the client knows only when it reads the answer."""
    (foreign,) = certificates.create(tmp_path / "foreign", ["job"], days=1)
    (foreign / "ca.crt").write_bytes((certified / "ca.crt").read_bytes())
    monkeypatch.setenv("PERSIA_TLS_DIR", str(foreign))
    for _ in range(30):  # the request may fail before the alert is read, which has another error
        with pytest.raises((PermissionDeniedError, UnavailableError)) as refused:
            fetch_json(f"127.0.0.1:{port.port}", "/status")
        # A reset that overtakes the alert says nothing about TLS.
        if isinstance(refused.value.__cause__, ssl.SSLError):
            assert isinstance(refused.value, PermissionDeniedError)


def test_new_certificates_are_shown_without_a_restart(certified: Path, port: HttpPort) -> None:
    address = ("127.0.0.1", port.port)
    first = shown(certified, address)
    certificates.create(certified.parent, ["job"], days=2, replace=True)
    assert shown(certified, address) != first
    assert fetch_json(f"127.0.0.1:{port.port}", "/status?a=1") == {"a": "1"}


def shown(folder: Path, address: tuple[str, int]) -> bytes | None:
    context = TlsFiles.of_folder(folder).client_context()
    with socket.create_connection(address, 60) as plain, context.wrap_socket(plain) as secured:
        return secured.getpeercert(binary_form=True)


def test_a_token_is_not_sent_to_a_plain_listener(certified: Path) -> None:
    """Someone advertised an address, or took it."""
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            connection, _ = listener.accept()
            with connection:
                received.extend(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(PermissionDeniedError, match="agree on TLS"):
            fetch_json(f"127.0.0.1:{listener.getsockname()[1]}", "/status")
        thread.join()
    assert received[:1] == b"\x16"
    assert http_token().encode() not in received
