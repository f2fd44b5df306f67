"""The staleness bound: how many training batches may be between their lookup and the end of their update."""

from __future__ import annotations

import threading

from persia.embedding.bounded_queue import QueueClosed
from persia.embedding.counters import Counters

__all__ = ["Permit", "StalenessGate"]


class Permit:
    """One batch's place in the bound. Released once; releasing again does nothing."""

    def __init__(self, gate: StalenessGate) -> None:
        self._gate: StalenessGate | None = gate
        self._lock = threading.Lock()

    def release(self) -> None:
        with self._lock:
            gate, self._gate = self._gate, None
        if gate is not None:
            gate._put_back()


class StalenessGate:
    """Hands out at most `limit` permits at a time; without a limit it only counts. Thread-safe."""

    def __init__(self, limit: int | None, counters: Counters) -> None:
        self.limit = limit
        self._counters = counters
        self._in_flight = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def acquire(self) -> Permit:
        """Waits for a permit; raises QueueClosed when the gate is closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.limit is None or self._in_flight < self.limit)
            if self._closed:
                raise QueueClosed
            self._in_flight += 1
        self._counters.flight(+1)
        return Permit(self)

    def close(self) -> None:
        """Ends all waiting; permits handed out stay valid."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put_back(self) -> None:
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()
        self._counters.flight(-1)
