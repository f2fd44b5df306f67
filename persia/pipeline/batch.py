"""Stage 4: a looked-up batch becomes the tensors of a model, and their gradients become arrays again.

In: the `LookupResult`s of a batch. Out: torch tensors that share their memory, for `forward`; later float32
arrays of gradients, for the `GradientSender`.

A pooled slot becomes one float32 tensor [batch, dim]. A raw slot becomes [batch, sample_fixed_size, dim + 1]:
the rows of the sample's IDs, zeros where there are fewer, and a last channel that is 1 where a row is
present. What receives the gradient is the slot's *leaf*: the pooled tensor itself, or a raw slot's distinct
rows [num_rows, dim], so that autograd sums the gradient over the places a row is used in.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from persia._native import LookupResult
from persia.embedding.dense_codec import DenseSection
from persia.errors import FailedPreconditionError
from persia.observability.phases import LOOKUP_IN_STEP, NO_BATCH
from persia.pipeline.backend import SlotGradient
from persia.pipeline.dense_ids import DenseIds
from persia.pipeline.device_batch import DeviceBatch, Lane, OutgoingGradients

if TYPE_CHECKING:
    from persia.pipeline.lookup import BatchLease


# Of each leaf, on the host or on their way there.
BatchGradients = Sequence[tuple[str, SlotGradient]] | OutgoingGradients


@dataclasses.dataclass(eq=False)  # compared and hashed by identity: weak references to it are kept
class PersiaTrainingBatch:
    """What a `DataLoader` yields and `forward` takes. Dropping one without `backward` gives its batch up."""

    batch_id: int
    requires_grad: bool
    device: torch.device | None
    dense: DenseSection
    result: LookupResult
    lease: BatchLease | None  # None: no gradient is expected
    is_of_loop: bool = True  # False: the script has looked it up itself
    ready_ns: int = 0  # `time.monotonic_ns()` when the lookups ahead of the loop were done
    # The lookups of the slots that are absent from `result`: deferred stages, and the synchronous one.
    deferred: list[LookupResult] = dataclasses.field(default_factory=list)
    on_device: DeviceBatch | None = None  # set by `send`; None: the tensors are the native results
    # Set by LookupService.look_up (lookup.py): looks up the synchronous slots, which must see the updates of
    # the preceding step. Called by `look_up_synchronous`.
    find_synchronous: Callable[[], LookupResult] | None = None
    # Of slots in the dense model, which are absent from the lookups.
    dense_ids: Mapping[str, DenseIds] = dataclasses.field(default_factory=dict)
    # Set: a backward pass has reached the embeddings of a batch that has only such slots, so no leaf.
    reached: threading.Event = dataclasses.field(default_factory=threading.Event)
    # The leaves whose gradients `backward` returns; created with the embedding tensors.
    leaves: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)  # of the embedding tensors
    _consumed: set[str] = dataclasses.field(default_factory=set)

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return self.dense.batch_size

    @property
    def traced_id(self) -> int:
        """The number in traces; NO_BATCH for evaluations, whose own numbers would collide with training's."""
        return NO_BATCH if self.lease is None else self.batch_id

    @property
    def meta(self) -> bytes | None:
        """The bytes that the loader attached to the batch."""
        return self.dense.meta

    def check_not_given_up(self) -> None:
        """Raises when no gradient of the batch can be applied any more."""
        if self.lease is not None and self.lease.acquired:
            raise FailedPreconditionError(
                f"batch {self.batch_id} had its backward already, or was released because later ones were "
                "asked for first: call backward once for every batch, or raise embedding_staleness"
            )

    def send(self, lane: Lane) -> None:
        """Sends the batch to its device, and each lookup that is added from here on."""
        self.on_device = DeviceBatch(lane, self.result, self.dense)

    def add_lookup(self, result: LookupResult) -> None:
        """Adds slots that are absent from the lookups before."""
        if self.on_device is not None:
            self.on_device.add(result)
        self.deferred.append(result)

    def look_up_synchronous(self) -> None:
        """Looks up the synchronous slots, unless that is done; it can be called again when it fails."""
        if self.find_synchronous is None:
            return
        self.check_not_given_up()
        with LOOKUP_IN_STEP.of(self.traced_id, self.result.reference.reference):
            self.add_lookup(self.find_synchronous())
        self.find_synchronous = None

    def consume_all_non_id_type_feature_tensors(self) -> list[torch.Tensor]:
        """The dense features, on the context's device. Each `consume` works once."""
        self._consume("non-ID type features")
        if self.on_device is not None:
            return self.on_device.features()
        return self._tensors(self.dense.features)

    def consume_all_id_type_feature_embedding_tensors(self) -> list[torch.Tensor]:
        """The embeddings in the order of the batch's features, empty for slots in the dense model.

        Shapes: see this module. Looks up synchronous slots, unless `look_up_synchronous` has: raises what
        goes wrong with that.
        """
        self.look_up_synchronous()
        self._consume("ID type feature embeddings")
        requires_grad = self.lease is not None
        if self.on_device is not None:
            made = _embedding_tensors(self.on_device.embeddings(requires_grad=requires_grad))
        else:
            made = embedding_tensors(
                self.result, self.deferred, device=self.device, requires_grad=requires_grad
            )
        self.leaves, self.names = made.leaves, made.names
        return made.tensors

    def consume_all_label_tensors(self) -> list[torch.Tensor]:
        """The labels, on the context's device."""
        self._consume("labels")
        if self.on_device is not None:
            return self.on_device.labels()
        return self._tensors(self.dense.labels)

    def gradients(self, scale: float) -> BatchGradients:
        """Of the leaves. `scale`: which they still have."""
        if self.on_device is not None:
            leaves = dict(self.leaves)
            return self.on_device.gradients([(name, leaves.get(name)) for name in self.names], scale)
        return leaf_gradients(self.leaves)

    def consume_all_meta_data(self) -> bytes | None:
        """The same as `meta`."""
        return self.dense.meta

    def _consume(self, what: str) -> None:
        # A second set of embedding tensors would have leaves of its own, and gradients are read from one set.
        if what in self._consumed:
            raise FailedPreconditionError(
                f"the {what} of batch {self.batch_id} were taken already: "
                "call forward or prepare_features once a batch"
            )
        self._consumed.add(what)

    def _tensors(self, arrays: Sequence[tuple[str, NDArray[np.generic]]]) -> list[torch.Tensor]:
        # Copied: the arrays are views of an immutable message, and a model may work in place.
        return [to_device(torch.from_numpy(np.array(array)), self.device) for _, array in arrays]


