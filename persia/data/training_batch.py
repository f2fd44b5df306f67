"""A batch as the training loop gets it: embeddings looked up, dense features and labels decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from persia._native import LookupResult
from persia.embedding.dense_codec import DenseSection
from persia.embedding.lease import BatchLease
from persia.embedding.lookup import EmbeddingTensors, embedding_tensors, to_device
from persia.errors import FailedPreconditionError
from persia.observability.phases import LOOKUP_IN_STEP, NO_BATCH

__all__ = ["PersiaTrainingBatch"]


@dataclasses.dataclass(eq=False)  # compared and hashed by identity: weak references to it are kept
class PersiaTrainingBatch:
    """What a `DataLoader` yields and `forward` takes. Dropping one without `backward` gives its batch up."""

    batch_id: int
    requires_grad: bool
    device: torch.device | None
    dense: DenseSection
    result: LookupResult
    lease: BatchLease | None  # None: no gradient is expected
    ready_ns: int = 0  # `time.monotonic_ns()` when all was looked up that is, ahead of the loop
    # The slots that `result` lacks, as far as they were looked up later than it, and ahead of the loop.
    rest: list[LookupResult] = dataclasses.field(default_factory=list)
    # Finds the synchronous slots, which must see the updates of the step before.
    find_synchronous: Callable[[], LookupResult] | None = None
    # The leaves whose gradients `backward` returns; made with the embedding tensors.
    leaves: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    _consumed: set[str] = dataclasses.field(default_factory=set)

    @property
    def batch_size(self) -> int:
        return self.dense.batch_size

    @property
    def traced_id(self) -> int:
        """By which traces know it: evaluations have numbers of their own, that training's have, too."""
        return NO_BATCH if self.lease is None else self.batch_id

    @property
    def meta(self) -> bytes | None:
        """What the loader attached to the batch."""
        return self.dense.meta

    def check_not_given_up(self) -> None:
        """Raises when no gradient of the batch can be applied any more."""
        if self.lease is not None and self.lease.claimed:
            raise FailedPreconditionError(
                f"batch {self.batch_id} had its backward already, or was given up because the next one was "
                "asked for first: call backward once for every batch, or raise embedding_staleness"
            )

    def look_up_rest(self) -> None:
        """Looks the synchronous slots up, if that is left to do; it can be called again when it fails."""
        if self.find_synchronous is None:
            return
        self.check_not_given_up()
        with LOOKUP_IN_STEP.of(self.traced_id, self.result.reference.reference):
            self.rest.append(self.find_synchronous())
        self.find_synchronous = None

    def consume_all_non_id_type_feature_tensors(self) -> list[torch.Tensor]:
        """The dense features, on the context's device. Each `consume` works once."""
        self._consume("non-ID type features")
        return self._tensors(self.dense.features)

    def consume_all_id_type_feature_embedding_tensors(self) -> list[torch.Tensor]:
        """The embeddings in the order of the batch's features; shapes: `persia.embedding.lookup`.

        Looks synchronous slots up, unless `look_up_rest` has: raises what goes wrong with that.
        """
        self.look_up_rest()
        self._consume("ID type feature embeddings")
        made: EmbeddingTensors = embedding_tensors(
            self.result, rest=self.rest, device=self.device, requires_grad=self.lease is not None
        )
        self.leaves = made.leaves
        return made.tensors

    def consume_all_label_tensors(self) -> list[torch.Tensor]:
        """The labels, on the context's device."""
        self._consume("labels")
        return self._tensors(self.dense.labels)

    def consume_all_meta_data(self) -> bytes | None:
        """The same as `meta`."""
        return self.dense.meta

    def _consume(self, what: str) -> None:
        if what in self._consumed:
            raise FailedPreconditionError(
                f"the {what} of batch {self.batch_id} were taken already: "
                "call forward or prepare_features once a batch"
            )
        self._consumed.add(what)

    def _tensors(self, arrays: Sequence[tuple[str, NDArray[np.generic]]]) -> list[torch.Tensor]:
        # Copied: the arrays are views of an immutable message, and a model may work in place.
        return [to_device(torch.from_numpy(np.array(array)), self.device) for _, array in arrays]
