"""Threads for handlers that may block.

Not `concurrent.futures.ThreadPoolExecutor`: the interpreter joins its threads before anything else at exit,
so one handler blocked by back-pressure would keep a finished process alive. These are daemons.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DaemonPool", "give_way"]

_IDLE_END_S = 0.2
_NICE = 10  # a tenth of what others get of a processor that all of them want


def give_way() -> None:
    """Lowers the CPU priority of this thread, and of the threads that it starts from now on."""
    thread = threading.get_native_id()
    # A process may have been started with a lower priority: without privileges it cannot be raised.
    nice = max(_NICE, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, nice)


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function(*self.arguments))
        except BaseException as error:
            self.future.set_exception(error)


class DaemonPool:
    """At most `num_threads` daemon threads, started when first needed. Calls beyond that wait in order."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_unfinished = 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Runs `function(*arguments)` on a thread of the pool."""
        call = _Call(function, arguments)
        with self._lock:
            self._num_unfinished += 1
            if len(self._threads) < min(self._num_unfinished, self._num_threads):
                self._threads.append(threading.Thread(target=self._serve, name=self._name, daemon=True))
                self._threads[-1].start()
        self._calls.put(call)
        return call.future

    def close(self) -> None:
        """Lets the threads end after the calls submitted so far; idle ones have ended when it returns."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        # Idle threads end at once; a handler that is stuck is not waited for.
        deadline = time.monotonic() + _IDLE_END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            with self._lock:
                self._num_unfinished -= 1
