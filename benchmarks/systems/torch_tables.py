"""Plain torch: `nn.EmbeddingBag(sparse=True)` with torch.optim, one table per slot or one for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.cases import LEARNING_RATE, Case, Optimizer
from benchmarks.systems.base import UnavailableError
from benchmarks.systems.torch_system import TorchSystem, uniform_
from benchmarks.workload import Batch, row_numbers

__all__ = ["TorchFused", "TorchTables"]


def _bag(num_rows: int, dim: int) -> nn.EmbeddingBag:
    weight = torch.empty(num_rows, dim)
    uniform_(weight)
    return nn.EmbeddingBag(num_rows, dim, mode="sum", sparse=True, _weight=weight)


def _optimizer(name: Optimizer, bags: nn.ModuleList) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(bags.parameters(), lr=LEARNING_RATE)
    if name == "adagrad":
        return torch.optim.Adagrad(bags.parameters(), lr=LEARNING_RATE, initial_accumulator_value=1e-2)
    if name == "adam":
        return torch.optim.SparseAdam(list(bags.parameters()), lr=LEARNING_RATE)
    raise UnavailableError(f"torch.optim has no sparse {name}")


class _TorchBags(TorchSystem):
    """Bags whose gradients are sparse tensors, which the optimizer coalesces and applies."""

    def __init__(self, case: Case, table_rows: tuple[int, ...]) -> None:
        super().__init__(case)
        # The default, said so that torch need not warn.
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        self._bags = nn.ModuleList(_bag(rows, case.dim) for rows in table_rows)
        self._optimizer = _optimizer(case.optimizer, self._bags)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class TorchTables(_TorchBags):
    """One table per slot; the slots' outputs are concatenated."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, case.table_rows)

    def prepare_ids(self, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = row_numbers(batch, self.case.table_rows)
        ends = batch.lengths.sum(axis=1).cumsum()
        return [
            (torch.from_numpy(slot_rows), torch.from_numpy(_offsets(lengths)))
            for slot_rows, lengths in zip(np.split(rows, ends[:-1]), batch.lengths, strict=True)
        ]

    def pooled(self, ids: Any) -> torch.Tensor:
        return torch.cat([bag(*slot) for bag, slot in zip(self._bags, ids, strict=True)], dim=1)


class TorchFused(_TorchBags):
    """One table for all slots, each at its own range of rows; IDs come sample-major, so that the one
    output [batch * num_slots, dim] is the concatenation already.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case, (sum(case.table_rows),))
        self._first_rows = np.concatenate([[0], np.cumsum(case.table_rows)[:-1]])

    def prepare_ids(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        num_slots, batch_size = batch.lengths.shape
        rows = row_numbers(batch, self.case.table_rows)
        rows += np.repeat(self._first_rows, batch.lengths.sum(axis=1))
        sample_major = np.arange(num_slots * batch_size).reshape(num_slots, batch_size).T.ravel()
        bags = np.split(rows, batch.lengths.ravel().cumsum()[:-1])
        lengths = batch.lengths.ravel()[sample_major]
        return (
            torch.from_numpy(np.concatenate([bags[index] for index in sample_major])),
            torch.from_numpy(_offsets(lengths)),
        )

    def pooled(self, ids: Any) -> torch.Tensor:
        pooled: torch.Tensor = self._bags[0](*ids)
        return pooled.view(self.case.workload.batch_size, -1)


def _offsets(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each bag begins, from the bags' lengths."""
    return np.concatenate([[0], np.cumsum(lengths)[:-1]])
