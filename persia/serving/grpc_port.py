"""Calls of the gRPC port that Python answers: all but the plain ModelInfer requests of one served model.

The native front (`persia._native.ServingFront`) speaks HTTP/2 and hands these calls over as events.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from persia._native import ServingFront
from persia.errors import InvalidArgumentError, ResourceExhaustedError
from persia.serving.access import Access, refusal_of
from persia.serving.protocol import CODES, message_of, status_of
from persia.serving.statistics import ServingStatistics

_ANY_ZLIB = 47  # window bits: of gzip and of zlib


class Call:
    """One call. Only on the event loop."""

    def __init__(self, front: ServingFront, number: int, max_message_bytes: int, said: Any) -> None:
        self.method: str
        self.authorization: str | None
        self.begin_ns: int  # of time.monotonic_ns(), when its bytes arrived
        self._deadline_ns: int | None
        self.method, self.authorization, self._encoding, self.peer, self.begin_ns, self._deadline_ns = said
        self.task: asyncio.Task[None] | None = None
        self._front, self._number, self._max_bytes = front, number, max_message_bytes
        self._arrived: asyncio.Queue[tuple[bytes, bool] | None] = asyncio.Queue()

    @property
    def left_s(self) -> float:
        """Until the client's deadline; infinity: it has none."""
        if self._deadline_ns is None:
            return math.inf
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
        self._front.finish(self._number, CODES[status], text)

    def _inflated(self, content: bytes) -> bytes:
        if self._encoding not in ("gzip", "deflate"):
            raise InvalidArgumentError(
                f"the message is compressed by {self._encoding!r:.40}: send gzip, deflate or identity"
            )
        inflater = zlib.decompressobj(_ANY_ZLIB)
        try:
            inflated = inflater.decompress(content, self._max_bytes)
        except zlib.error as failure:
            raise InvalidArgumentError(f"the message is no {self._encoding}: {failure}") from None
        if inflater.unconsumed_tail or not inflater.eof:
            raise ResourceExhaustedError(
                f"the message has more than {self._max_bytes} bytes, or is cut short: send several requests, "
                "or raise --max-request-mib"
            )
        return inflated


Handler = Callable[[Call], Awaitable[None]]


class GrpcPort:
    """Answers calls by the path of their method, on one event loop."""

    def __init__(
        self,
        front: ServingFront,
        handlers: Mapping[str, Handler],
        access: Access,
        statistics: ServingStatistics,
        max_message_bytes: int,
    ) -> None:
        self._front, self._handlers, self._access = front, handlers, access
        self._statistics, self._max_bytes = statistics, max_message_bytes
        self._calls: dict[int, Call] = {}

    def attach(self) -> None:
        """From now on the running loop answers."""
        asyncio.get_running_loop().add_reader(self._front.fileno(), self._take)

    def detach(self) -> None:
        asyncio.get_running_loop().remove_reader(self._front.fileno())

    def end(self, method: str) -> None:
        """Ends calls of a method that has no end."""
        for call in self._calls.values():
            if call.method == method:
                call.finish("UNAVAILABLE", "the server is stopping: ask another one")

    def _take(self) -> None:
        for number, kind, said in self._front.take_events():
            if kind == "call":
                self._begin(number, said)
            elif (call := self._calls.get(number)) is None:
                continue  # it was refused
            elif kind == "closed":
                del self._calls[number]
                if call.task is not None:
                    call.task.cancel()  # without effect on one that has answered
            else:
                call.arrive(said)

    def _begin(self, number: int, said: Any) -> None:
        call = Call(self._front, number, self._max_bytes, said)
        refusal = refusal_of(self._access, self._statistics, call.method, call.authorization, call.peer)
        handler = self._handlers.get(call.method)
        if refusal:
            call.finish("UNAUTHENTICATED", refusal)
        elif handler is None:
            call.finish("UNIMPLEMENTED", f"this server has no method {call.method!r:.200}")
        else:
            self._calls[number] = call
            call.task = asyncio.get_running_loop().create_task(_answer(call, handler))


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
