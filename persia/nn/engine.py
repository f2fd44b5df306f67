"""What modules over rows need of whatever holds these: a store in this process, or parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from persia import _native


class UpdateCounts(Protocol):
    """Rows of a batch, each counted once."""

    @property
    def num_updated(self) -> int: ...
    @property
    def num_missing(self) -> int: ...  # evicted or not admitted: their gradients were dropped
    @property
    def num_nonfinite(self) -> int: ...  # left as they were


@dataclass(frozen=True)
class Updated:
    """`UpdateCounts` made in Python."""

    num_updated: int = 0
    num_missing: int = 0
    num_nonfinite: int = 0

    def __add__(self, other: Updated) -> Updated:
        return Updated(
            self.num_updated + other.num_updated,
            self.num_missing + other.num_missing,
            self.num_nonfinite + other.num_nonfinite,
        )


class Engine(Protocol):
    """`_native.EmbeddingBags`, or the same calls on servers. Thread-safe."""

    def configure(self, config: _native.TrainConfig, *, replace: bool = False) -> None: ...

    def lookup(
        self,
        values: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        *,
        train: bool,
        weights: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.float32], Any]:
        """Pooled rows [batch, dims], and what `update` wants of a training lookup."""

    def update(self, batch: Any, gradients: NDArray[np.float32]) -> UpdateCounts:
        """Applied when it returns, or it raises."""

    def set_rows(self, slot: int, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None: ...
    def stats(self) -> _native.StoreStats: ...
    def clear(self) -> None: ...
