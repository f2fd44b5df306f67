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
from typing import Any

_IDLE_END_S = 0.2
_NICE = 10  # a tenth of what others get of a processor that all of them want


def lower_priority() -> None:
    """Lowers the CPU priority of this thread, and of the threads that it starts from now on."""
    thread = threading.get_native_id()
    # A process may have been started with a lower priority: without privileges it cannot be raised.
    nice = max(_NICE, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, nice)


class DaemonPool:
    """At most `num_threads` daemon threads, started when first needed. Calls beyond that wait in order."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_unfinished = 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Runs `function(*arguments)` on a thread of the pool."""
        future: Future[Any] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # also sys.exit() of a handler: its thread serves others, too
                future.set_exception(error)

        with self._lock:
            self._num_unfinished += 1
            # Not when a thread is idle: an idle thread takes the call sooner than a new one starts.
            if len(self._threads) < min(self._num_unfinished, self._num_threads):
                thread = threading.Thread(
                    target=self._serve, args=(self._calls,), name=self._name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._calls.put(call)
        return future

    @property
    def num_unfinished(self) -> int:
        """Calls that wait or run."""
        return self._num_unfinished

    def close(self) -> None:
        """Lets the threads end after the calls submitted so far; idle ones have ended when it returns.

        Calls that are submitted later start threads of their own.
        """
        with self._lock:
            threads, self._threads = self._threads, []
            calls, self._calls = self._calls, queue.SimpleQueue()
        for _ in threads:
            calls.put(None)
        # Idle threads end at once; a handler that is stuck is not waited for.
        deadline = time.monotonic() + _IDLE_END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self, calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (call := calls.get()) is not None:
            call()
            del call  # an idle thread must not keep what the call refers to, such as a store and its file
            with self._lock:
                self._num_unfinished -= 1
