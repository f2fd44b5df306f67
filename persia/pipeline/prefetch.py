"""Stage 3, ahead of the loop: takes batches from the source and starts their lookups in its order.

In: `PendingBatch`es of a `BatchSource`. Out: `PersiaTrainingBatch`es, to the loop that calls `next`.
One feeder thread takes batches from the source, and for each a staleness permit, in the source's order;
lookup threads work in parallel; the loop gets the results in the order of the source. The order of the
permits makes the bound free of deadlocks: the batch that the loop waits for has its permit before any later
one. Slots with a tighter bound pass through a `DeferredStage` of their own before the loop gets the batch.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from persia.errors import DeadlineExceededError
from persia.logger import get_default_logger
from persia.observability.phases import QUEUE_OF_READY
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.lookup import BatchLease, LookupService
from persia.pipeline.queues import BoundedQueue, Deadline, QueueClosed
from persia.pipeline.source import BatchSource, PendingBatch
from persia.pipeline.staleness import LookAhead, LookupStage, StalenessGate


class Prefetcher:
    """At most `forward_buffer_size` batches are looked up, or being looked up, ahead of the loop."""

    def __init__(
        self,
        source: BatchSource,
        service: LookupService,
        gate: StalenessGate,
        deferred: Sequence[tuple[LookupStage, StalenessGate]] = (),
        *,
        forward_buffer_size: int,
        num_workers: int,
        late: bool = False,
    ) -> None:
        """Begins to look up.

        Args:
            deferred: the stages after the service's first lookup of a batch, the loosest first.
            late: lookups begin as late as the loop permits, see `LookAhead`. Not with deferred stages: the
                time of their lookups has the wait for a permit in it.
        """
        self._source = source
        self._service = service
        self._gate = gate
        self._look_ahead = LookAhead(forward_buffer_size) if late else None
        self._returned_ns = 0  # when `next` last returned a batch
        self._ready: BoundedQueue[_Lookup] = BoundedQueue(forward_buffer_size)  # to `next`
        self._work: _Work = BoundedQueue(forward_buffer_size)  # to the lookup threads, `_serve`
        self._deferred = [
            # One more than `_ready` holds: the feeder puts a batch here first, and must not wait here for a
            # loop that waits for `_ready`.
            DeferredStage(stage, stage_gate, self._work, forward_buffer_size + 1)
            for stage, stage_gate in deferred
        ]
        # A loop that holds on to as many batches as the tightest gate has permits would wait for itself.
        limits = [limited.limit for limited in (gate, *(stage.gate for stage in self._deferred))]
        self._limit = min((limit for limit in limits if limit is not None), default=None)
        self._source_failure: BaseException | None = None
        self._yielded: list[BatchLease] = []
        self._warned_of_skipping = False
        self._threads = [threading.Thread(target=self._feed, name="persia-feeder", daemon=True)]
        self._threads += [
            threading.Thread(target=self._serve, name=f"persia-lookup-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def _feed(self) -> None:
        try:
            while (pending := self._source.take()) is not None:
                self._feed_one(pending)
        except QueueClosed:
            pass
        except BaseException as failure:  # raised in the loop, which must not wait for more
            self._source_failure = failure
        self._ready.close()
        for stage in self._deferred:
            stage.finish()
        self._work.close()

    def _feed_one(self, pending: PendingBatch) -> None:
        lookup = _Lookup(pending)
        try:
            if self._service.training and pending.requires_grad:
                lookup.release_permit = self._gate.acquire()  # called by BatchLease.release
            for stage in self._deferred:
                lookup.complete = stage.put(lookup.complete)
            # Before `_work`: a place in `_ready` is what bounds the lookups ahead of the loop.
            self._ready.put(lookup)
            self._work.put(lookup)
        except QueueClosed:
            lookup.give_up(self._service)
            raise

    def _serve(self) -> None:
        for work in self._work:
            work.run(self._service)
            del work  # see DeferredStage._run

    def next(self, timeout_s: float) -> PersiaTrainingBatch | None:
        """The next batch, for the loop; None at the end. Raises what went wrong with it or before it."""
        asked_ns = time.monotonic_ns()
        self._give_up_held_batches()
        # After giving up: the permit of a batch that was held may be the one that this demand needs.
        self._gate.demand()
        deadline = Deadline(timeout_s)
        try:
            lookup = self._ready.get(deadline.left_s())
        except QueueClosed:
            if self._source_failure is not None:
                raise self._source_failure from None
            return None
        except DeadlineExceededError as failure:
            raise DeadlineExceededError(
                f"no batch became ready within {timeout_s:g} s (timeout_ms)"
            ) from failure
        try:
            batch = lookup.complete.result(deadline.left_s())
        except FutureTimeoutError as failure:
            if lookup.complete.done():  # the lookup's own error is a time-out
                raise
            raise DeadlineExceededError(
                f"the lookup of batch {lookup.pending.batch_id} was not done in {timeout_s:g} s (timeout_ms)"
            ) from failure
        now_ns = time.monotonic_ns()
        if batch.lease is not None:
            self._yielded.append(batch.lease)
            QUEUE_OF_READY.record(batch.ready_ns, now_ns, batch.lease.reference.reference, batch.batch_id)
        if self._look_ahead is not None and self._returned_ns:
            step_s = (asked_ns - self._returned_ns) / 1e9
            self._ready.set_capacity(self._look_ahead.took((batch.ready_ns - lookup.begun_ns) / 1e9, step_s))
        self._returned_ns = now_ns
        # After `_yielded`: who reads the position finds a batch there that the loop is not done with.
        self._source.yielded(batch.batch_id)
        return batch

    def held(self, source: BatchSource) -> list[int]:
        """The batch_ids of `source` that the loop has got, and neither trained nor dropped."""
        if source is not self._source:  # it has batch_ids of its own
            return []
        return [lease.batch_id for lease in list(self._yielded) if not lease.acquired]

    @property
    def num_ahead(self) -> int:
        """Batches looked up, or being looked up, that the loop has not taken."""
        return len(self._ready)

    def fail(self, failure: BaseException) -> None:
        """Training cannot continue: `next` raises `failure`, also when it is waiting."""
        self._ready.fail(failure)

    def close(self, deadline_s: float) -> None:
        """Stops the threads and gives up every batch that the loop did not get. Idempotent."""
        deadline = Deadline(deadline_s)
        # In the order of the stages, so that each thread is woken from the wait it may be in: the source,
        # gates, then queues. What was queued is given up where it is drained.
        for pending in self._source.stop():
            self._service.give_up(pending)
        self._gate.close()
        for stage in self._deferred:
            stage.close()
        for work in self._work.drain():
            work.give_up(self._service)
        for lookup in self._ready.drain():
            self._dispose(lookup, deadline)
        for thread in self._threads:
            thread.join(deadline.left_s())
        self._source.close()
        if any(thread.is_alive() for thread in self._threads):
            get_default_logger().warning("lookups did not end within %g s, left behind", deadline_s)

    def _dispose(self, lookup: _Lookup, deadline: Deadline) -> None:
        if lookup.give_up(self._service):
            return
        try:
            batch = lookup.future.result(deadline.left_s())
        except (Exception, CancelledError):
            return  # counted when it failed or was given up
        if batch.lease is not None:
            self._service.reaper.reap(batch.lease)

    def _give_up_held_batches(self) -> None:
        """A script that skips batches and holds on to them would wait for its own permits."""
        self._yielded = [lease for lease in self._yielded if not lease.acquired]
        while self._limit is not None and len(self._yielded) >= self._limit:
            lease = self._yielded.pop(0)
            self._service.reaper.reap(lease)
            if not self._warned_of_skipping:
                self._warned_of_skipping = True
                get_default_logger().warning(
                    "batch %d had no backward when the next one was asked for, with embedding_staleness=%d: "
                    "its embeddings are not updated (further batches are counted in batches_released only)",
                    lease.batch_id,
                    self._limit,
                    extra={"batch_id": lease.batch_id},
                )


class _Lookup:
    """The first lookup of a batch."""

    def __init__(self, pending: PendingBatch) -> None:
        self.pending = pending
        self.release_permit: Callable[[], None] = lambda: None  # a batch without gradient takes no permit
        self.future: Future[PersiaTrainingBatch] = Future()  # the result of the first lookup
        self.complete = self.future  # what the loop gets, with the slots of deferred stages
        self.begun_ns = 0  # `time.monotonic_ns()`
        self._begun = threading.Lock()  # a test-and-set flag

    def run(self, service: LookupService) -> None:
        if not self._begun.acquire(blocking=False):
            return
        self.begun_ns = time.monotonic_ns()
        try:
            # Taken by `DeferredStage._feed`, or by `Prefetcher.next`.
            self.future.set_result(service.look_up(self.pending, self.release_permit))
        except Exception as failure:
            # The loop raises it, too, if it gets this far.
            get_default_logger().error("%s", failure, extra={"batch_id": self.pending.batch_id})
            self.future.set_exception(failure)

    def give_up(self, service: LookupService) -> bool:
        if not self._begun.acquire(blocking=False):
            return False
        service.give_up(self.pending, self.release_permit)
        self.future.cancel()
        return True


@dataclasses.dataclass(frozen=True, eq=False)
class _DeferredLookup:
    """The lookup of a deferred stage."""

    stage: LookupStage
    before: Future[PersiaTrainingBatch]  # the batch with the slots of the preceding stages
    future: Future[PersiaTrainingBatch] = dataclasses.field(default_factory=Future)

    def run(self, service: LookupService) -> None:
        batch = self.before.result()  # done: DeferredStage has waited for it
        try:
            service.look_up_stage(batch, self.stage)
        except Exception as failure:
            get_default_logger().error("%s", failure, extra={"batch_id": batch.batch_id})
            # Not left to the batch's finalizer: the failure, which this future keeps, keeps the batch.
            if batch.lease is not None:
                service.reaper.reap(batch.lease)
            self.future.set_exception(failure)
        else:
            self.future.set_result(batch)

    def give_up(self, service: LookupService) -> bool:
        return self.future.cancel()


# To the lookup threads. `run` looks up, and keeps errors for the loop; `give_up` takes the place of `run`,
# and returns False when that has begun.
_Work = BoundedQueue[_Lookup | _DeferredLookup]


class DeferredStage:
    """Takes batches in the order of the source, waits for a permit for each, and queues its lookup.

    The order makes several bounds free of deadlocks, as it does one: the batch that the loop waits for has
    its permit before any later one. The permit is given back when the batch's lease is released.
    """

    def __init__(self, stage: LookupStage, gate: StalenessGate, work: _Work, capacity: int) -> None:
        self.gate = gate
        self._stage = stage
        self._work = work
        self._queue: BoundedQueue[_DeferredLookup] = BoundedQueue(capacity)
        self._thread = threading.Thread(target=self._run, name=f"persia-stage-{gate.limit}", daemon=True)
        self._thread.start()

    def put(self, before: Future[PersiaTrainingBatch]) -> Future[PersiaTrainingBatch]:
        """Returns the batch with this stage's slots. Raises QueueClosed after `close`."""
        lookup = _DeferredLookup(self._stage, before)
        self._queue.put(lookup)
        return lookup.future

    def finish(self) -> None:
        """No more batches follow: returns when the lookups of all are queued."""
        self._queue.close()
        self._thread.join()

    def close(self) -> None:
        """Ends all waiting; batches that have no permit yet are cancelled."""
        self.gate.close()
        for lookup in self._queue.drain():
            lookup.future.cancel()

    def _run(self) -> None:
        for lookup in self._queue:
            self._feed(lookup)
            # It holds its batch. While this waits for the next one, the script may drop the batch, which only
            # the end of the last reference shows.
            del lookup

    def _feed(self, lookup: _DeferredLookup) -> None:
        try:
            lease = lookup.before.result().lease  # lookups end by their deadline, or are cancelled
            if lease is None:  # no training batch: it has all its slots
                lookup.future.set_result(lookup.before.result())
                return
            lease.add_permit(self.gate.acquire())
            self._work.put(lookup)
        except (QueueClosed, CancelledError):
            lookup.future.cancel()
        except Exception as failure:  # of the preceding stage
            lookup.future.set_exception(failure)
