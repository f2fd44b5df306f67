"""The lease of a looked-up training batch: its embedding worker keeps the batch until the lease is released.

Made at the end of stage 3 (`lookup.py`), released at the end of stage 5 (`gradients.py`). The batch counts
against the staleness bounds until then. The first to acquire the lease releases it: the gradient sender, when
the gradients are applied, or the reaper, for a batch that was dropped without `backward`.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from persia import errors
from persia._native import BatchReference
from persia.errors import InternalError, PersiaError
from persia.logger import get_default_logger
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.counters import Counters

__all__ = ["BatchLease", "LeaseReaper", "with_batch_id"]


class BatchLease:
    """One batch's reference at its worker, and its staleness permits."""

    def __init__(
        self, batch_id: int, reference: BatchReference, release_permit: Callable[[], None] = lambda: None
    ) -> None:
        self.batch_id = batch_id
        self.reference = reference
        self._lock = threading.Lock()  # never taken by a finalizer
        self._permits: list[Callable[[], None]] | None = [release_permit]  # None: released
        self._reaper: LeaseReaper | None = None  # set while its `close` would reap this lease
        # A lock and not a bool: finalizers run on any thread at any point, also inside a lock of this class,
        # and `acquire(blocking=False)` is atomic without waiting.
        self._acquired = threading.Lock()  # a test-and-set flag, never waited for

    def acquire(self) -> bool:
        """True for the first caller, who must see to it that the lease is released. Safe in finalizers."""
        return self._acquired.acquire(blocking=False)

    def give_back(self) -> None:
        """Undoes `acquire`, for a caller that could not begin: the lease can be acquired again."""
        self._acquired.release()

    @property
    def acquired(self) -> bool:
        return self._acquired.locked()

    def watch(self, owner: object, reaper: LeaseReaper) -> None:
        """Reaps the lease when `owner`, the only object that can lead to a gradient, is dropped."""
        self._reaper = reaper
        reaper.track(self)
        finalizer = weakref.finalize(owner, reaper.reap, self)
        finalizer.atexit = False  # at exit the context has released everything, or could not

    def add_permit(self, release_permit: Callable[[], None]) -> None:
        """Calls `release_permit` when the lease is released: at once if it is."""
        with self._lock:
            if self._permits is not None:
                self._permits.append(release_permit)
                return
        release_permit()

    def release(self) -> None:
        """The worker no longer waits for the batch: the staleness bounds may let the next one in."""
        if self._reaper is not None:
            self._reaper.untrack(self)
        with self._lock:
            # None marks the lease as released. A stage that gets its permit later gives it back at once, or
            # it would be lost and the gate would hand out one less for the rest of the job.
            permits, self._permits = self._permits or [], None
        for release_permit in permits:
            release_permit()


class LeaseReaper:
    """Gives up batches on a thread of its own, so that finalizers may ask for it wherever they run."""

    def __init__(self, backend: EmbeddingBackend, counters: Counters) -> None:
        self._backend = backend
        self._counters = counters
        # SimpleQueue.put is reentrant: a finalizer may interrupt a thread that is inside it. It is not
        # bounded, but its items are: batches hold buffer places or permits until they are released.
        self._queue: queue.SimpleQueue[BatchLease | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # never taken by a finalizer
        self._tracked: set[BatchLease] = set()
        self._thread = threading.Thread(target=self._run, name="persia-reaper", daemon=True)
        self._thread.start()

    def track(self, lease: BatchLease) -> None:
        """Makes `close` reap the lease, until `untrack`."""
        with self._lock:
            self._tracked.add(lease)

    def untrack(self, lease: BatchLease) -> None:
        """Called when the lease is released."""
        with self._lock:
            self._tracked.discard(lease)

    def reap(self, lease: BatchLease) -> None:
        """Releases the batch unless its gradient is being sent. Never blocks, never raises."""
        if lease.acquire():
            self._queue.put(lease)  # taken up by _run, on the reaper's thread

    def close(self, deadline_s: float) -> None:
        """Reaps every batch that is still owed a gradient, and waits until it is released. Idempotent."""
        with self._lock:
            tracked = list(self._tracked)
        # Reaping untracks leases on another thread, so this loop is over a copy.
        for lease in tracked:
            self.reap(lease)
        # Behind all leases: the thread ends when it has released them.
        self._queue.put(None)
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while (lease := self._queue.get()) is not None:
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
            # Counted first: a thread that waits for the permit may read the counts right after.
            self._counters.add(batches_released=1)
            lease.release()


def with_batch_id(failure: BaseException, what: str, batch_id: int) -> PersiaError:
    """The same class of error, saying which batch it concerns."""
    # Only classes of persia.errors take a message alone; a class of a script may have another constructor.
    kind = type(failure) if type(failure).__name__ in errors.__all__ else InternalError
    text = str(failure) if kind is type(failure) else f"{type(failure).__name__}: {failure}"
    error = kind(f"{what} of batch {batch_id}: {text}")
    error.__cause__ = failure
    assert isinstance(error, PersiaError)
    return error
