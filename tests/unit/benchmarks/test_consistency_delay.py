"""The delaying proxy, between real sockets."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from benchmarks.consistency.delay import DelayProxy

WAIT_S = 120.0


@contextmanager
def server(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serves one connection with `handle`; gives the address."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            handle(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(WAIT_S)
        assert not thread.is_alive()


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def connect(proxy: DelayProxy) -> socket.socket:
    host, port = proxy.address.split(":")
    connection = socket.create_connection((host, int(port)), WAIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count and (part := connection.recv(min(count, 1 << 16))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


@pytest.mark.parametrize("round_trip_s", [0.0, 0.04])
def test_a_round_trip_takes_as_much_longer_as_asked(round_trip_s: float) -> None:
    times = []
    with (
        server(echo) as target,
        DelayProxy("127.0.0.1:0", target, round_trip_s / 2) as proxy,
        connect(proxy) as connection,
    ):
        for _ in range(10):
            begin = time.perf_counter()
            connection.sendall(b"ping")
            assert receive(connection, 4) == b"ping"
            times.append(time.perf_counter() - begin)
    assert min(times) >= round_trip_s
    assert statistics.median(times) < round_trip_s + 0.03


def test_many_bytes_in_order_while_the_delay_is_paid_once() -> None:
    sent = bytes(range(256)) * 40_000  # 10 MB, far more than a chunk
    with (
        server(echo) as target,
        DelayProxy("127.0.0.1:0", target, 0.05) as proxy,
        connect(proxy) as connection,
    ):
        begin = time.perf_counter()
        sender = threading.Thread(target=connection.sendall, args=(sent,))
        sender.start()
        assert receive(connection, len(sent)) == sent
        sender.join(WAIT_S)
        # One after the other, the 150 chunks would take 15 s.
        assert time.perf_counter() - begin < 7


def test_the_end_of_a_stream_leaves_the_other_direction_open() -> None:
    def count(connection: socket.socket) -> None:
        size = 0
        while data := connection.recv(1 << 16):
            size += len(data)
        connection.sendall(str(size).encode())

    with (
        server(count) as target,
        DelayProxy("127.0.0.1:0", target, 0.01) as proxy,
        connect(proxy) as connection,
    ):
        connection.sendall(b"x" * 100_000)
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection, 100) == b"100000"


def test_a_sender_waits_for_a_receiver_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.consistency.delay._MAX_CHUNKS", 4)
    may_end = threading.Event()
    with (
        server(lambda _: may_end.wait(WAIT_S) and None) as target,
        DelayProxy("127.0.0.1:0", target, 0.0) as proxy,
        connect(proxy) as connection,
    ):
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.sendall(b"x" * (256 << 20))  # more than all buffers on the way
        may_end.set()


def test_nobody_behind_it_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        target = f"127.0.0.1:{unused.getsockname()[1]}"
    with DelayProxy("127.0.0.1:0", target, 0.0) as proxy, connect(proxy) as connection:
        assert receive(connection, 1) == b""


def test_leaving_it_ends_what_is_connected() -> None:
    with server(echo) as target:
        with DelayProxy("127.0.0.1:0", target, 0.0) as proxy:
            connection = connect(proxy)
            connection.sendall(b"ping")
            assert receive(connection, 4) == b"ping"
        with connection:
            assert receive(connection, 1) == b""


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        DelayProxy("127.0.0.1:0", "127.0.0.1:1", -1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match="address already in use"), DelayProxy(address, address, 0.0):
            pass
