"""How a context reaches the embeddings, whether they live in servers or in this process.

`EmbeddingBackend` is the seam: contexts, prefetching and gradient return know only it. Deadlines are the
backend's, so that no caller can forget one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
from persia.embedding.consistency import ALL_PARTS

__all__ = ["ClientBackend", "EmbeddingBackend", "SlotGradients"]

SlotGradients = Sequence[tuple[str, NDArray[np.float32] | None]]


class EmbeddingBackend(Protocol):
    """What contexts need of the embedding workers. Thread-safe; every call ends by the backend's deadline."""

    def configure(self, config: TrainConfig, *, replace: bool = False) -> None:
        """Gives every server its training config; a different one than it has needs `replace`."""

    @property
    def slot_modes(self) -> tuple[str, ...]:
        """The modes of slots (`SlotConfig.mode`), by the number of their part."""

    def lookup(
        self, reference: BatchReference, *, requires_grad: bool, parts: int = ALL_PARTS
    ) -> LookupResult:
        """The embeddings of a batch that a loader registered, or that `lookup_direct` began with.

        Of some `parts` alone, for batches that require gradients: the other slots are absent from the result.
        """

    def lookup_direct(
        self, id_features: bytes, *, requires_grad: bool, parts: int = ALL_PARTS
    ) -> LookupResult:
        """The embeddings of ID features made here; workers take turns."""

    def return_gradients(
        self, reference: BatchReference, gradients: SlotGradients, *, scale: float
    ) -> ReturnReport:
        """Applies a batch's gradients, divided by `scale`."""

    def release(self, reference: BatchReference) -> None:
        """Gives a batch up without gradients."""

    def set_embeddings(self, signs: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Writes rows [num_signs, dim]; signs carry their feature group's prefix."""

    def clear(self) -> None:
        """Removes all rows from all servers."""

    def sizes(self) -> list[int]:
        """Rows per parameter server."""

    @property
    def local_store(self) -> EmbeddingStore | None:
        """The store behind it when that is in this process."""

    def close(self) -> None:
        """Ends connections; idempotent."""


class ClientBackend:
    """An `EmbeddingClient` of the native module with one deadline for all calls."""

    def __init__(
        self, client: EmbeddingClient, *, deadline_s: float, slot_modes: tuple[str, ...] = ("",)
    ) -> None:
        self._client = client
        self._deadline_s = deadline_s
        self._slot_modes = slot_modes
        # Not locked: two lookups picking the same worker by a race are only a little less balanced.
        self._num_direct_lookups = 0

    def configure(self, config: TrainConfig, *, replace: bool = False) -> None:
        self._client.configure(config, replace=replace, timeout_s=self._deadline_s)

    @property
    def slot_modes(self) -> tuple[str, ...]:
        return self._slot_modes

    def lookup(
        self, reference: BatchReference, *, requires_grad: bool, parts: int = ALL_PARTS
    ) -> LookupResult:
        return self._client.lookup(
            reference, requires_grad=requires_grad, timeout_s=self._deadline_s, parts=parts
        )

    def lookup_direct(
        self, id_features: bytes, *, requires_grad: bool, parts: int = ALL_PARTS
    ) -> LookupResult:
        worker_index = self._num_direct_lookups
        self._num_direct_lookups = (worker_index + 1) % (1 << 31)
        return self._client.lookup_direct(
            worker_index, id_features, requires_grad=requires_grad, timeout_s=self._deadline_s, parts=parts
        )

    def return_gradients(
        self, reference: BatchReference, gradients: SlotGradients, *, scale: float
    ) -> ReturnReport:
        return self._client.return_gradients(reference, gradients, scale=scale, timeout_s=self._deadline_s)

    def release(self, reference: BatchReference) -> None:
        self._client.release(reference, timeout_s=self._deadline_s)

    def set_embeddings(self, signs: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        self._client.set_embeddings(signs, rows, timeout_s=self._deadline_s)

    def clear(self) -> None:
        self._client.clear(timeout_s=self._deadline_s)

    def sizes(self) -> list[int]:
        return self._client.sizes(timeout_s=self._deadline_s)

    @property
    def local_store(self) -> EmbeddingStore | None:
        return self._client.store if isinstance(self._client, EmbeddedClient) else None

    def close(self) -> None:
        """The client closes its connections when it is destroyed."""
