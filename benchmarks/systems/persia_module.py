"""Our side: `persia.nn.EmbeddingBagCollection`, a dynamic hash table that takes 64-bit IDs as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import persia
from benchmarks.cases import Case
from benchmarks.machine import resident_bytes
from benchmarks.systems.persia_optimizers import sparse_optimizer
from benchmarks.systems.torch_system import TorchSystem
from benchmarks.workload import Batch, resident_batches, resident_ids
from persia.config import SlotConfig
from persia.nn import EmbeddingBagCollection

__all__ = ["FILL_BATCH", "PersiaModule"]

FILL_BATCH = 1 << 13  # IDs: what one call of the filling inserts at most
_NO_BOUND = 1_000_000_000  # rows: the module's default


class PersiaModule(TorchSystem):
    """Filled with as many rows as the arrays of the other side have."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._collection = EmbeddingBagCollection(
            {f"f{slot}": self.slot(num_rows) for slot, num_rows in enumerate(case.table_rows)},
            optimizer=sparse_optimizer(case.optimizer),
            num_threads=case.threads,
            capacity=case.capacity or _NO_BOUND,
        )
        # Once for nothing: libraries set themselves up, and what batches need whatever the table's size is
        # there before the memory of rows is measured.
        self.fill(tuple(min(rows, FILL_BATCH) for rows in case.table_rows))
        self._collection.clear()
        # The arrays that the largest slot's IDs are made in: tuned malloc keeps such memory.
        largest = int(np.argmax(case.table_rows))
        resident_ids(largest, case.table_rows[largest], case.workload, case.fill)
        before = resident_bytes()
        self.fill(case.table_rows)
        stats = self._collection.stats()
        self._filled = {
            "filled_rows": float(stats.num_rows),
            "reported_bytes": float(stats.memory_bytes),
            "rss_growth_bytes": float(resident_bytes() - before),
        }

    def slot(self, num_rows: int) -> int | SlotConfig:
        """Of a table of so many rows."""
        return self.case.dim

    def fill(self, table_rows: tuple[int, ...]) -> None:
        """Inserts IDs by looking them up in training mode; nothing is updated."""
        for values, lengths in resident_batches(table_rows, self.case.workload, self.case.fill):
            self._collection(torch.from_numpy(values), torch.from_numpy(lengths))

    def prepare_ids(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(batch.values), torch.from_numpy(batch.lengths)
        if self.case.work == "lookup":  # which inserts nothing itself: every ID shall be found
            self._collection.train()
            self._collection(*ids)
            self._collection.eval()
        return ids

    def pooled(self, ids: Any) -> torch.Tensor:
        pooled: torch.Tensor = self._collection(*ids)
        return pooled

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "persia": persia.__version__}

    def counters(self) -> dict[str, float]:
        stats = self._collection.stats()
        return {**self._filled, "rows": stats.num_rows, "evicted": stats.num_evicted}
