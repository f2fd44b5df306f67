"""A network that is further away: a TCP proxy on this machine that holds bytes back for a fixed time.

Bytes stay in order, and each connection and direction keeps a bounded number of them: a sender that is ahead
by more waits, as it would for a real link of that length.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any

__all__ = ["DelayProxy"]

_CHUNK_BYTES = 64 << 10
_MAX_CHUNKS = 1024  # of one direction of a connection: 64 MiB at most
_START_S = 10.0


class DelayProxy:
    """Passes connections to `listen` on to `target`, each "host:port"; a context manager.

    Runs on a thread of its own. A connection whose one side ends, or breaks, ends on the other side after the
    delay.

    Args:
        listen: where to listen; port 0 takes a free one, which `address` then says.
        target: where connections go.
        one_way_s: seconds that each byte takes in each direction beyond what the system takes.

    Raises:
        OSError: on entering, when `listen` is taken.
    """

    def __init__(self, listen: str, target: str, one_way_s: float) -> None:
        if one_way_s < 0:
            raise ValueError(f"one_way_s is {one_way_s}: a delay is not negative")
        self.address = listen
        self._target = _split(target)
        self._one_way_s = one_way_s
        # epoll waits whole milliseconds, select as long as it is told.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="delay-proxy", daemon=True)
        self._connections: set[asyncio.Task[None]] = set()

    def __enter__(self) -> DelayProxy:
        self._thread.start()
        try:
            self._run(self._start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._stop())
        self._end()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        done.result(_START_S)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()

    async def _start(self) -> None:
        host, port = _split(self.address)
        self._server = await asyncio.start_server(self._accepted, host, port)
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is handled in a task of its own"
        self._connections.add(task)
        try:
            await self._pass_on(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the peers see their connections end
        finally:
            await _close(writer)
            self._connections.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(*self._target)
        try:
            await _together(self._copy(reader, to_writer), self._copy(to_reader, writer))
        finally:
            await _close(to_writer)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """One direction, to its end."""
        # Bytes with the time at which they are due; b"" is the end of the stream.
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)
        await _together(self._fill(source, line), self._drain(line, sink))

    async def _fill(self, source: asyncio.StreamReader, line: asyncio.Queue[tuple[float, bytes]]) -> None:
        chunk = b"-"
        while chunk:
            chunk = await source.read(_CHUNK_BYTES)
            await line.put((self._loop.time() + self._one_way_s, chunk))

    async def _drain(self, line: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        while True:
            due_s, chunk = await line.get()
            left_s = due_s - self._loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            if not chunk:
                if sink.can_write_eof():
                    sink.write_eof()
                return
            sink.write(chunk)
            await sink.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    """And waits for it: a loop that ends before has its sockets left open."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Until all have ended; when one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
