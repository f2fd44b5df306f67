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
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 3, 4  # settings
_FRAME_BYTES = 16384
_HEAD_BYTES, _PREFIX_BYTES = 9, 5  # of a frame; of a message
_WINDOW_BYTES = 2**31 - 1
_DEFAULT_WINDOW = 65535
_OUT_BYTES = 1 << 16  # waiting to be sent; more requests wait outside
_LAST_S = 2.0  # for answers after the last request


@dataclass
class Outcome:
    """What became of requests."""

    times_s: list[float] = field(default_factory=list)  # of those answered, from when each was due
    failed_s: list[float] = field(default_factory=list)  # of those refused, from when each was sent


def _head(size: int, kind: int, flags: int, stream: int) -> bytes:
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _head(len(payload), kind, flags, stream) + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _header_fields(path: str) -> bytes:
    """Literals without an entry in the table, behind fields of the static one; the timeout follows."""
    fields = b"\x83\x86\x04" + _text(path) + b"\x01" + _text("server")
    fields += b"\x0f\x10" + _text("application/grpc") + b"\x00" + _text("te") + _text("trailers")
    return fields + b"\x00" + _text("grpc-timeout")


@dataclass
class _Request:
    due_s: float
    sent_s: float
    message: bytes
    window: int  # of its stream
    sent: int = 0  # bytes of the prefix and the message
    has_answer: bool = False


class _Connection:
    def __init__(self, address: str, path: str = INFER) -> None:
        self._fields = _header_fields(path)
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = struct.pack(">HIHI", 1, 0, _INITIAL_WINDOW_SIZE, _WINDOW_BYTES)
        self._socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(_SETTINGS, 0, 0, settings)
            + _frame(_WINDOW, 0, 0, struct.pack(">I", _WINDOW_BYTES - _DEFAULT_WINDOW))
        )
        self._socket.setblocking(False)
        self._out, self._in = bytearray(), bytearray()
        self._window, self._next = _DEFAULT_WINDOW, 1
        self._stream_window, self._most_open = _DEFAULT_WINDOW, 100  # until the server says otherwise
        self._open: dict[int, _Request] = {}
        self.outcome = Outcome()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def fits(self, message: bytes) -> bool:
        is_narrow = len(self._out) >= _OUT_BYTES or self.num_open >= self._most_open
        return not is_narrow and len(message) + 5 <= self._window

    def begin(self, message: bytes, due_s: float, timeout_s: float) -> None:
        stream, self._next = self._next, self._next + 2
        fields = self._fields + _text(f"{max(1, int(timeout_s * 1e6))}u")
        self._out += _frame(_HEADERS, _END_HEADERS, stream, fields)
        request = _Request(due_s, time.perf_counter(), message, self._stream_window)
        self._open[stream] = request
        self._pour(stream, request)

    def _pour(self, stream: int, request: _Request) -> None:
        """Sends as much of the body as the server permits."""
        total = len(request.message) + _PREFIX_BYTES
        while (size := min(_FRAME_BYTES, total - request.sent, request.window, self._window)) > 0:
            if (begin := request.sent) == 0 and size < _PREFIX_BYTES:
                break  # until it fits
            request.sent += size
            flags = _END_STREAM if request.sent == total else 0
            self._out += _head(size, _DATA, flags, stream)
            if begin == 0:
                self._out += b"\0" + len(request.message).to_bytes(4, "big")
            self._out += request.message[max(0, begin - _PREFIX_BYTES) : request.sent - _PREFIX_BYTES]
            request.window -= size
            self._window -= size

    def move(self, wait_s: float) -> None:
        """Sends and receives what can be moved now, or within `wait_s`."""
        if wait_s > 0:
            select.select([self._socket], [self._socket] if self._out else [], [], wait_s)
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
        received, begin, end = bytes(self._in), 0, len(self._in)
        while end - begin >= _HEAD_BYTES:
            size = int.from_bytes(received[begin : begin + 3], "big")
            next_begin = begin + _HEAD_BYTES + size
            if next_begin > end:
                break
            stream = int.from_bytes(received[begin + 5 : begin + _HEAD_BYTES], "big")
            kind, flags = received[begin + 3], received[begin + 4]
            self._take(kind, flags, stream, received[begin + _HEAD_BYTES : next_begin])
            begin = next_begin
        del self._in[:begin]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._out += _frame(kind, _ACK, 0, b"" if kind == _SETTINGS else payload)
            if kind == _SETTINGS:  # what they permit follows the frame that accepts them
                self._use(dict(struct.iter_unpack(">HI", payload)))
        elif kind == _WINDOW and stream == 0:
            was_empty = self._window == 0
            self._window += int.from_bytes(payload, "big")
            if was_empty:
                self._pour_all()
        elif kind == _GOAWAY:
            raise ConnectionError(f"the server ends the connection: {payload!r}")
        elif (request := self._open.get(stream)) is None:
            return
        elif kind == _WINDOW:
            request.window += int.from_bytes(payload, "big")
            self._pour(stream, request)
        elif kind == _RST or flags & _END_STREAM:
            del self._open[stream]
            now = time.perf_counter()
            if request.has_answer:
                self.outcome.times_s.append(now - request.due_s)
            else:
                self.outcome.failed_s.append(now - request.sent_s)
        elif kind == _DATA:
            request.has_answer = True

    def _use(self, settings: dict[int, int]) -> None:
        self._most_open = settings.get(_MAX_CONCURRENT_STREAMS, self._most_open)
        window = settings.get(_INITIAL_WINDOW_SIZE, self._stream_window)
        change, self._stream_window = window - self._stream_window, window
        for request in self._open.values():
            request.window += change
        self._pour_all()

    def _pour_all(self) -> None:
        for stream, request in self._open.items():
            self._pour(stream, request)

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
