"""Data sets and the loader that training loops iterate.

`Dataloader`, `Dataloder` and `PersiaDataset` are spellings of the published documentation. Loaded when first
used: a data loader process, which needs none of them, does not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persia.data.dataloader import DataLoader
    from persia.data.dataset import IterableDataset, IterableDatasetBase, StreamingDataset
    from persia.data.parquet import ParquetBatches
    from persia.pipeline.batch import PersiaTrainingBatch

    Dataloader = Dataloder = DataLoader
    PersiaDataset = IterableDatasetBase

__all__ = [
    "DataLoader",
    "Dataloader",
    "Dataloder",
    "IterableDataset",
    "IterableDatasetBase",
    "ParquetBatches",
    "PersiaDataset",
    "PersiaTrainingBatch",
    "StreamingDataset",
]

_PLACES = {
    "DataLoader": ("data.dataloader", "DataLoader"),
    "Dataloader": ("data.dataloader", "DataLoader"),
    "Dataloder": ("data.dataloader", "DataLoader"),
    "IterableDataset": ("data.dataset", "IterableDataset"),
    "IterableDatasetBase": ("data.dataset", "IterableDatasetBase"),
    "ParquetBatches": ("data.parquet", "ParquetBatches"),
    "PersiaDataset": ("data.dataset", "IterableDatasetBase"),
    "PersiaTrainingBatch": ("pipeline.batch", "PersiaTrainingBatch"),
    "StreamingDataset": ("data.dataset", "StreamingDataset"),
}


def __getattr__(name: str) -> object:
    if name in _PLACES:
        module, attribute = _PLACES[name]
        return getattr(importlib.import_module(f"persia.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
