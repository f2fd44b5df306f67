"""Stage 3, on a lookup thread: a batch is looked up.

In: a `PendingBatch` of the feeder (`prefetch.py`). Out: a `PersiaTrainingBatch` whose lease is watched, so
that it is released whatever becomes of the batch. A batch whose slots have several bounds takes one lookup
for each; an ordinary batch takes one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from persia._native import BatchReference, LookupResult, TracedBatch
from persia.embedding.dense_codec import decode_dense
from persia.observability.phases import FORWARD_ERRORS, NO_BATCH
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.counters import Counters
from persia.pipeline.lease import BatchLease, LeaseReaper, with_batch_id
from persia.pipeline.source import PendingBatch
from persia.pipeline.staleness import ALL_SLOTS, LookupStage

__all__ = ["LookupService", "deferred_stages", "first_slots", "slots_in_step"]


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
    if slots_in_step(stages) is None:
        return ALL_SLOTS
    together = 0
    # A batch that is looked up on demand is not ahead of any update, so stages with bounds need no permits
    # and can share one call.
    for stage in stages[:-1]:
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

    def look_up(self, pending: PendingBatch, release_permit: Callable[[], None]) -> PersiaTrainingBatch:
        """Ends by the backend's deadline; on an error the permit is released, the error names the batch."""
        requires_grad = self.training and pending.requires_grad
        # Evaluations see all slots as they are now: modes bound the distance to updates, and they make none.
        slots = self.first if requires_grad else ALL_SLOTS
        try:
            dense = decode_dense(pending.dense)
            # The native client tags its spans with this thread-local number, which connects them to those of
            # Python.
            with TracedBatch(pending.batch_id if requires_grad else NO_BATCH):
                if pending.reference is not None:
                    result = self.backend.lookup(
                        pending.reference,
                        requires_grad=requires_grad,
                        slots=slots,
                        id_features=pending.id_features,
                    )
                else:
                    result = self.backend.lookup_direct(
                        bytes(pending.id_features), requires_grad=requires_grad, slots=slots
                    )
        except Exception as failure:
            self.counters.add(batches_failed=1)
            FORWARD_ERRORS.add()
            release_permit()
            raise with_batch_id(failure, "the lookup", pending.batch_id) from failure
        lease = BatchLease(pending.batch_id, result.reference, release_permit) if requires_grad else None
        batch = PersiaTrainingBatch(pending.batch_id, requires_grad, self.device, dense, result, lease)
        batch.ready_ns = time.monotonic_ns()
        if lease is None:
            self.counters.add(batches_evaluated=1)
            return batch
        if self.in_step is not None:
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

    def look_up_stage(self, batch: PersiaTrainingBatch, stage: LookupStage) -> None:
        """Adds the slots of a deferred stage.

        Ends by the backend's deadline; an error names the batch, which is still to be given up then.
        """
        what = f"the lookup of the slots with embedding_staleness={stage.mode.bound}"
        batch.deferred.append(self._look_up_more(batch.batch_id, batch.result.reference, stage.slots, what))
        batch.ready_ns = time.monotonic_ns()

    def _look_up_more(self, batch_id: int, reference: BatchReference, slots: int, what: str) -> LookupResult:
        try:
            with TracedBatch(batch_id):
                return self.backend.lookup(reference, requires_grad=True, slots=slots)
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
