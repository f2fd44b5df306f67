"""A staleness bound: how many training batches may be between their lookup and the end of their update."""

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
    """Hands out at most `limit` permits at a time; without a limit it only counts. Thread-safe.

    `counters`: where batches in flight are counted, by the gate that lets them in.
    `on_demand`: a permit is also not handed out before the loop asks for a batch, so that nothing is looked
    up before the step that comes first is done.
    """

    def __init__(self, limit: int | None, counters: Counters | None, *, on_demand: bool = False) -> None:
        self.limit = limit
        self._on_demand = on_demand
        self._demanded = False
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
            self._changed.wait_for(lambda: self._closed or self._has_room())
            if self._closed:
                raise QueueClosed
            self._demanded = False
            self._in_flight += 1
        self._count(+1)
        return Permit(self)

    def demand(self) -> None:
        """The loop asks for its next batch."""
        if self._on_demand:
            with self._changed:
                self._demanded = True
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting; permits handed out stay valid."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        in_turn = self._demanded or not self._on_demand
        return in_turn and (self.limit is None or self._in_flight < self.limit)

    def _put_back(self) -> None:
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()
        self._count(-1)

    def _count(self, change: int) -> None:
        if self._counters is not None:
            self._counters.flight(change)
