"""The gRPC port among clients that break HTTP/2, that send nothing, and that are no gRPC library."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from persia.serving.protocol import message

from .test_serving import START_S, Served, make_batch, one_model

GOOD = make_batch([10, 20, 99], dense=0.5)
EXPECTED = ("7", [6.5, 14.5, 0.5])
INFER = "/inference.GRPCInferenceService/ModelInfer"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with one_model(tmp_path_factory.mktemp("http2")) as served:
        yield served


def request() -> bytes:
    made = message("ModelInferRequest")(model_name="m", id="r")
    made.inputs.add(name="batch", datatype="BYTES", shape=[1]).contents.bytes_contents.append(GOOD)
    content: bytes = made.SerializeToString()
    return content


def frame(
    kind: int, stream: int = 0, payload: bytes = b"", flags: int = 0, length: int | None = None
) -> bytes:
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def text(value: bytes) -> bytes:
    return bytes([len(value)]) + value


AUTHORITY = b"\x01" + text(b"h")  # without it libnghttp2 resets the stream, and the server never sees it


def fields(path: str) -> bytes:
    return b"\x83\x86\x04" + text(path.encode()) + AUTHORITY + b"\x0f\x10" + text(b"application/grpc")


FIELDS = fields(INFER)
BEGIN = PREFACE + frame(SETTINGS)
CALL = BEGIN + frame(HEADERS, 1, FIELDS, END_HEADERS)
MANY_FIELDS = (b"\0" + text(b"a") + text(b"b" * 100)) * 150

# What breaks the connection, the stream or the message.
BROKEN = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: server\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "no settings": PREFACE + frame(HEADERS, 1, FIELDS, END_HEADERS),
    "a frame of 16 MiB": BEGIN + frame(DATA, 1, length=2**24 - 1) + bytes(1000),
    "headers of stream 0": BEGIN + frame(HEADERS, 0, FIELDS, END_HEADERS),
    "headers of an even stream": BEGIN + frame(HEADERS, 2, FIELDS, END_HEADERS),
    "no headers": BEGIN + frame(DATA, 1, b"\0\0\0\0\0", END_STREAM),
    "settings of 5 bytes": PREFACE + frame(SETTINGS, 0, bytes(5)),
    "a window of 0": BEGIN + frame(WINDOW, 0, bytes(4)),
    "a window beyond its bound": BEGIN + frame(WINDOW, 0, b"\x7f\xff\xff\xff") * 2,
    "a continuation of nothing": BEGIN + frame(CONTINUATION, 1, FIELDS, END_HEADERS),
    "no header fields": BEGIN + frame(HEADERS, 1, b"\xff" * 100, END_HEADERS | END_STREAM),
    "no path": BEGIN + frame(HEADERS, 1, b"\x83\x86", END_HEADERS | END_STREAM),
    "64 KiB of header fields": BEGIN + frame(HEADERS, 1, FIELDS) + frame(CONTINUATION, 1, MANY_FIELDS) * 5,
    "a message longer than announced": CALL + frame(DATA, 1, b"\0\0\0\0\x01abcdef", END_STREAM),
    "a message of 4 GiB": CALL + frame(DATA, 1, b"\0\xff\xff\xff\xff", END_STREAM),
    "a ping of 7 bytes": BEGIN + frame(PING, 0, bytes(7)),
    "a reset of an idle stream": BEGIN + frame(RST, 9, bytes(4)),
    "the end": BEGIN + frame(GOAWAY, 0, bytes(8)),
}


def connected(served: Served) -> socket.socket:
    host, _, port = served.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=START_S)


def spoken_to(served: Served, content: bytes) -> None:
    """Sends it and a ping, and reads until the server answers the ping or hangs up."""
    with connected(served) as client:
        said = b""
        try:
            client.sendall(content + frame(PING, 0, b"the last"))
            # A frame of a damaged length takes the ping in: then there is no answer to wait for.
            client.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                while b"the last" not in said and (received := client.recv(1 << 16)):
                    said += received
            client.settimeout(START_S)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
        except ConnectionError:
            pass


def replies(client: socket.socket, num: int) -> dict[int, bytes]:
    """The data of each stream, until `num` streams have ended."""
    said, data, ended = b"", dict[int, bytes](), set[int]()
    while len(ended) < num:
        received = client.recv(1 << 16)
        assert received, "the server hung up"
        said += received
        while len(said) >= 9 and len(said) >= 9 + (size := int.from_bytes(said[:3], "big")):
            kind, flags, stream = said[3], said[4], int.from_bytes(said[5:9], "big")
            if kind == DATA:
                data[stream] = data.get(stream, b"") + said[9 : 9 + size]
            if kind == RST or (kind in (DATA, HEADERS) and flags & END_STREAM):
                ended.add(stream)
            said = said[9 + size :]
    return data


def num_counted(served: Served) -> int:
    """Requests that the server has counted, whatever became of them."""
    (counts,) = served.client.get_inference_statistics("m").model_stats
    return int(counts.inference_stats.success.count + counts.inference_stats.fail.count)


@pytest.mark.parametrize("name", BROKEN)
def test_clients_that_break_the_protocol(served: Served, name: str) -> None:
    before = num_counted(served)
    spoken_to(served, BROKEN[name])
    assert served.infer(GOOD) == EXPECTED
    # What breaks only the message is a request that the server refuses.
    assert num_counted(served) - before == (2 if name.startswith("a message") else 1)


def test_damaged_frames(served: Served) -> None:
    body = b"\0" + len(request()).to_bytes(4, "big") + request()
    content = CALL + frame(DATA, 1, body, END_STREAM)
    with connected(served) as client:
        client.sendall(content)
        reply = message("ModelInferResponse").FromString(replies(client, 1)[1][5:])
    assert (reply.id, reply.model_version) == ("r", "7"), "undamaged, it is answered"
    before = num_counted(served)
    chance = random.Random(0)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(chance.randrange(1, 5)):
            damaged[chance.randrange(len(PREFACE), len(damaged))] = chance.randrange(256)
        spoken_to(served, bytes(damaged[: chance.choice((len(damaged), chance.randrange(len(damaged))))]))
    assert served.infer(GOOD) == EXPECTED
    assert num_counted(served) - before > 30, "many are damaged in such a way that the server reads them"


def test_connections_that_say_nothing_are_closed(served: Served) -> None:
    folder = Path(f"/proc/{served.process.pid}/fd")
    before = len(os.listdir(folder))
    silent = [connected(served) for _ in range(100)]
    assert served.infer(GOOD) == EXPECTED
    for client in silent:
        with client:
            while client.recv(1 << 16):  # its settings, and then it hangs up
                pass
    deadline = time.monotonic() + START_S
    while len(os.listdir(folder)) > before:
        assert time.monotonic() < deadline, "descriptors are left"
        time.sleep(0.05)


def test_a_thousand_calls_of_a_client_that_leaves(served: Served) -> None:
    half, before = b"\0\0\0\x10\0" + bytes(100), num_counted(served)  # of a message of 4 KiB
    for _ in range(10):
        streams = [
            frame(HEADERS, number, FIELDS, END_HEADERS) + frame(DATA, number, half)
            for number in range(1, 200, 2)
        ]
        spoken_to(served, BEGIN + b"".join(streams))
    assert served.infer(GOOD) == EXPECTED
    assert num_counted(served) - before >= 1000, "each was a call of the server"


def test_curl_speaks_grpc(served: Served, tmp_path: Path) -> None:
    (tmp_path / "request").write_bytes(b"\0" + len(request()).to_bytes(4, "big") + request())
    command = ["curl", "-sS", "--http2-prior-knowledge", "-H", "content-type: application/grpc"]
    command += ["-H", "te: trailers", "--data-binary", f"@{tmp_path / 'request'}"]
    done = subprocess.run(
        [*command, f"http://{served.address}{INFER}"], capture_output=True, check=True, timeout=START_S
    )
    reply = message("ModelInferResponse").FromString(done.stdout[5:])
    assert (reply.id, reply.model_version, list(reply.outputs[0].shape)) == ("r", "7", [3, 1])


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages(served: Served, compression: grpc.Compression) -> None:
    with grpc.insecure_channel(served.address, compression=compression) as channel:
        reply = channel.unary_unary(INFER)(request(), timeout=START_S)
    assert message("ModelInferResponse").FromString(reply).model_version == "7"
