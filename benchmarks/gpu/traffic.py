"""What is trained: DLRM over slots of one or of many IDs, whose batches every system gets."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from benchmarks.workload import Batch, Workload, make_batches, row_numbers
from persia.models.dlrm import DLRM

__all__ = ["CASES", "QUICK_CASES", "Case", "Traffic", "new_model"]

LEARNING_RATE, EPS = 0.02, 1e-10


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    num_slots: int
    batch_size: int
    dim: int
    ids_per_sample: int = 1
    cardinality: int = 100_000  # of each slot
    num_batches: int = 24

    @property
    def name(self) -> str:
        ids = "" if self.ids_per_sample == 1 else f" x {self.ids_per_sample} IDs"
        return f"{self.num_slots} slots{ids}, batch {self.batch_size}, dim {self.dim}"


CASES = (
    *(Case(26, batch_size, dim) for batch_size in (4096, 16384) for dim in (16, 64, 128)),
    *(Case(8, 4096, dim, ids_per_sample=20) for dim in (16, 64)),
)
QUICK_CASES = (
    Case(4, 32, 8, cardinality=100, num_batches=3),
    Case(2, 32, 8, ids_per_sample=3, cardinality=100, num_batches=3),
)


class Traffic:
    """The batches of a case, as the systems want them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        mean = None if case.ids_per_sample == 1 else float(case.ids_per_sample)
        workload = Workload((case.cardinality,) * case.num_slots, case.batch_size, case.num_batches, mean)
        self.batches: list[Batch] = make_batches(workload)

    def ids(self, batch: Batch) -> list[tuple[np.ndarray, np.ndarray]]:
        """(IDs, offsets) of each slot."""
        offsets = np.zeros((self.case.num_slots, self.case.batch_size + 1), np.uint32)
        np.cumsum(batch.lengths, axis=1, out=offsets[:, 1:])
        ids = np.split(batch.values.view(np.uint64), batch.lengths.sum(axis=1).cumsum()[:-1])
        return list(zip(ids, offsets, strict=True))

    def rows(self, batch: Batch, *, one_table: bool) -> tuple[np.ndarray, np.ndarray]:
        """(row numbers, offsets): in a table for each slot, or in one with the rows of all slots."""
        numbers = row_numbers(batch, (self.case.cardinality,) * self.case.num_slots)
        if one_table:
            first_rows = np.arange(self.case.num_slots) * self.case.cardinality
            numbers += np.repeat(first_rows, batch.lengths.sum(axis=1))
        return numbers, np.concatenate([[0], batch.lengths.ravel().cumsum()])


def new_model(case: Case) -> DLRM:
    torch.manual_seed(1)
    return DLRM(
        13,
        case.num_slots,
        case.dim,
        bottom_mlp_sizes=(512, 256, case.dim),
        top_mlp_sizes=(1024, 512, 256, 1),
    )
