"""Downloads against a real HTTP server: verified, cached, retried, and given up with the reason."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import adult
import download
from adult import ChecksumError
from download import NUM_ATTEMPTS, DownloadError, fetch

NAME = "adult.data"
CONTENT = b"the published file\n" * 1000


class Server(ThreadingHTTPServer):
    """Answers with `answers` one after the other, the last of them for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes]] = [(200, CONTENT)]
        self.num_requests = 0

    @property
    def home_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        answers = self.server.answers
        status, body = answers[min(self.server.num_requests, len(answers) - 1)]
        self.server.num_requests += 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setitem(adult.SHA256, NAME, hashlib.sha256(CONTENT).hexdigest())
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_fetch_verifies_and_caches(server: Server, tmp_path: Path) -> None:
    assert fetch(NAME, server.home_url, tmp_path) == CONTENT
    assert fetch(NAME, server.home_url, tmp_path) == CONTENT
    assert server.num_requests == 1
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_fetch_tries_again_after_errors_and_damaged_content(server: Server, tmp_path: Path) -> None:
    server.answers = [(503, b""), (200, CONTENT[:-1]), (200, CONTENT)]
    assert fetch(NAME, server.home_url, tmp_path, first_pause_s=0) == CONTENT
    assert server.num_requests == 3


def test_fetch_gives_up_with_the_last_reason(server: Server, tmp_path: Path) -> None:
    server.answers = [(200, b"something else")]
    with pytest.raises(DownloadError, match=r"4 attempts; the last error was: .*SHA-256 is"):
        fetch(NAME, server.home_url, tmp_path, first_pause_s=0)
    assert server.num_requests == NUM_ATTEMPTS
    assert list(tmp_path.iterdir()) == []


def test_fetch_refuses_more_than_the_file_can_be(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_BYTES", 1000)
    with pytest.raises(DownloadError, match="more than 1000 bytes"):
        fetch(NAME, server.home_url, tmp_path, first_pause_s=0)


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"damaged")
    with pytest.raises(ChecksumError, match=str(tmp_path / NAME)):
        fetch(NAME, "http://127.0.0.1:1/", tmp_path)
