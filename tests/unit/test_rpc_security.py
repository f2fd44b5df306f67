"""A parameter server with an identity, in a process of its own that has few descriptors.

The client is written here from docs/wire_format.md, so that the page and the engine are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from persia import _native, errors

HEADER = struct.Struct("<IBBBBQIIQ")  # docs/wire_format.md, "RPC frames"
MAGIC, VERSION, REQUEST, PERMISSION_DENIED = 0x41535250, 2, 1, 10
AUTHENTICATE, LOOKUP_ROWS, CLEAR_ROWS, COUNT_ROWS = 0, 17, 21, 22
ROLES = {"trainer": 1, "worker": 3, "inference": 5, "monitor": 6}
KEYS = {role: hashlib.sha256(role.encode()).digest() for role in ("worker", "monitor")}
SERVER = """
import json, resource, sys
import persia._native as native

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
keys = {role: bytes.fromhex(key) for role, key in json.loads(sys.argv[1]).items()}
native.set_identity("server", b"s" * 32, keys)
server = native.ParameterServer(replica_index=0, replica_size=1, capacity=100, num_internal_shards=2)
print(server.start("127.0.0.1", 0), flush=True)
for _ in sys.stdin:
    print(json.dumps({"events": native.take_audit_events(), "stats": server.stats()}), flush=True)
"""

CLIENT = """
import sys
import persia._native as native

native.set_identity("trainer", b"t" * 32, {})
client = native.RemoteClient(1)
client.set_worker(0, "127.0.0.1:" + sys.argv[1])
client.sizes(timeout_s=5.0)
"""


class Server:
    """The process, asked for what it has recorded."""

    def __init__(self) -> None:
        keys = json.dumps({role: key.hex() for role, key in KEYS.items()})
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, keys], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def report(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        report = json.loads(self._line())
        assert isinstance(report, dict)
        return report

    def stop(self) -> None:
        self._process.communicate(timeout=240)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.stop()


class Client:
    """One connection that proves its role."""

    def __init__(self, port: int, role: str, key: bytes | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=240)
        key = KEYS[role] if key is None else key
        hello = bytes([1, ROLES[role]]) + bytes(6) + os.urandom(32)
        status, challenge = self.call(AUTHENTICATE, hello)
        assert (status, len(challenge)) == (0, 64)
        signed = hello + challenge[:32] + bytes(32)
        self.server_is_right = hmac.compare_digest(
            hmac.digest(key, b"persia rpc 1 server" + signed, "sha256"), challenge[32:]
        )
        self.send(AUTHENTICATE, hmac.digest(key, b"persia rpc 1 client" + signed, "sha256"))

    def send(self, method: int, body: bytes) -> None:
        header = HEADER.pack(MAGIC, VERSION, REQUEST, method, 0, 0, 30_000, 0, len(body))
        self.socket.sendall(header + body)

    def receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            chunk = self.socket.recv(size - len(received))
            assert chunk, "the server has closed the connection"
            received += chunk
        return received

    def call(self, method: int, body: bytes = b"") -> tuple[int, bytes]:
        self.send(method, body)
        reply = HEADER.unpack(self.receive(HEADER.size))
        return reply[4], self.receive(reply[8])

    def close(self) -> None:
        self.socket.close()


def test_the_documented_handshake(server: Server) -> None:
    with contextlib.closing(Client(server.port, "worker")) as client:
        assert client.server_is_right
        assert client.call(COUNT_ROWS) == (0, bytes(8))


def test_a_wrong_key_is_refused(server: Server) -> None:
    server.report()
    with contextlib.closing(Client(server.port, "worker", bytes(32))) as client:
        assert not client.server_is_right
        status, message = client.call(COUNT_ROWS)  # this is the answer to the proof
        assert status == PERMISSION_DENIED
        assert b"set PERSIA_JOB_SECRET" in message
    (event,) = server.report()["events"]
    assert (event["role"], event["method"]) == ("none", "connect")  # "worker" was claimed, and not proved


def test_a_client_takes_little_from_a_server_that_has_proved_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(listener.getsockname()[1])], stderr=subprocess.PIPE, text=True
        )
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(240)
            connection.recv(HEADER.size)
            connection.sendall(HEADER.pack(MAGIC, VERSION, 2, AUTHENTICATE, 0, 0, 0, 0, 1 << 29))
            _, errors = client.communicate(timeout=240)
    assert "a body of 536870912 bytes is above the limit of 4096" in errors


def test_what_changes_rows_is_audited_and_what_a_role_may_not_do_is_refused(server: Server) -> None:
    server.report()
    with contextlib.closing(Client(server.port, "worker")) as worker:
        assert worker.call(CLEAR_ROWS)[0] == 0
    with contextlib.closing(Client(server.port, "monitor")) as monitor:
        assert monitor.call(COUNT_ROWS)[0] == 0
        for method in (CLEAR_ROWS, LOOKUP_ROWS):
            assert monitor.call(method, b"not decoded")[0] == PERMISSION_DENIED
    report = server.report()
    events = [(event["role"], event["method"], event["outcome"][:7]) for event in report["events"]]
    assert events == [
        ("worker", "ClearRows", "ok"),
        ("monitor", "ClearRows", "refused"),
        ("monitor", "LookupRows", "refused"),
    ]
    assert all(event["peer"].startswith("127.0.0.1:") for event in report["events"])


def test_idle_strangers_do_not_use_up_the_descriptors(server: Server) -> None:
    """The process has 256 descriptors, and keeps half of them free of connections."""
    before = Client(server.port, "worker")
    assert before.call(COUNT_ROWS)[0] == 0  # the server has its proof: else it would be the oldest stranger
    with contextlib.ExitStack() as strangers:
        strangers.callback(before.close)
        for _ in range(300):
            strangers.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        after = Client(server.port, "worker")
        strangers.callback(after.close)
        assert after.call(COUNT_ROWS)[0] == 0
        assert before.call(COUNT_ROWS)[0] == 0
        assert server.report()["stats"]["rpc_num_connections"] <= 128
        assert server.report()["stats"]["rpc_num_crowded_out"] > 0


@pytest.mark.parametrize(
    ("role", "key", "accepted", "match"),
    [
        ("trainers", bytes(32), {}, "'trainers'"),
        ("worker", bytes(31), {}, "31 bytes"),
        ("worker", bytes(32), {"none": bytes(32)}, "'none'"),
        ("worker", bytes(32), {"trainer": b""}, "'trainer' has 0 bytes"),
    ],
)
def test_identities_are_checked(role: str, key: bytes, accepted: dict[str, bytes], match: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=match):
        _native.set_identity(role, key, accepted)


def test_tls_files_are_checked() -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"'/no/such\.pem'"):
        _native.set_tls("/no/such.pem", "/no/such.key", "/no/such.pem")
