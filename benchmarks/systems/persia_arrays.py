"""Our side with `index: array`: rows by ID, for the row numbers that array-backed systems get."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from benchmarks.systems.persia_module import FILL_BATCH, PersiaModule
from benchmarks.workload import Batch, row_numbers
from persia.config import SlotConfig

__all__ = ["PersiaArrays"]


class PersiaArrays(PersiaModule):
    """Filled with a row for each place of the arrays."""

    def slot(self, num_rows: int) -> SlotConfig:
        return SlotConfig(dim=self.case.dim, index="array", cardinality=num_rows)

    def fill(self, table_rows: tuple[int, ...]) -> None:
        for slot, num_rows in enumerate(table_rows):
            for begin in range(0, num_rows, FILL_BATCH):
                ids = torch.arange(begin, min(begin + FILL_BATCH, num_rows))
                lengths = torch.zeros(len(table_rows), FILL_BATCH, dtype=torch.int64)
                lengths[slot, : len(ids)] = 1
                self._collection(ids, lengths)

    def prepare_ids(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = row_numbers(batch, self.case.table_rows)
        return super().prepare_ids(dataclasses.replace(batch, values=np.ascontiguousarray(numbers)))
