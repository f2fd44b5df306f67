"""Updates that wait for the end of a backward pass, so that one `backward()` is one update of each row.

A module that is used several times in one forward pass gets a gradient for every use. Torch adds them up
before the optimizer sees them; here they are gathered until autograd has finished, and applied at once. The
same place is where ranks exchange what they are about to apply (`persia.nn.replicas`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from persia.nn.embedding_bag_collection import BagStats


@dataclass(frozen=True)
class BagGradients:
    """The gradient of one lookup's bags."""

    ids: NDArray[np.uint64]  # [total], bag after bag
    lengths: NDArray[np.int64]  # [batch]
    gradient: torch.Tensor  # float32 [batch, dim], on the host
    batch: Any  # the lookup itself, as its engine wants it back; None: of another rank, or several joined


Uses = dict[int, list[BagGradients]]  # by the number of the rows


class UpdatedRows(Protocol):
    """The rows of one weight, as their updates see them."""

    name: str

    @property
    def embedding_dim(self) -> int: ...

    def stats(self) -> BagStats: ...

    def apply_gradients(self, uses: Sequence[BagGradients]) -> None:
        """Updates each row once, by the sum of its gradients in `uses`."""


class Exchange(Protocol):
    """What several ranks do between the end of a backward pass and its updates."""

    def __call__(self, updates: PendingUpdates, uses: Uses) -> Uses:
        """A rank's own gradients in, those that it is to apply out."""

    def together(self) -> AbstractContextManager[None]:
        """Around the updates."""


class _Pass:
    """A backward pass. Its callback alone keeps it: what a pass that failed had gathered goes with it."""

    def __init__(self) -> None:
        self.uses: Uses = {}


class PendingUpdates:
    """Of all rows that one `convert()` made."""

    def __init__(self, exchange: Exchange | None = None) -> None:
        self.rows: list[UpdatedRows] = []
        self.exchange = exchange
        self._passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()  # by autograd's number

    def register(self, rows: UpdatedRows) -> int:
        """Returns the number under which `add` knows them."""
        self.rows.append(rows)
        return len(self.rows) - 1

    def add(self, number: int, gradients: BagGradients) -> None:
        """Only within a backward pass; they are applied at its end."""
        number_of_pass = torch._C._current_graph_task_id()
        current = self._passes.get(number_of_pass)
        if current is None:
            current = self._passes[number_of_pass] = _Pass()
            # What DDP finishes its reductions by, too.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._apply, current))
        current.uses.setdefault(number, []).append(gradients)

    def _apply(self, finished: _Pass) -> None:
        uses, finished.uses = finished.uses, {}
        together: AbstractContextManager[None] = contextlib.nullcontext()
        if self.exchange is not None:
            uses = self.exchange(self, uses)
            together = self.exchange.together()
        with together:
            # In one order on all ranks, which may have used their modules in different orders.
            for number in sorted(uses):
                self.rows[number].apply_gradients(uses[number])
