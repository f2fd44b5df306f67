"""IDs of slots in the dense model, as a rank gets them: read on a lookup thread, beside the lookup.

In: the ID features of a batch. Out: for each such slot what `torch.nn.functional.embedding_bag` takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from persia import _native
from persia.errors import InvalidArgumentError


class DenseIds(NamedTuple):
    """A slot's IDs of a batch."""

    ids: torch.Tensor  # int64 [total]
    offsets: torch.Tensor  # int64 [batch_size + 1]
    weights: torch.Tensor | None  # float32 [total]
    factors: torch.Tensor | None  # float32 [batch_size, 1], which the sums are multiplied by


@dataclass(frozen=True)
class DenseTable:
    """What the dense model knows of such a slot."""

    cardinality: int
    dim: int
    scaling: str  # "", "sqrt" or "mean"

    def check(self, name: str, ids: NDArray[np.uint64]) -> None:
        """InvalidArgumentError: an ID of the slot `name` is beyond its rows."""
        if len(ids) and (greatest := ids.max()) >= self.cardinality:
            raise InvalidArgumentError(
                f"slot {name!r} has the ID {greatest}, and its IDs must be below its cardinality of "
                f"{self.cardinality}, as it is placed in the dense model: raise the cardinality, or choose "
                "placement: servers"
            )


_Features = Iterable[tuple[str, NDArray[np.uint64], NDArray[np.uint32], NDArray[np.float32] | None]]


class DenseIdReader:
    """Reads the IDs of slots in the dense model. Thread-safe."""

    def __init__(self, tables: Mapping[str, DenseTable]) -> None:
        self._tables = tables

    def read(self, id_features: bytes | memoryview) -> dict[str, DenseIds]:
        """Of the wire format's "ID features", by slot. InvalidArgumentError names an ID beyond its slot."""
        return self.convert(_native.decode_id_features(id_features))

    def convert(self, features: _Features) -> dict[str, DenseIds]:
        """Of (name, IDs, offsets, weights) of each feature; see `read`."""
        return {
            name: _converted(name, table, ids, offsets, weights)
            for name, ids, offsets, weights in features
            if (table := self._tables.get(name)) is not None
        }


def _converted(
    name: str,
    table: DenseTable,
    ids: NDArray[np.uint64],
    offsets: NDArray[np.uint32],
    weights: NDArray[np.float32] | None,
) -> DenseIds:
    table.check(name, ids)
    bounds = offsets.astype(np.int64)
    return DenseIds(
        torch.from_numpy(ids.view(np.int64)),
        torch.from_numpy(bounds),
        None if weights is None else torch.from_numpy(np.array(weights)),
        _factors(table.scaling, bounds, weights),
    )


def _factors(
    scaling: str, bounds: NDArray[np.int64], weights: NDArray[np.float32] | None
) -> torch.Tensor | None:
    """As embedding workers scale sums. A sample whose divisor is 0 becomes zeros."""
    if not scaling:
        return None
    divisors = np.diff(bounds).astype(np.float64)
    if weights is not None:
        terms: NDArray[np.float64] = weights.astype(np.float64)
        samples = np.repeat(np.arange(len(divisors)), np.diff(bounds))
        # Each sample alone: differences of running sums lose a small weight beside a large one.
        terms = terms * terms if scaling == "sqrt" else terms
        divisors = np.bincount(samples, terms, len(divisors)).astype(np.float64)
    if scaling == "sqrt":
        divisors = np.sqrt(divisors)
    factors = np.divide(1.0, divisors, out=np.zeros_like(divisors), where=divisors != 0)
    return torch.from_numpy(factors.astype(np.float32)).unsqueeze(1)
