"""The queue between two stages, and the deadline of a wait."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from persia.errors import DeadlineExceededError

T = TypeVar("T")


class Deadline:
    """A point in time, `seconds` from now. Several waits in a row share one, so that they cannot add up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return self.left_s() == 0.0


class QueueClosed(Exception):  # noqa: N818 (a signal, like StopIteration)
    """The queue was closed: `put` at once, `get` after the last item."""


class BoundedQueue(Generic[T]):
    """First in, first out; `put` waits while `capacity` items are queued. Thread-safe.

    It can be closed and can carry a failure. `queue.Queue` cannot wake a blocked producer or consumer when
    the other side has ended, which turns an error in one thread into a hang of another.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        # By key, not a count: a cancel that comes twice, or after the item, must not give room away that
        # another has.
        self._reserved: set[object] = set()
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def set_capacity(self, capacity: int) -> None:
        """Of later items: those queued stay, also beyond it."""
        with self._changed:
            self._capacity = capacity
            self._changed.notify_all()

    def put(self, item: T) -> None:
        """Waits for room. Raises QueueClosed when the queue is closed or failed."""
        with self._changed:
            self._wait_for_room()
            self._items.append(item)
            self._changed.notify_all()

    def reserve(self, key: object) -> None:
        """Waits for room, and keeps it until `put_reserved` or `cancel`. Raises QueueClosed like `put`."""
        with self._changed:
            self._wait_for_room()
            self._reserved.add(key)

    def put_reserved(self, key: object, item: T) -> None:
        """`put`, without a wait."""
        with self._changed:
            self._reserved.discard(key)
            if self._closed:
                raise QueueClosed
            self._items.append(item)
            self._changed.notify_all()

    def cancel(self, key: object) -> None:
        """Gives the room of a `reserve` back, if there was one."""
        with self._changed:
            self._reserved.discard(key)
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        self._changed.wait_for(
            lambda: self._closed or len(self._items) + len(self._reserved) < self._capacity
        )
        if self._closed:
            raise QueueClosed

    def get(self, timeout_s: float | None = None) -> T:
        """The oldest item. After `fail` raises that failure at once, after `close` QueueClosed once empty."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items or self._closed, timeout_s):
                raise DeadlineExceededError(f"nothing arrived within {timeout_s} s")
            # Before the items: training has failed, and batches looked up for it are of no use.
            if self._failure is not None:
                raise self._failure
            if not self._items:
                raise QueueClosed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def __iter__(self) -> Iterator[T]:
        """Items until the queue is closed and empty, for the threads that serve it."""
        with contextlib.suppress(QueueClosed):
            while True:
                yield self.get()

    def close(self) -> None:
        """Accepts no more items; those queued can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Closes, and makes every `get` raise the first failure given."""
        with self._changed:
            # The first one is the cause; later ones are often its consequences.
            self._failure = self._failure or failure
            self._closed = True
            self._changed.notify_all()

    def drain(self) -> list[T]:
        """Closes and takes the queued items, for the owner to dispose of."""
        with self._changed:
            self._closed = True
            items = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return items
