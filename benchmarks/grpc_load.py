"""A client of gRPC that costs little: frames of HTTP/2 made beforehand, over one connection.

A Python client of gRPC cannot send what a native server can answer. This one reads of an answer only whether
it is one: a message, and not an error alone.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from persia.serving.protocol import SERVICE

__all__ = ["INFER", "Outcome", "closed_loop", "open_loop"]

INFER = f"/{SERVICE}/ModelInfer"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_MAX_CONCURRENT_STREAMS = 3  # a setting
_FRAME_BYTES = 16384
_WINDOW_BYTES = 2**31 - 1
_DEFAULT_WINDOW = 65535
_OUT_BYTES = 1 << 16  # waiting to be sent; more requests wait outside
_LAST_S = 2.0  # for answers after the last request


@dataclass
class Outcome:
    """What became of requests."""

    times_s: list[float] = field(default_factory=list)  # of those answered, from when each was due
    failed_s: list[float] = field(default_factory=list)  # of those refused, from when each was sent


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _header_block(path: str, timeout_s: float) -> bytes:
    """Literals without an entry in the table, behind fields of the static one."""
    block = b"\x83\x86\x04" + _text(path) + b"\x01" + _text("server")
    block += b"\x0f\x10" + _text("application/grpc") + b"\x00" + _text("te") + _text("trailers")
    return block + b"\x00" + _text("grpc-timeout") + _text(f"{max(1, int(timeout_s * 1e6))}u")


class _Connection:
    def __init__(self, address: str, path: str = INFER) -> None:
        self._path = path
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = struct.pack(">HIHI", 1, 0, 4, _WINDOW_BYTES)
        self._socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(_SETTINGS, 0, 0, settings)
            + _frame(_WINDOW, 0, 0, struct.pack(">I", _WINDOW_BYTES - _DEFAULT_WINDOW))
        )
        self._socket.setblocking(False)
        self._out, self._in = bytearray(), bytearray()
        self._window, self._next = _DEFAULT_WINDOW, 1
        self._most_open = 100  # until the server says otherwise
        self._open: dict[int, tuple[float, float, bool]] = {}  # due, sent, whether a message came
        self.outcome = Outcome()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def fits(self, message: bytes) -> bool:
        is_narrow = len(self._out) >= _OUT_BYTES or self.num_open >= self._most_open
        return not is_narrow and len(message) + 5 <= self._window

    def begin(self, message: bytes, due_s: float, timeout_s: float) -> None:
        stream, self._next = self._next, self._next + 2
        body = b"\0" + struct.pack(">I", len(message)) + message
        self._out += _frame(_HEADERS, _END_HEADERS, stream, _header_block(self._path, timeout_s))
        for begin in range(0, len(body), _FRAME_BYTES):
            piece = body[begin : begin + _FRAME_BYTES]
            is_last = begin + _FRAME_BYTES >= len(body)
            self._out += _frame(_DATA, _END_STREAM if is_last else 0, stream, piece)
        self._window -= len(body)
        self._open[stream] = (due_s, time.perf_counter(), False)

    def move(self, wait_s: float) -> None:
        """Sends and receives what can be moved now, or within `wait_s`."""
        select.select([self._socket], [self._socket] if self._out else [], [], max(0.0, wait_s))
        try:
            if self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        try:
            received = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionError("the server has closed the connection")
        self._in += received
        self._read_frames()

    def _read_frames(self) -> None:
        begin = 0
        while len(self._in) - begin >= 9:
            size = int.from_bytes(self._in[begin : begin + 3], "big")
            if len(self._in) - begin < 9 + size:
                break
            kind, flags, stream = struct.unpack_from(">BBI", self._in, begin + 3)
            self._take(kind, flags, stream, self._in[begin + 9 : begin + 9 + size])
            begin += 9 + size
        del self._in[:begin]

    def _take(self, kind: int, flags: int, stream: int, payload: bytearray) -> None:
        if kind == _SETTINGS:
            values = dict(struct.iter_unpack(">HI", payload))
            self._most_open = values.get(_MAX_CONCURRENT_STREAMS, self._most_open)
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._out += _frame(kind, _ACK, 0, b"" if kind == _SETTINGS else bytes(payload))
        elif kind == _WINDOW and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == _GOAWAY:
            raise ConnectionError(f"the server ends the connection: {bytes(payload)!r}")
        elif kind in (_DATA, _HEADERS, _RST) and (known := self._open.get(stream)):
            due_s, sent_s, has_message = known
            if kind == _RST or flags & _END_STREAM:
                del self._open[stream]
                now = time.perf_counter()
                if has_message:
                    self.outcome.times_s.append(now - due_s)
                else:
                    self.outcome.failed_s.append(now - sent_s)
            elif kind == _DATA:
                self._open[stream] = (due_s, sent_s, True)

    def close(self) -> None:
        self._socket.close()


def closed_loop(
    address: str,
    messages: Sequence[bytes],
    in_flight: int,
    seconds: float,
    timeout_s: float,
    path: str = INFER,
) -> Outcome:
    """`in_flight` requests of the method `path` at a time."""
    connection = _Connection(address, path)
    end_s, count = time.perf_counter() + seconds, 0
    while (now := time.perf_counter()) < end_s:
        while connection.num_open < in_flight and connection.fits(messages[count % len(messages)]):
            connection.begin(messages[count % len(messages)], now, timeout_s)
            count += 1
        connection.move(0.1)
    connection.close()
    return connection.outcome


def open_loop(
    address: str, messages: Sequence[bytes], rate: float, seconds: float, timeout_s: float
) -> Outcome:
    """`rate` requests a second, each when it is due. One whose time has passed is not sent."""
    connection = _Connection(address)
    began_s, count, num = time.perf_counter(), 0, int(rate * seconds)
    waiting: deque[float] = deque()
    while (now := time.perf_counter()) < began_s + seconds + _LAST_S:
        while count < num and began_s + count / rate <= now:
            waiting.append(began_s + count / rate)
            count += 1
        while waiting and waiting[0] + timeout_s <= now:
            waiting.popleft()
        while waiting and connection.fits(message := messages[count % len(messages)]):
            due_s = waiting.popleft()
            connection.begin(message, due_s, due_s + timeout_s - now)
        if count == num and not waiting and not connection.num_open:
            break
        connection.move(0.0 if waiting else min(0.05, began_s + count / rate - now))
    connection.close()
    return connection.outcome
