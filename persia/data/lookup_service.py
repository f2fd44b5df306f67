"""From a pending batch to a training batch: the lookups of its slots, each part at its time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from persia._native import BatchReference, LookupResult, TracedBatch
from persia.data.source import PendingBatch
from persia.data.training_batch import PersiaTrainingBatch
from persia.embedding.backend import EmbeddingBackend
from persia.embedding.consistency import ALL_PARTS, Stage
from persia.embedding.counters import Counters
from persia.embedding.lease import BatchLease, Releaser, with_batch_id
from persia.observability.phases import FORWARD_ERRORS, NO_BATCH

__all__ = ["LookupService", "TrainingParts"]


@dataclasses.dataclass(frozen=True)
class TrainingParts:
    """Which slots of a training batch its first lookup is of, and which are left to its step."""

    first: int = ALL_PARTS
    in_step: int | None = None

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> TrainingParts:
        """For those who look the stages between up later."""
        in_step = stages[-1].parts if len(stages) > 1 and stages[-1].mode.synchronous else None
        return cls(stages[0].parts, in_step)

    @classmethod
    def at_once(cls, stages: Sequence[Stage]) -> TrainingParts:
        """All but the synchronous ones together: where nobody looks up ahead there are no bounds."""
        in_step = cls.of(stages).in_step
        if in_step is None:
            return cls()
        first = 0
        for stage in stages[:-1]:
            first |= stage.parts
        return cls(first, in_step)


@dataclasses.dataclass(frozen=True)
class LookupService:
    """Turns pending batches into training batches, and gives up those that nobody will use."""

    backend: EmbeddingBackend
    releaser: Releaser
    counters: Counters
    device: torch.device | None
    training: bool
    parts: TrainingParts = TrainingParts()

    def look_up(self, pending: PendingBatch, release_permit: Callable[[], None]) -> PersiaTrainingBatch:
        """Ends by the backend's deadline; on an error the permit is back and the error names the batch."""
        requires_grad = self.training and pending.requires_grad
        parts = self.parts if requires_grad else TrainingParts()
        try:
            dense = pending.decode()
            with TracedBatch(pending.batch_id if requires_grad else NO_BATCH):
                if pending.reference is not None:
                    result = self.backend.lookup(
                        pending.reference, requires_grad=requires_grad, parts=parts.first
                    )
                else:
                    result = self.backend.lookup_direct(
                        pending.id_features, requires_grad=requires_grad, parts=parts.first
                    )
        except Exception as failure:
            self.counters.add(batches_failed=1)
            FORWARD_ERRORS.add()
            release_permit()
            raise with_batch_id(failure, "the lookup", pending.batch_id) from failure
        lease = BatchLease(pending.batch_id, result.reference, release_permit) if requires_grad else None
        batch = PersiaTrainingBatch(pending.batch_id, requires_grad, self.device, dense, result, lease)
        if parts.in_step is not None:
            batch.find_synchronous = partial(
                self._look_up_part,
                pending.batch_id,
                result.reference,
                parts.in_step,
                "the lookup of the synchronous slots",
            )
        batch.ready_ns = time.monotonic_ns()
        if lease is None:
            self.counters.add(batches_evaluated=1)
        else:
            lease.watch(batch, self.releaser)
        return batch

    def look_up_later(self, batch: PersiaTrainingBatch, stage: Stage) -> None:
        """Adds the slots of a stage between the first and the batch's step.

        Ends by the backend's deadline; an error names the batch, which is still to be given up then.
        """
        what = f"the lookup of the slots with embedding_staleness={stage.mode.bound}"
        reference = batch.result.reference
        batch.rest.append(self._look_up_part(batch.batch_id, reference, stage.parts, what))
        batch.ready_ns = time.monotonic_ns()

    def _look_up_part(self, batch_id: int, reference: BatchReference, parts: int, what: str) -> LookupResult:
        try:
            with TracedBatch(batch_id):
                return self.backend.lookup(reference, requires_grad=True, parts=parts)
        except Exception as failure:
            FORWARD_ERRORS.add()
            raise with_batch_id(failure, what, batch_id) from failure

    def give_up(self, pending: PendingBatch, release_permit: Callable[[], None]) -> None:
        """For a batch that was not looked up."""
        if pending.reference is not None:
            self.releaser.abandon(BatchLease(pending.batch_id, pending.reference, release_permit))
        else:
            self.counters.add(batches_released=1)
            release_permit()
