"""Stages 3 and 5, the call: embedding workers, in servers or in this process, behind one interface.

Everything above knows only `EmbeddingBackend`. Deadlines are the backend's, so that no caller can forget one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from persia._native import (
    BatchReference,
    EmbeddedClient,
    EmbeddingClient,
    EmbeddingStore,
    LookupResult,
    ReturnReport,
    TrainConfig,
)
from persia.config import SlotsConfig
from persia.errors import InvalidArgumentError, InvalidTypeError, NotFoundError
from persia.pipeline.staleness import ALL_SLOTS

__all__ = ["EmbeddingBackend", "SlotGradients", "slot_signs"]

_ROWS_AT_A_TIME = 65_536  # bounds a message of set_embeddings

SlotGradients = Sequence[tuple[str, NDArray[np.float32] | None]]


class EmbeddingBackend:
    """An `EmbeddingClient` of the native module with one deadline for all calls. Thread-safe.

    The client is the engine itself in an embedded job, and RPC to embedding workers in a cluster, whose
    backend (`persia.job.connection.ClusterBackend`) also follows workers that restart.
    """

    def __init__(
        self, client: EmbeddingClient, *, deadline_s: float, slot_modes: tuple[str, ...] = ("",)
    ) -> None:
        """`slot_modes`: the modes of slots (`SlotConfig.mode`), by the number of their bit in a lookup."""
        self._client = client
        self._deadline_s = deadline_s
        self.slot_modes = slot_modes
        # Not locked: two lookups that pick the same worker by a race are only a little less balanced.
        self._num_direct_lookups = 0

    @property
    def local_store(self) -> EmbeddingStore | None:
        """The store behind it when that is in this process."""
        return self._client.store if isinstance(self._client, EmbeddedClient) else None

    def configure(self, config: TrainConfig, *, replace: bool = False) -> None:
        """Gives every server its training config; another one than it has needs `replace`."""
        self._client.configure(config, replace=replace, timeout_s=self._deadline_s)

    def lookup(
        self, reference: BatchReference, *, requires_grad: bool, slots: int = ALL_SLOTS
    ) -> LookupResult:
        """The embeddings of a batch that a loader registered, or that `lookup_direct` began with.

        `slots` selects slots by their mode, for batches that require gradients: the others are absent from
        the result.
        """
        return self._client.lookup(
            reference, requires_grad=requires_grad, timeout_s=self._deadline_s, parts=slots
        )

    def lookup_direct(
        self, id_features: bytes, *, requires_grad: bool, slots: int = ALL_SLOTS
    ) -> LookupResult:
        """The embeddings of ID features built in this process; workers take turns."""
        worker_index = self._num_direct_lookups
        self._num_direct_lookups = (worker_index + 1) % (1 << 31)
        return self._client.lookup_direct(
            worker_index, id_features, requires_grad=requires_grad, timeout_s=self._deadline_s, parts=slots
        )

    def return_gradients(
        self, reference: BatchReference, gradients: SlotGradients, *, scale: float
    ) -> ReturnReport:
        """Applies a batch's gradients, divided by `scale`; returns when every server has."""
        return self._client.return_gradients(reference, gradients, scale=scale, timeout_s=self._deadline_s)

    def release(self, reference: BatchReference) -> None:
        """Gives a batch up without gradients."""
        self._client.release(reference, timeout_s=self._deadline_s)

    def set_embeddings(self, signs: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Writes rows [num_signs, dim]; signs carry their feature group's prefix."""
        self._client.set_embeddings(signs, rows, timeout_s=self._deadline_s)

    def set_slot_rows(
        self, slots: SlotsConfig, name: str, ids: NDArray[np.uint64], rows: NDArray[np.float32]
    ) -> None:
        """Writes rows [n, dim] of `ids` [n] of a slot. InvalidArgumentError: another shape."""
        signs = slot_signs(slots, name, ids)
        dim = slots.slots_config[name].dim
        if not isinstance(rows, np.ndarray) or rows.shape != (len(ids), dim):
            what = list(rows.shape) if isinstance(rows, np.ndarray) else type(rows).__name__
            raise InvalidArgumentError(f"rows of slot {name} are {what}: pass float32 [{len(ids)}, {dim}]")
        values = np.ascontiguousarray(rows, np.float32)
        for begin in range(0, len(signs), _ROWS_AT_A_TIME):
            part = slice(begin, begin + _ROWS_AT_A_TIME)
            self.set_embeddings(signs[part], values[part])

    def clear(self) -> None:
        """Removes all rows from all servers."""
        self._client.clear(timeout_s=self._deadline_s)

    def sizes(self) -> list[int]:
        """Rows per parameter server."""
        return self._client.sizes(timeout_s=self._deadline_s)

    def close(self) -> None:
        """The client closes its connections when it is destroyed."""


def slot_signs(slots: SlotsConfig, name: str, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The signs uint64 [n] of `ids` uint64 [n] in the slot `name`: `id mod (2^(64-bits) - 1) + prefix`.

    Raises NotFoundError for an unknown slot, InvalidArgumentError for one with a hash stack, whose IDs share
    rows, and InvalidTypeError for another dtype than uint64.
    """
    slot = slots.slots_config.get(name)
    if slot is None:
        raise NotFoundError(f"there is no slot {name!r}: the slots are {', '.join(slots.slots_config)}")
    if slot.hash_stack is not None:
        raise InvalidArgumentError(
            f"slot {name} has a hash stack: several IDs share a row, which has no single owner to set it"
        )
    if not isinstance(ids, np.ndarray) or ids.dtype != np.uint64 or ids.ndim != 1:
        what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise InvalidTypeError(f"ids of slot {name} are {what}: pass a numpy array of uint64 [n]")
    num_id_bits = 64 - slots.feature_index_prefix_bit
    prefix = np.uint64(slots.group_numbers()[name] << num_id_bits)
    signs: NDArray[np.uint64] = ids % np.uint64(2**num_id_bits - 1) + prefix
    return signs