@dataclasses.dataclass
class EmbeddingTensors:
    """`tensors` go to the model, in the order of the batch's features; `leaves` are (slot name, leaf).

    A slot that was not looked up has an empty tensor and no leaf.
    """

    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    leaves: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)


def embedding_tensors(
    result: LookupResult,
    deferred: Sequence[LookupResult] = (),
    *,
    device: torch.device | None = None,
    requires_grad: bool,
) -> EmbeddingTensors:
    """The tensors share memory with `result` on the CPU, and keep it alive.

    The slots that are absent from `result` are in `deferred`.
    """
    slots = result.slots
    for later in deferred:  # each has all slots, in the order of the batch's features
        slots = [new if slot.absent else slot for slot, new in zip(slots, later.slots, strict=True)]
    # Made leaves after the copy to the device: a leaf on the host would get its gradient there, by one more
    # copy for each slot in the backward pass.
    return _embedding_tensors(
        (
            slot.name,
            None
            if slot.absent
            else to_device(torch.from_numpy(slot.rows), device).requires_grad_(requires_grad),
            None if (index := slot.index) is None else to_device(torch.from_numpy(index), device),
        )
        for slot in slots
    )


def _embedding_tensors(
    slots: Iterable[tuple[str, torch.Tensor | None, torch.Tensor | None]],
) -> EmbeddingTensors:
    """`slots`: (name, leaf, index of a raw slot)."""
    made = EmbeddingTensors()
    for name, leaf, index in slots:
        made.names.append(name)
        if leaf is None:
            made.tensors.append(torch.empty(0))
            continue
        made.leaves.append((name, leaf))
        made.tensors.append(leaf if index is None else _expand_raw(leaf, index))
    return made


def leaf_gradients(leaves: list[tuple[str, torch.Tensor]]) -> list[tuple[str, SlotGradient]]:
    """(slot name, float32 gradient [num_rows, dim]) per leaf; None for a slot that the loss did not reach.

    Copies to the host wait for the device, so the arrays are final.
    """
    return [(name, None if leaf.grad is None else _to_host(leaf.grad)) for name, leaf in leaves]


def _expand_raw(leaf: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    # Index 0 is the row that pads short samples (docs/wire_format.md): zeros, which the mask tells from a row
    # that is zero.
    rows = leaf.index_select(0, index.flatten()).view(*index.shape, leaf.shape[1])
    mask = (index != 0).to(leaf.dtype).unsqueeze(-1)
    return torch.cat([rows, mask], dim=-1)


def to_device(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Host to device through pinned memory, which torch's allocator keeps until the copy has arrived."""
    if device is None or device.type == "cpu":
        return tensor
    # Copies from pageable memory block the host, and the loop would wait for each of dozens of slots.
    return tensor.pin_memory().to(device, non_blocking=True)


def _to_host(gradient: torch.Tensor) -> NDArray[np.float32]:
    # Workers sum in float32 whatever the model computes in. A gradient may be a view with any strides.
    array: NDArray[np.float32] = gradient.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return array
