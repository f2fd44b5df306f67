"""The obligation that a looked-up training batch carries, and what happens when nobody meets it.

An embedding worker keeps such a batch, and the staleness bound counts it, until its gradients came back or it
was given up. A lease is settled exactly once, by whoever claims it first: the gradient return, or the release
of a batch that was dropped without `backward`.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from persia import errors
from persia._native import BatchReference
from persia.embedding.backend import EmbeddingBackend
from persia.embedding.counters import Counters
from persia.errors import InternalError, PersiaError
from persia.logger import get_default_logger

__all__ = ["BatchLease", "Releaser", "with_batch_id"]


class BatchLease:
    """One batch's reference at its worker, and its staleness permits."""

    def __init__(self, batch_id: int, reference: BatchReference, release_permit: Callable[[], None]) -> None:
        self.batch_id = batch_id
        self.reference = reference
        self._lock = threading.Lock()  # never taken by a finalizer
        self._permits: list[Callable[[], None]] | None = [release_permit]  # None: settled
        self._on_settled: Callable[[BatchLease], None] = lambda lease: None
        self._claimed = threading.Lock()  # a test-and-set flag, never waited for

    def claim(self) -> bool:
        """True for the first caller, who must see to it that the batch is settled. Safe in finalizers."""
        return self._claimed.acquire(blocking=False)

    def unclaim(self) -> None:
        """For a claimer that could not begin: the batch is up for release again."""
        self._claimed.release()

    @property
    def claimed(self) -> bool:
        return self._claimed.locked()

    def watch(self, owner: object, releaser: Releaser) -> None:
        """Gives the batch up when `owner`, the only object that can lead to a gradient, is dropped."""
        self._on_settled = releaser.track(self)
        finalizer = weakref.finalize(owner, releaser.abandon, self)
        finalizer.atexit = False  # at exit the context has settled everything, or could not

    def hold(self, release_permit: Callable[[], None]) -> None:
        """Calls it when the batch is settled: at once if it is."""
        with self._lock:
            if self._permits is not None:
                self._permits.append(release_permit)
                return
        release_permit()

    def settle(self) -> None:
        """The worker no longer waits for the batch: the staleness bounds may let the next one in."""
        self._on_settled(self)
        with self._lock:
            permits, self._permits = self._permits or [], None
        for release_permit in permits:
            release_permit()


class Releaser:
    """Gives up batches on a thread of its own, so that finalizers may ask for it wherever they run."""

    def __init__(self, backend: EmbeddingBackend, counters: Counters) -> None:
        self._backend = backend
        self._counters = counters
        # SimpleQueue.put is reentrant: a finalizer may interrupt a thread that is inside it. Not bounded, but
        # what can be in it is: batches hold buffer places or permits until they are settled.
        self._queue: queue.SimpleQueue[BatchLease | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # never taken by a finalizer
        self._tracked: set[BatchLease] = set()
        self._thread = threading.Thread(target=self._run, name="persia-release", daemon=True)
        self._thread.start()

    def track(self, lease: BatchLease) -> Callable[[BatchLease], None]:
        """Makes `close` give the lease up unless it is settled before; returns what to call then."""
        with self._lock:
            self._tracked.add(lease)
        return self._untrack

    def abandon(self, lease: BatchLease) -> None:
        """Releases the batch unless its gradient is on its way. Never blocks, never raises."""
        if lease.claim():
            self._queue.put(lease)

    def close(self, deadline_s: float) -> None:
        """Gives up every batch that is still owed a gradient, and waits until it is released. Idempotent."""
        with self._lock:
            tracked = list(self._tracked)
        for lease in tracked:
            self.abandon(lease)
        self._queue.put(None)
        self._thread.join(deadline_s)

    def _untrack(self, lease: BatchLease) -> None:
        with self._lock:
            self._tracked.discard(lease)

    def _run(self) -> None:
        while (lease := self._queue.get()) is not None:
            self._release(lease)

    def _release(self, lease: BatchLease) -> None:
        try:
            self._backend.release(lease.reference)
        except Exception as failure:
            # Nothing is lost that was not given up already: the worker lets the batch expire.
            get_default_logger().warning(
                "batch %d was not released at its worker: %s",
                lease.batch_id,
                failure,
                extra={"batch_id": lease.batch_id},
            )
        self._counters.add(batches_released=1)
        lease.settle()


def with_batch_id(failure: BaseException, what: str, batch_id: int) -> PersiaError:
    """The same class of error, saying which batch it concerns."""
    kind = type(failure) if type(failure).__name__ in errors.__all__ else InternalError
    text = str(failure) if kind is type(failure) else f"{type(failure).__name__}: {failure}"
    error = kind(f"{what} of batch {batch_id}: {text}")
    error.__cause__ = failure
    assert isinstance(error, PersiaError)
    return error
