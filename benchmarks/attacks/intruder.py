"""What a stranger can do who reaches the ports of a job and has none of its credentials. Sockets alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAGIC = 0x41535250
CALL, REPLY = 1, 2
HEADER = struct.Struct("<IBBBBQIIQ")
VERSIONS = (1, 2)  # an unknown one is answered, and its body skipped

# Numbers of docs/wire_format.md, by plane.
SERVER_METHODS = {
    "ConfigureServer": 16,
    "LookupRows": 17,
    "UpdateRows": 18,
    "SetRows": 19,
    "ClearRows": 21,
    "CountRows": 22,
    "PrefetchRows": 23,
    "MeasureLoad": 24,
    "Replicate": 25,
}
WORKER_METHODS = {
    "ConfigureWorker": 32,
    "LookupReference": 33,
    "LookupDirect": 34,
    "ReturnGradients": 35,
    "ReleaseReference": 36,
    "CountEmbeddings": 37,
    "ClearEmbeddings": 38,
    "SetEmbeddings": 39,
}


def frame(method: int, body: bytes = b"", *, claimed: int | None = None, version: int = 2) -> bytes:
    """A call. `claimed`: the length that its header tells, if not the true one."""
    size = len(body) if claimed is None else claimed
    return HEADER.pack(MAGIC, version, CALL, method, 0, 7, 0xFFFFFFFF, 0, size) + body


def block(signs: Sequence[int], dim: int) -> bytes:
    return struct.pack("<IIII", 1, 0, dim, len(signs)) + struct.pack(f"<{len(signs)}Q", *signs)


def body_of(method: str) -> bytes:
    """A body that a server without authentication acts on."""
    rows = block([1, 2], 8)
    return {
        "LookupRows": struct.pack("<II", 1, 0) + rows,
        "SetRows": rows + struct.pack("<16f", *[666.0] * 16),
        "SetEmbeddings": rows + struct.pack("<16f", *[666.0] * 16),
    }.get(method, b"")


@dataclass(frozen=True)
class Answer:
    """What came back. `status` None: the connection was closed without a reply."""

    status: int | None
    body: bytes
    seconds: float


def connect(address: str, timeout_s: float = 5.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout_s)


def call(address: str, method: int, body: bytes = b"", timeout_s: float = 5.0) -> Answer:
    """TimeoutError: neither an answer nor an end."""
    started = time.monotonic()
    received = b""
    with connect(address, timeout_s) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(frame(method, body))
        while len(received) < HEADER.size or len(received) < HEADER.size + HEADER.unpack_from(received)[8]:
            if not (piece := connection.recv(65536)):
                break
            received += piece
    seconds = time.monotonic() - started
    if len(received) < HEADER.size:
        return Answer(None, received, seconds)
    return Answer(HEADER.unpack_from(received)[4], received[HEADER.size :], seconds)


def nats_refuses(address: str, command: bytes, timeout_s: float = 5.0) -> bytes:
    """What the broker says to `command` of a client without credentials: all lines, until it is silent."""
    hello = {"verbose": False, "pedantic": False, "lang": "c", "version": "1", "headers": True}
    received = b""
    with connect(address, timeout_s) as connection, contextlib.suppress(ConnectionError, TimeoutError):
        connection.sendall(f"CONNECT {json.dumps(hello)}\r\nPING\r\n".encode() + command + b"PING\r\n")
        connection.settimeout(1.0)
        while piece := connection.recv(65536):
            received += piece
    return received


def publish(subject: str, payload: bytes) -> bytes:
    return f"PUB {subject} {len(payload)}\r\n".encode() + payload + b"\r\n"


def http(address: str, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Status and the whole answer of a GET without credentials."""
    with connect(address, timeout_s) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                answer += piece
    return int(answer.split(b" ", 2)[1]), answer


def garbage(generator: random.Random) -> bytes:
    """Raw bytes, half-valid frames of any method, HTTP, NATS verbs, the beginning of TLS."""
    junk = generator.randbytes(generator.randrange(1, 400))
    method = generator.randrange(256)
    return generator.choice(
        [
            junk,
            frame(method, junk, version=generator.choice(VERSIONS)),
            frame(method, junk, claimed=generator.choice([0, 1, len(junk) + 8, (1 << 30) - 8, 1 << 63])),
            frame(method, junk)[: generator.randrange(1, HEADER.size)],
            b"GET /" + junk.hex().encode() + b" HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + junk,
            b"POST /status HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n" + junk,
            b"SUB persia.> 1\r\nPUB persia.x 18446744073709551615\r\n" + junk,
            b'CONNECT {"user":"' + junk.hex().encode() + b'"}\r\n' + junk,
            b"\x16\x03\x01\x02\x00\x01" + junk,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + junk,
        ]
    )


def throw(address: str, messages: Sequence[bytes]) -> None:
    """Each message on a connection of its own, of which nothing is read. A server may accept some only."""
    for message in messages:
        with contextlib.suppress(OSError), connect(address, 0.2) as connection:
            connection.sendall(message)


@contextlib.contextmanager
def held(address: str, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """`count` connections that send `first` and then nothing, for the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + count + 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, wanted)), hard))
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            try:
                connections.append(stack.enter_context(connect(address, 1.0)))
                if first:
                    connections[-1].sendall(first)
            except TimeoutError:  # a server with a limit accepts no more, which is well
                break
            except OSError:
                continue
        yield connections


def num_open(connections: Sequence[socket.socket]) -> int:
    """How many of them the peer has not closed. Reads and forgets what it has sent."""
    left = {connection for connection in connections if connection.fileno() >= 0}
    poller = select.poll()
    by_number = {connection.fileno(): connection for connection in left}
    for number in by_number:
        poller.register(number, select.POLLIN)
    for number, _ in poller.poll(0):
        connection = by_number[number]
        connection.setblocking(False)
        try:
            while piece := connection.recv(65536):
                del piece
            left.discard(connection)
        except BlockingIOError:
            pass
        except OSError:
            left.discard(connection)
    return len(left)
