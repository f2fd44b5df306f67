"""Stage 3, on a lookup thread: a batch is looked up.

In: a `PendingBatch` of the feeder (`prefetch.py`). Out: a `PersiaTrainingBatch` whose lease is watched, so
that it is released whatever becomes of the batch. A batch whose slots have several bounds takes one lookup
for each; an ordinary batch takes one.

The lease is released at the end of stage 5 (`gradients.py`). Until then the embedding worker keeps the batch,
and it counts against the staleness bounds. The first to acquire the lease releases it: the gradient sender,
when the gradients are applied, or the reaper, for a batch that was dropped without `backward`.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from persia import errors
from persia._native import BatchReference, LookupResult, TracedBatch
from persia.embedding.dense_codec import decode_dense
from persia.errors import DeadlineExceededError, InternalError, PersiaError
from persia.logger import get_default_logger
from persia.observability.phases import FORWARD_ERRORS, NO_BATCH
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.counters import Counters
from persia.pipeline.dense_ids import DenseIdReader
from persia.pipeline.device_batch import Lane
from persia.pipeline.exact import ExactCalls, check_batch
from persia.pipeline.source import PendingBatch
from persia.pipeline.staleness import ALL_SLOTS, LookupStage


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
        self._queue: queue.SimpleQueue[BatchLease | threading.Event | None] = queue.SimpleQueue()
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

    def wait(self, deadline_s: float) -> None:
        """Returns once every batch that was given up so far is released. DeadlineExceededError."""
        reached = threading.Event()
        self._queue.put(reached)
        if self._thread.is_alive() and not reached.wait(deadline_s):
            raise DeadlineExceededError(f"batches given up were not released within {deadline_s:g} s")

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
            if isinstance(lease, threading.Event):
                lease.set()
                continue
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


def slots_in_step(stages: Sequence[LookupStage]) -> int | None:
    """The slots of a synchronous stage beside others: they are looked up in the batch's training step."""
    last = stages[-1]
    return last.slots if len(stages) > 1 and last.mode.synchronous else None


def deferred_stages(stages: Sequence[LookupStage]) -> list[LookupStage]:
    """The stages between the first lookup of a batch and its training step."""
    return [stage for stage in stages[1:] if not stage.mode.synchronous]


def first_slots(stages: Sequence[LookupStage], *, ahead: bool) -> int:
    """The slots of a batch's first lookup. No bound holds unless it is `ahead` of the loop."""
    if ahead:
        # The other stages wait for permits of their own, on the threads of the prefetcher.
        return stages[0].slots
    together = 0
    # A batch that is looked up on demand is not ahead of any update, so stages with bounds need no permits
    # and can share one call.
    for stage in stages if slots_in_step(stages) is None else stages[:-1]:
        together |= stage.slots
    return together


