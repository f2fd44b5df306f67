"""Where a rank keeps the batches that loaders announced, until they are looked up.

Bounded per loader, so that in reproducible mode a fast loader cannot fill the buffer while the rank waits for
a batch of a slow one. The bookkeeping is `StreamOrder`'s; this adds the buffer, the lock and the waiting.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import deque
from typing import NamedTuple

from persia.data.order import Arrival, StreamOrder
from persia.embedding.bounded_queue import QueueClosed
from persia.errors import DeadlineExceededError, PersiaError, StreamClosedError, UnavailableError
from persia.messaging.payloads import BatchAnnouncement, EndOfStream
from persia.observability.phases import QUEUE_OF_ANNOUNCED

__all__ = ["Inbox", "Offer"]


class Offer(enum.Enum):
    """What became of an announcement."""

    QUEUED = "queued"
    FULL = "full"
    REPEATED = "repeated"  # the same announcement again: its first reply got lost
    SUPERSEDED = "superseded"  # a batch received before, registered anew by a loader that was started again


class _Queued(NamedTuple):
    number: int  # in the order of arrival
    since_ns: int
    batch: BatchAnnouncement


class Inbox:
    """Thread-safe. `capacity` batches per loader; `ordered`: taken by batch_id, else by arrival."""

    def __init__(self, rank: int, world_size: int, capacity: int, *, ordered: bool) -> None:
        self._order = StreamOrder(rank, world_size)
        self._capacity = capacity
        self._ordered = ordered
        self._queues: dict[int, deque[_Queued]] = {}
        self._last: dict[int, BatchAnnouncement] = {}
        self._last_heard: dict[int, float] = {}
        self._num_arrived = 0
        self._failure: PersiaError | None = None
        self._num_before_failure = 0
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, batch: BatchAnnouncement, *, hold_s: float) -> Offer:
        """Queues the batch, waiting up to `hold_s` for room: a late reply slows a fast loader down."""
        with self._changed:
            self._hear(batch.loader_index, batch.loader_replicas)
            if self._order.arrival(batch.batch_id, batch.loader_index) is Arrival.REPEATED:
                return (
                    Offer.REPEATED
                    if _same_reference(batch, self._last[batch.loader_index])
                    else Offer.SUPERSEDED
                )
            queue = self._queues.setdefault(batch.loader_index, deque())
            if not self._changed.wait_for(lambda: self._closed or len(queue) < self._capacity, hold_s):
                return Offer.FULL
            self._refuse_when_closed()
            # Judged again: while this call waited, a repetition of the announcement may have been queued.
            if self._order.arrival(batch.batch_id, batch.loader_index) is Arrival.REPEATED:
                return Offer.REPEATED
            queue.append(_Queued(self._num_arrived, time.monotonic_ns(), batch))
            self._num_arrived += 1
            self._last[batch.loader_index] = batch
            self._order.announced(batch.loader_index)
            self._changed.notify_all()
            return Offer.QUEUED

    def end(self, message: EndOfStream) -> None:
        """A loader has sent all it will, or failed."""
        with self._changed:
            self._hear(message.loader_index, message.loader_replicas)
            if message.error is None:
                self._order.end(message.loader_index, message.num_batches)
            else:
                self._fail(
                    UnavailableError(
                        f"data loader {message.loader_index} ended with an error "
                        f"after {message.num_batches} batches: {message.error}"
                    )
                )
            self._changed.notify_all()

    def fail(self, failure: PersiaError) -> None:
        """The stream will not end by itself: `take` raises `failure` after the batches that came before."""
        with self._changed:
            self._fail(failure)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> BatchAnnouncement | None:
        """The next batch, or None at the end of the stream.

        Raises DeadlineExceededError when none came in time, the failure of a loader once the batches that
        came before it are taken, and QueueClosed after `close`.
        """
        with self._changed:
            if not self._changed.wait_for(self._can_take, timeout_s):
                raise DeadlineExceededError(f"no batch arrived within {timeout_s:g} s")
            if self._closed:
                raise QueueClosed
            loader = self._next_loader()
            if loader is not None and not self._came_after_failure(loader):
                self._order.taken(loader)
                self._changed.notify_all()
                return _out_of_queue(self._queues[loader].popleft())
            if not self._order.finished and self._failure is not None:
                raise self._failure
            return None

    def silent_loaders(self, silence_s: float) -> list[int]:
        """Loaders that owe something and were not heard of, or checked, for `silence_s`."""
        horizon = time.monotonic() - silence_s
        with self._changed:
            return [
                i for i in self._order.unfinished_loaders() if self._last_heard.get(i, -math.inf) <= horizon
            ]

    def heard(self, loader_index: int) -> None:
        """The loader showed otherwise that it is alive."""
        with self._changed:
            self._last_heard[loader_index] = time.monotonic()

    @property
    def num_loaders(self) -> int | None:
        """None until the first loader was heard of."""
        return self._order.num_loaders

    def has_heard(self, loader_index: int) -> bool:
        """Whether the loader ever sent anything, or answered."""
        return loader_index in self._last_heard

    def close(self) -> list[BatchAnnouncement]:
        """Refuses everything from now on; returns what nobody took."""
        with self._changed:
            self._closed = True
            left = [queued.batch for queue in self._queues.values() for queued in queue]
            self._queues.clear()
            self._changed.notify_all()
            return left

    def _fail(self, failure: PersiaError) -> None:
        if self._failure is None:
            self._failure, self._num_before_failure = failure, self._num_arrived

    def _hear(self, loader_index: int, num_loaders: int) -> None:
        self._refuse_when_closed()
        self._order.introduce(loader_index, num_loaders)
        self._last_heard[loader_index] = time.monotonic()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise StreamClosedError("this NN worker has stopped taking batches: its training loop has ended")

    def _can_take(self) -> bool:
        stopped = self._closed or self._failure is not None or self._order.finished
        return stopped or self._next_loader() is not None

    def _came_after_failure(self, loader: int) -> bool:
        """Other loaders may go on for long, and would hide the failure."""
        return self._failure is not None and self._queues[loader][0].number >= self._num_before_failure

    def _next_loader(self) -> int | None:
        """The loader whose oldest queued batch is to be taken, if that batch is here."""
        if self._ordered:
            loader = self._order.next_loader()
            return loader if loader is not None and self._queues.get(loader) else None
        arrivals = [(queue[0].number, loader) for loader, queue in self._queues.items() if queue]
        return min(arrivals)[1] if arrivals else None


def _out_of_queue(queued: _Queued) -> BatchAnnouncement:
    batch = queued.batch
    if batch.requires_grad:
        QUEUE_OF_ANNOUNCED.record(queued.since_ns, time.monotonic_ns(), batch.reference, batch.batch_id)
    return batch


def _same_reference(one: BatchAnnouncement, other: BatchAnnouncement) -> bool:
    def key(batch: BatchAnnouncement) -> tuple[int, int, int]:
        return batch.worker_index, batch.worker_incarnation, batch.reference

    return key(one) == key(other)
