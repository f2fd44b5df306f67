"""Calls of the gRPC port that Python answers: all but the plain ModelInfer requests of one served model.

The native front (`persia._native.ServingFront`) speaks HTTP/2 and hands these calls over as events.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from persia._native import ServingFront
from persia.errors import InvalidArgumentError, ResourceExhaustedError
from persia.serving.access import Access, refusal_of
from persia.serving.protocol import CODES, message_of, status_of
from persia.serving.statistics import ServingStatistics

_ANY_ZLIB = 47  # window bits: of gzip and of zlib


class Call:
    """One call. Only on the event loop."""

    def __init__(self, front: ServingFront, number: int, limits: Limits, said: Any) -> None:
        self.method: str
        self.authorization: str | None
        self.begin_ns: int  # of time.monotonic_ns(), when its bytes arrived
        deadline_ns: int | None  # the client's
        self.method, self.authorization, self._encoding, self.peer, self.begin_ns, deadline_ns, drawn = said
        self.draw_id: str = drawn  # of a plain request without an ID, by which the front has drawn
        self._deadline_ns = math.inf if deadline_ns is None else deadline_ns
        # A stream that watches has no answer to be late with; only the client's deadline ends it.
        if self.method not in limits.endless:
            self._deadline_ns = min(self._deadline_ns, self.begin_ns + limits.timeout_s * 1e9)
        self.status = ""  # of gRPC, once it is finished
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._front, self._number, self._max_bytes = front, number, limits.max_message_bytes
        self._arrived: asyncio.Queue[tuple[bytes, bool] | None] = asyncio.Queue()

    @property
    def left_s(self) -> float:
        """Until its deadline; infinity: it has none."""
        return (self._deadline_ns - time.monotonic_ns()) / 1e9

    def arrive(self, message: tuple[bytes, bool] | None) -> None:
        """A message, and whether it is compressed; None: no more come."""
        self._arrived.put_nowait(message)

    async def messages(self) -> AsyncIterator[bytes]:
        while (message := await self._arrived.get()) is not None:
            content, is_compressed = message
            yield self._inflated(content) if is_compressed else content

    async def message(self) -> bytes:
        """The only one. InvalidArgumentError: there is none."""
        async for message in self.messages():
            return message
        raise InvalidArgumentError(f"{self.method} takes one message, and there is none")

    def send(self, message: bytes) -> None:
        self._front.send(self._number, message)

    def finish(self, status: str, text: str = "") -> None:
        """Without effect on a call that is finished."""
        if not self.status:
            self.status = status
            self._front.finish(self._number, CODES[status], text)

    def begin(self, handler: Handler) -> None:
        """Lets `handler` answer, until its deadline."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(_answer(self, handler))
        if self._deadline_ns != math.inf:
            self._timer = loop.call_later(max(0.0, self.left_s), self._expire)

    def close(self) -> None:
        """The last of it: it is answered, or its client has left."""
        if not self.status and self.left_s <= 0:
            self.status = "DEADLINE_EXCEEDED"  # which the front or the client saw first
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()  # without effect on one that has answered

    def _expire(self) -> None:
        self.finish("DEADLINE_EXCEEDED", "the request's deadline passed before its answer")
        self.close()

    def _inflated(self, content: bytes) -> bytes:
        if self._encoding not in ("gzip", "deflate"):
            text = f"the message is compressed by {self._encoding!r:.40}: send gzip, deflate or identity"
            self.finish("UNIMPLEMENTED", text)  # as gRPC wants it; no error of ours has that status
            raise InvalidArgumentError(text)
        # In pieces up to the bound: a few bytes of a stranger may inflate to gigabytes.
        inflater = zlib.decompressobj(_ANY_ZLIB)
        try:
            inflated = inflater.decompress(content, self._max_bytes + 1)
        except zlib.error as failure:
            raise InvalidArgumentError(f"the message is no {self._encoding}: {failure}") from None
        if len(inflated) > self._max_bytes:
            raise ResourceExhaustedError(
                f"the message has more than {self._max_bytes} bytes: send several requests, or raise "
                "--max-request-mib"
            )
        if not inflater.eof or inflater.unused_data:
            raise InvalidArgumentError(
                f"the message's {len(content)} bytes are not one whole {self._encoding}: send one for each "
                "message"
            )
        if self.method.endswith("/ModelInfer"):  # the front has counted those of other messages
            self._front.check_tensors(inflated)
        return inflated


Handler = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """Of calls."""

    max_message_bytes: int  # also of one that is inflated
    timeout_s: float  # of calls without an earlier deadline
    endless: Collection[str] = ()  # paths of methods that end when the client wants, or by its deadline


class GrpcPort:
    """Answers calls by the path of their method, on one event loop."""

    def __init__(
        self,
        front: ServingFront,
        handlers: Mapping[str, Handler],
        access: Access,
        statistics: ServingStatistics,
        limits: Limits,
    ) -> None:
        self._front, self._handlers, self._access = front, handlers, access
        self._statistics, self._limits = statistics, limits
        self._calls: dict[int, Call] = {}

    def attach(self) -> None:
        """From now on the running loop answers."""
        asyncio.get_running_loop().add_reader(self._front.fileno(), self._take)

    def detach(self) -> None:
        asyncio.get_running_loop().remove_reader(self._front.fileno())

    def end(self, method: str, last: bytes) -> None:
        """Ends calls of a method that has no end, with a last message."""
        for call in self._calls.values():
            if call.method == method:
                call.send(last)
                call.finish("UNAVAILABLE", "the server is stopping: ask another one")

    def _take(self) -> None:
        # All that have come: the descriptor became readable once for them.
        for number, kind, said in self._front.take_events():
            if kind == "call":
                self._begin(number, said)
            elif (call := self._calls.get(number)) is None:
                continue  # it was refused
            elif kind == "closed":
                self._calls.pop(number).close()
            else:
                call.arrive(said)

    def _begin(self, number: int, said: Any) -> None:
        call = Call(self._front, number, self._limits, said)
        refusal = refusal_of(self._access, self._statistics, call.method, call.authorization, call.peer)
        handler = self._handlers.get(call.method)
        if refusal:
            call.finish("UNAUTHENTICATED", refusal)
        # After the token, so that strangers cannot ask which methods this server has.
        elif handler is None:
            call.finish("UNIMPLEMENTED", f"this server has no method {call.method!r:.200}")
        else:
            self._calls[number] = call
            call.begin(handler)


async def _answer(call: Call, handler: Handler) -> None:
    try:
        await handler(call)
    except asyncio.CancelledError:  # the client has left
        call.finish("CANCELLED")
        raise
    except Exception as failure:
        call.finish(status_of(failure)[0], message_of(failure))
    else:
        call.finish("OK")
