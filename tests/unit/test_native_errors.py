"""Each status code of the native code arrives in Python as the class of persia.errors that belongs to it.

The codes come from a peer of our own that speaks RPC frames and answers with the status it is told to. It
runs in this process, so a call that kept the GIL would never be answered.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from persia import _native, errors

HEADER = struct.Struct("<IBBBBQIIQ")  # docs/wire_format.md, "RPC frames"
REFERENCE = _native.BatchReference(0, 1, 1)


class Answer(socketserver.StreamRequestHandler):
    """Answers every request of a connection with the status and message of its server."""

    def handle(self) -> None:
        assert isinstance(self.server, AnsweringPeer)
        while len(header := self.rfile.read(HEADER.size)) == HEADER.size:
            magic, version, _, method, _, request_id, _, _, body_bytes = HEADER.unpack(header)
            self.rfile.read(body_bytes)
            message = self.server.message
            self.wfile.write(
                HEADER.pack(magic, version, 2, method, self.server.status, request_id, 0, 0, len(message))
                + message
            )


class AnsweringPeer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False  # connections end when their client does

    def __init__(self, status: int, message: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status, self.message = status, message


ClientOf = Callable[[int, bytes], _native.RemoteClient]


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    """Makes a client whose embedding worker answers with the status given."""
    with contextlib.ExitStack() as stack:

        def make(status: int, message: bytes) -> _native.RemoteClient:
            peer = stack.enter_context(AnsweringPeer(status, message))
            threading.Thread(target=peer.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            stack.callback(peer.shutdown)
            client = _native.RemoteClient(1)
            client.set_worker(0, f"127.0.0.1:{peer.server_address[1]}")
            return client

        yield make


CODES = [
    (1, errors.InvalidArgumentError, ValueError),
    (2, errors.NotFoundError, LookupError),
    (3, errors.CorruptionError, ValueError),
    (5, errors.DeadlineExceededError, TimeoutError),
    (6, errors.ResourceExhaustedError, RuntimeError),
    (7, errors.StorageError, OSError),
    (8, errors.InternalError, RuntimeError),
    (9, errors.FailedPreconditionError, RuntimeError),
    (10, errors.PermissionDeniedError, PermissionError),
]


@pytest.mark.parametrize(("code", "error_class", "builtin"), CODES)
def test_code(
    client_of: ClientOf,
    code: int,
    error_class: type[errors.PersiaError],
    builtin: type[Exception],
) -> None:
    client = client_of(code, b"slot 'age': the reason")
    with pytest.raises(error_class, match="slot 'age': the reason") as caught:
        client.release(REFERENCE, timeout_s=30)
    assert type(caught.value) is error_class
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, RuntimeError)


def test_unavailable_is_retried_until_the_deadline(client_of: ClientOf) -> None:
    client = client_of(4, b"stopping")
    with pytest.raises((errors.UnavailableError, errors.DeadlineExceededError), match="stopping"):
        client.release(REFERENCE, timeout_s=0.3)


def test_a_code_from_the_future_is_an_internal_error(
    client_of: ClientOf,
) -> None:
    client = client_of(200, b"something new")
    with pytest.raises(errors.PersiaError):
        client.release(REFERENCE, timeout_s=30)


def test_a_message_that_is_not_utf8_still_arrives(client_of: ClientOf) -> None:
    client = client_of(2, b"name \xff\xfe here")
    with pytest.raises(errors.NotFoundError, match="name \ufffd\ufffd here"):
        client.release(REFERENCE, timeout_s=30)


def test_a_worker_without_address_ends_at_the_deadline() -> None:
    client = _native.RemoteClient(1)
    with pytest.raises((errors.UnavailableError, errors.DeadlineExceededError), match="embedding-worker 0"):
        client.clear(timeout_s=0.1)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_timeouts_are_durations(timeout_s: float) -> None:
    client = _native.RemoteClient(1)
    with pytest.raises(errors.InvalidArgumentError, match="timeout_s"):
        client.clear(timeout_s=timeout_s)


def parameter_server(**options: int) -> _native.ParameterServer:
    defaults = {"replica_index": 0, "replica_size": 1, "capacity": 100, "num_internal_shards": 2}
    return _native.ParameterServer(**{**defaults, **options})


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.StorageError, match=str(port)):
            parameter_server().start("127.0.0.1", port)


def test_a_server_starts_once() -> None:
    server = parameter_server()
    server.stop()
    assert server.start("127.0.0.1", 0) > 0
    assert server.incarnation > 0
    with pytest.raises(errors.FailedPreconditionError, match="started already"):
        server.start("127.0.0.1", 0)
    server.stop()
    server.stop()


@pytest.mark.parametrize("options", [{"replica_index": 1}, {"capacity": 0}, {"num_internal_shards": 0}])
def test_a_server_refuses_options_when_it_is_made(options: dict[str, int]) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=next(iter(options))):
        parameter_server(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "tiger"}, "'tiger' is not one of sgd"),
        ({"optimizer": "sgd", "momentun": 0.9}, "momentun is no hyper-parameter of sgd, which has lr"),
        ({"optimizer": "adam", "momentum": 0.9}, "adam has no momentum"),
        ({"optimizer": "sgd", "momentum": "high"}, "momentum='high' is no number"),
        ({"optimizer": "sgd", "admit_after": 0}, "admit_after"),
        ({"optimizer": "sgd", "initializer": {"name": "he"}}, "'he' is not one of uniform"),
        ({"optimizer": "sgd", "initializer": {}}, "initializer has no name"),
        ({"optimizer": "sgd", "initializer": {"name": "constant"}}, "constant has no value"),
        ({"optimizer": "sgd", "initializer": {"name": "zeros", "std": 1.0}}, "zeros has a setting"),
        ({"optimizer": "sgd", "initializer": {"name": "normal", "std": -1.0}}, "initializer.std"),
        ({"optimizer": "sgd", "lr": float("nan")}, "lr"),
        ({"optimizer": "sgd", "lr": -1.0}, "lr"),
        ({"optimizer": "adam", "beta1": 1.5}, "beta1"),
        ({"optimizer": "sgd", "admit_probability": 2.0}, "admit_probability"),
        ({"optimizer": "sgd", "lower": 1.0, "upper": -1.0}, "lower|upper"),
    ],
)
def test_a_train_config_is_validated(options: dict[str, object], message: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=message):
        _native.TrainConfig(**{"lr": 0.1, **options})  # type: ignore[arg-type]
