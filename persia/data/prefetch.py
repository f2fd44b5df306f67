"""Looks batches up ahead of the training loop, in order.

One feeder thread takes batches from the source, and for each the staleness permit, in the source's order;
worker threads look up in parallel; the loop gets the results in the order of the source. Taking permits in
that order is what makes the bound free of deadlocks: the batch the loop waits for always has its permit
before any later one. Slots with a tighter bound pass by a `LaterStage` of their own before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from persia.data.later_stage import LaterStage, Work
from persia.data.lookup_service import LookupService
from persia.data.source import BatchSource, PendingBatch
from persia.data.staleness import StalenessGate
from persia.data.training_batch import PersiaTrainingBatch
from persia.embedding.bounded_queue import BoundedQueue, QueueClosed
from persia.embedding.consistency import Stage
from persia.embedding.deadline import Deadline
from persia.embedding.lease import BatchLease
from persia.errors import DeadlineExceededError
from persia.logger import get_default_logger
from persia.observability.phases import QUEUE_OF_READY

__all__ = ["Prefetcher"]


class _Lookup:
    def __init__(self, pending: PendingBatch, release_permit: Callable[[], None]) -> None:
        self.pending = pending
        self.release_permit = release_permit
        self.future: Future[PersiaTrainingBatch] = Future()  # what the first lookup has found
        self.complete = self.future  # what the loop gets, with the slots of later stages
        self._claimed = threading.Lock()  # a test-and-set flag

    def run(self, service: LookupService) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        try:
            self.future.set_result(service.look_up(self.pending, self.release_permit))
        except Exception as failure:
            # The loop raises it, too, if it gets this far.
            get_default_logger().error("%s", failure, extra={"batch_id": self.pending.batch_id})
            self.future.set_exception(failure)

    def give_up(self, service: LookupService) -> bool:
        """Does it instead of `run`; False when that has begun."""
        if not self._claimed.acquire(blocking=False):
            return False
        service.give_up(self.pending, self.release_permit)
        self.future.cancel()
        return True


class Prefetcher:
    """At most `forward_buffer_size` batches are looked up, or being looked up, ahead of the loop."""

    def __init__(
        self,
        source: BatchSource,
        service: LookupService,
        gate: StalenessGate,
        later: Sequence[tuple[Stage, StalenessGate]] = (),
        *,
        forward_buffer_size: int,
        num_workers: int,
    ) -> None:
        """`later`: what is looked up after the service's first lookup of a batch, the loosest first."""
        self._source = source
        self._service = service
        self._gate = gate
        self._ready: BoundedQueue[_Lookup] = BoundedQueue(forward_buffer_size)
        self._work: BoundedQueue[Work] = BoundedQueue(forward_buffer_size)
        self._later = [
            LaterStage(stage, stage_gate, self._work, forward_buffer_size + 1) for stage, stage_gate in later
        ]
        limits = [limited.limit for limited in (gate, *(stage.gate for stage in self._later))]
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

    def next(self, timeout_s: float) -> PersiaTrainingBatch | None:
        """The next batch; None at the end. Raises what went wrong with it or before it."""
        self._give_up_held_batches()
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
        if batch.lease is not None:
            self._yielded.append(batch.lease)
            QUEUE_OF_READY.record(
                batch.ready_ns, time.monotonic_ns(), batch.lease.reference.reference, batch.batch_id
            )
        return batch

    @property
    def num_ahead(self) -> int:
        """Batches looked up, or being looked up, that the loop has not taken."""
        return len(self._ready)

    def fail(self, failure: BaseException) -> None:
        """Training cannot go on: `next` raises `failure`, also when it is waiting."""
        self._ready.fail(failure)

    def close(self, deadline_s: float) -> None:
        """Stops the threads and gives up every batch that the loop did not get. Idempotent."""
        deadline = Deadline(deadline_s)
        for pending in self._source.stop():
            self._service.give_up(pending, _no_permit)
        self._gate.close()
        for stage in self._later:
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

    def _give_up_held_batches(self) -> None:
        """A script that skips batches and holds on to them would wait for its own permits."""
        self._yielded = [lease for lease in self._yielded if not lease.claimed]
        while self._limit is not None and len(self._yielded) >= self._limit:
            lease = self._yielded.pop(0)
            self._service.releaser.abandon(lease)
            if not self._warned_of_skipping:
                self._warned_of_skipping = True
                get_default_logger().warning(
                    "batch %d had no backward when the next one was asked for, with embedding_staleness=%d: "
                    "its embeddings are not updated (further batches are counted in batches_released only)",
                    lease.batch_id,
                    self._limit,
                    extra={"batch_id": lease.batch_id},
                )

    def _feed(self) -> None:
        try:
            while (pending := self._source.take()) is not None:
                self._feed_one(pending)
        except QueueClosed:
            pass
        except BaseException as failure:  # raised in the loop, which must not wait for more
            self._source_failure = failure
        self._ready.close()
        for stage in self._later:
            stage.finish()
        self._work.close()

    def _feed_one(self, pending: PendingBatch) -> None:
        lookup = _Lookup(pending, _no_permit)
        try:
            if self._service.training and pending.requires_grad:
                lookup.release_permit = self._gate.acquire().release
            for stage in self._later:
                lookup.complete = stage.put(lookup.complete)
            self._ready.put(lookup)
            self._work.put(lookup)
        except QueueClosed:
            lookup.give_up(self._service)
            raise

    def _serve(self) -> None:
        while True:
            try:
                self._work.get().run(self._service)
            except QueueClosed:
                return

    def _dispose(self, lookup: _Lookup, deadline: Deadline) -> None:
        if lookup.give_up(self._service):
            return
        try:
            batch = lookup.future.result(deadline.left_s())
        except (Exception, CancelledError):
            return  # counted when it failed or was given up
        if batch.lease is not None:
            self._service.releaser.abandon(batch.lease)


def _no_permit() -> None:
    """For batches that take no permit."""