@dataclasses.dataclass(frozen=True)
class LookupService:
    """Looks up the batches of one context, and gives up those that will not be used."""

    backend: EmbeddingBackend
    reaper: LeaseReaper
    counters: Counters
    device: torch.device | None
    training: bool
    first: int = ALL_SLOTS  # of a training batch's first lookup
    in_step: int | None = None  # of the lookup in its training step
    lane: Lane | None = None  # to the device; None: batches stay on the host
    served: int = ALL_SLOTS  # those on servers, of an evaluation's lookup
    dense_ids: DenseIdReader | None = None  # of slots in the dense model
    exact: ExactCalls | None = None  # of an exact context
    ahead: bool = False  # of the loop, which the batches are for

    @property
    def _form(self) -> dict[str, Any]:
        # Without a device, backends of scripts may have lookups that do not know the argument.
        return {} if self.lane is None else {"as_rows": True}

    def look_up(self, pending: PendingBatch, release_permit: Callable[[], None]) -> PersiaTrainingBatch:
        """Ends by the backend's deadline; on an error the permit is released, the error names the batch."""
        requires_grad = self.training and pending.requires_grad
        # Evaluations see all slots as they are now: modes bound the distance to updates, and they make none.
        slots = self.first if requires_grad else self.served
        try:
            if self.exact is not None:
                check_batch(requires_grad, self.ahead, self.device)
            dense = decode_dense(pending.dense)
            dense_ids = {} if self.dense_ids is None else self.dense_ids.read(pending.id_features)
            # The native client tags its spans with this thread-local number, which connects them to those of
            # Python.
            with TracedBatch(pending.batch_id if requires_grad else NO_BATCH):
                if self.exact is not None and requires_grad:
                    result = self.exact.look_up(pending.reference, pending.id_features)
                elif pending.reference is not None:
                    result = self.backend.lookup(
                        pending.reference,
                        requires_grad=requires_grad,
                        slots=slots,
                        id_features=pending.id_features,
                        **self._form,
                    )
                else:
                    result = self.backend.lookup_direct(
                        bytes(pending.id_features),
                        requires_grad=requires_grad,
                        slots=slots,
                        **self._form,
                    )
        except Exception as failure:
            self.counters.add(batches_failed=1)
            FORWARD_ERRORS.add()
            release_permit()
            raise with_batch_id(failure, "the lookup", pending.batch_id) from failure
        lease = BatchLease(pending.batch_id, result.reference, release_permit) if requires_grad else None
        batch = PersiaTrainingBatch(pending.batch_id, requires_grad, self.device, dense, result, lease)
        batch.dense_ids = dense_ids
        if self.lane is not None:
            self._send(batch, self.lane, release_permit)
        batch.ready_ns = time.monotonic_ns()
        if lease is None:
            self.counters.add(batches_evaluated=1)
            return batch
        if self.exact is not None:
            batch.find_synchronous = partial(self.exact.pool, result.reference)
        elif self.in_step is not None:
            batch.find_synchronous = partial(
                self._look_up_more,
                pending.batch_id,
                result.reference,
                self.in_step,
                "the lookup of the synchronous slots",
            )
        # Last: from here on dropping `batch` releases the lease, and nothing above can fail after it.
        lease.watch(batch, self.reaper)
        return batch

    def _send(self, batch: PersiaTrainingBatch, lane: Lane, release_permit: Callable[[], None]) -> None:
        try:
            batch.send(lane)
        except Exception as failure:
            FORWARD_ERRORS.add()
            if batch.lease is None:
                self.counters.add(batches_failed=1)
                release_permit()
            else:
                self.reaper.reap(batch.lease)  # the worker holds it; counted as released
            raise with_batch_id(failure, "the copy to the device", batch.batch_id) from failure

    def look_up_stage(self, batch: PersiaTrainingBatch, stage: LookupStage) -> None:
        """Adds the slots of a deferred stage.

        Ends by the backend's deadline; an error names the batch, which is still to be given up then.
        """
        what = f"the lookup of the slots with embedding_staleness={stage.mode.bound}"
        batch.add_lookup(self._look_up_more(batch.batch_id, batch.result.reference, stage.slots, what))
        batch.ready_ns = time.monotonic_ns()

    def _look_up_more(self, batch_id: int, reference: BatchReference, slots: int, what: str) -> LookupResult:
        try:
            with TracedBatch(batch_id):
                return self.backend.lookup(reference, requires_grad=True, slots=slots, **self._form)
        except Exception as failure:
            FORWARD_ERRORS.add()
            raise with_batch_id(failure, what, batch_id) from failure

    def give_up(self, pending: PendingBatch, release_permit: Callable[[], None] = lambda: None) -> None:
        """Releases a batch that was not looked up at its worker."""
        if pending.reference is not None:
            # The permit is given back by the reaper, after the worker has released the batch: until then it
            # still occupies a place in the worker's buffer.
            self.reaper.reap(BatchLease(pending.batch_id, pending.reference, release_permit))
        else:
            self.counters.add(batches_released=1)
            release_permit()
