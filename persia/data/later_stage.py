"""Slots with a bound of their own, tighter than that of others: looked up later than these, as it allows."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import CancelledError, Future
from typing import Protocol

from persia.data.lookup_service import LookupService
from persia.data.staleness import StalenessGate
from persia.data.training_batch import PersiaTrainingBatch
from persia.embedding.bounded_queue import BoundedQueue, QueueClosed
from persia.embedding.consistency import Stage
from persia.logger import get_default_logger

__all__ = ["LaterStage", "Work"]


class Work(Protocol):
    """What a lookup thread does."""

    def run(self, service: LookupService) -> None:
        """Looks up; errors are kept for the loop."""

    def give_up(self, service: LookupService) -> bool:
        """Instead of `run`; False when that has begun."""


@dataclasses.dataclass(frozen=True, eq=False)
class _LaterLookup:
    stage: Stage
    before: Future[PersiaTrainingBatch]  # the batch with the slots of the stages before
    future: Future[PersiaTrainingBatch] = dataclasses.field(default_factory=Future)

    def run(self, service: LookupService) -> None:
        batch = self.before.result()  # it is there
        try:
            service.look_up_later(batch, self.stage)
        except Exception as failure:
            get_default_logger().error("%s", failure, extra={"batch_id": batch.batch_id})
            # Not left to the batch's finalizer: the failure, which this future keeps, keeps the batch.
            if batch.lease is not None:
                service.releaser.abandon(batch.lease)
            self.future.set_exception(failure)
        else:
            self.future.set_result(batch)

    def give_up(self, service: LookupService) -> bool:
        return self.future.cancel()


class LaterStage:
    """Takes batches in the order of the source, waits for a permit for each, and queues its lookup.

    The order is what makes several bounds free of deadlocks, as it does one: the batch that the loop waits
    for has its permit before any later one. The permit is back when the batch is settled, like those of the
    stages before.
    """

    def __init__(self, stage: Stage, gate: StalenessGate, work: BoundedQueue[Work], capacity: int) -> None:
        self.gate = gate
        self._stage = stage
        self._work = work
        self._queue: BoundedQueue[_LaterLookup] = BoundedQueue(capacity)
        self._thread = threading.Thread(target=self._run, name=f"persia-stage-{gate.limit}", daemon=True)
        self._thread.start()

    def put(self, before: Future[PersiaTrainingBatch]) -> Future[PersiaTrainingBatch]:
        """Returns the batch with this stage's slots. Raises QueueClosed after `close`."""
        lookup = _LaterLookup(self._stage, before)
        self._queue.put(lookup)
        return lookup.future

    def finish(self) -> None:
        """No more batches come: returns when the lookups of all are queued."""
        self._queue.close()
        self._thread.join()

    def close(self) -> None:
        """Ends all waiting; batches that have no permit yet are cancelled."""
        self.gate.close()
        for lookup in self._queue.drain():
            lookup.future.cancel()

    def _run(self) -> None:
        while True:
            try:
                lookup = self._queue.get()
            except QueueClosed:
                return
            self._feed(lookup)
            del lookup  # holds its batch, and one that the script drops must be seen to be dropped

    def _feed(self, lookup: _LaterLookup) -> None:
        try:
            lease = lookup.before.result().lease  # lookups end by their deadline, or are cancelled
            if lease is None:  # no training batch: it has all its slots
                lookup.future.set_result(lookup.before.result())
                return
            lease.hold(self.gate.acquire().release)
            self._work.put(lookup)
        except (QueueClosed, CancelledError):
            lookup.future.cancel()
        except Exception as failure:  # of the stage before
            lookup.future.set_exception(failure)
