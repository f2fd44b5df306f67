"""Stages 3 and 5 after the death of an embedding worker: its batches continue on another one.

In: calls about a batch, and its ID features, which the rank keeps until the gradients are applied. Out: the
answer of the worker that holds the batch now. Another worker gets the ID features by `lookup_direct`, with
the first reference of the batch. Servers apply the update under that one, so it is applied once even if the
dead worker has sent it.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from persia._native import BatchReference
from persia.errors import NotFoundError, UnavailableError
from persia.pipeline.queues import Deadline

__all__ = ["CallMonitor", "HeldBatches"]

T = TypeVar("T")

_SLOW_S = 0.5  # a call that takes longer makes the monitor look whether its worker lives
_CONNECT_S = 2.0  # a host that does not answer for so long is taken to be down


class _Workers(Protocol):
    """What a backend knows of its embedding workers."""

    def is_gone(self, reference: BatchReference) -> bool:
        """Whether the worker that held the batch has died, or was started again."""

    def register(self, id_features: bytes | memoryview, original: BatchReference) -> BatchReference:
        """Looks the batch up for training at a worker that lives; returns its reference there."""


class _Held:
    def __init__(self, original: BatchReference, id_features: bytes | memoryview) -> None:
        self.original = self.current = original
        self.id_features = id_features
        self.lock = threading.Lock()  # held while the batch is registered again
        self.keys = [_key(original)]


class HeldBatches:
    """The batches that a rank has looked up for training and not ended. Thread-safe.

    Bounded by those who hold batches: the buffers and staleness permits of a context.
    """

    def __init__(self, workers: _Workers, deadline_s: float) -> None:
        self._workers = workers
        self._deadline_s = deadline_s
        self._batches: dict[tuple[int, int], _Held] = {}  # by each reference; single operations are atomic

    def keep(self, reference: BatchReference, id_features: bytes | memoryview) -> None:
        """The batch can be registered again until `forget`."""
        self._batches[_key(reference)] = _Held(reference, id_features)

    def forget(self, reference: BatchReference) -> BatchReference:
        """The batch has ended; returns its present reference."""
        held = self._batches.get(_key(reference))
        if held is None:
            return reference
        with held.lock:
            for key in held.keys:
                self._batches.pop(key, None)
            return held.current

    def call(self, reference: BatchReference, function: Callable[[BatchReference], T]) -> T:
        """Calls `function` with the present reference of the batch, and again after a worker's death.

        Raises what `function` raises while the worker lives, and when the deadline has passed.
        """
        held = self._batches.get(_key(reference))
        deadline = Deadline(self._deadline_s)
        while True:
            current = reference if held is None else held.current
            try:
                return function(current)
            except (NotFoundError, UnavailableError):
                if held is None or deadline.over or not self._workers.is_gone(current):
                    raise
                self._register_again(held, current)

    def _register_again(self, held: _Held, lost: BatchReference) -> None:
        with held.lock:
            if held.current is not lost:  # by another call, while this one waited
                return
            held.current = self._workers.register(held.id_features, held.original)
            held.keys.append(_key(held.current))
            self._batches[held.keys[-1]] = held


class CallMonitor:
    """Calls `on_slow` now and then while a call takes long, on a thread of its own."""

    def __init__(self, on_slow: Callable[[], None]) -> None:
        self._on_slow = on_slow
        self._numbers = itertools.count()
        self._begins: dict[int, float] = {}  # by number of a call that is under way
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persia-call-monitor", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """For the time of a call."""
        number = next(self._numbers)
        self._begins[number] = time.monotonic()
        try:
            yield
        finally:
            del self._begins[number]

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        self._thread.join(2 * _CONNECT_S)

    def _run(self) -> None:
        while not self._closed.wait(_SLOW_S):
            # A copy in one step: calls begin and end meanwhile.
            if min(tuple(self._begins.values()), default=float("inf")) + _SLOW_S < time.monotonic():
                self._on_slow()


def accepts_connections(address: str) -> bool:
    """Whether a process listens at "host:port". The kernel answers for one that is busy."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
            return True
    except OSError:
        return False


def _key(reference: BatchReference) -> tuple[int, int]:
    return reference.worker_incarnation, reference.reference
