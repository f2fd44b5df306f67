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
    from persia.data.feature_spec import FeatureSpec, SpecFeature
    from persia.data.opening import open_batches
    from persia.data.parquet import ParquetBatches
    from persia.data.split_binary import SplitBinaryBatches, SplitBinaryWriter
    from persia.data.striped import Batches, StripedBatches
    from persia.data.synthetic import CRITEO_CARDINALITIES, SyntheticClicks
    from persia.pipeline.batch import PersiaTrainingBatch

    Dataloader = Dataloder = DataLoader
    PersiaDataset = IterableDatasetBase

__all__ = [
    "CRITEO_CARDINALITIES",
    "Batches",
    "DataLoader",
    "Dataloader",
    "Dataloder",
    "FeatureSpec",
    "IterableDataset",
    "IterableDatasetBase",
    "ParquetBatches",
    "PersiaDataset",
    "PersiaTrainingBatch",
    "SpecFeature",
    "SplitBinaryBatches",
    "SplitBinaryWriter",
    "StreamingDataset",
    "StripedBatches",
    "SyntheticClicks",
    "open_batches",
]

_PLACES = {
    "CRITEO_CARDINALITIES": ("data.synthetic", "CRITEO_CARDINALITIES"),
    "Batches": ("data.striped", "Batches"),
    "DataLoader": ("data.dataloader", "DataLoader"),
    "Dataloader": ("data.dataloader", "DataLoader"),
    "Dataloder": ("data.dataloader", "DataLoader"),
    "FeatureSpec": ("data.feature_spec", "FeatureSpec"),
    "IterableDataset": ("data.dataset", "IterableDataset"),
    "IterableDatasetBase": ("data.dataset", "IterableDatasetBase"),
    "ParquetBatches": ("data.parquet", "ParquetBatches"),
    "PersiaDataset": ("data.dataset", "IterableDatasetBase"),
    "PersiaTrainingBatch": ("pipeline.batch", "PersiaTrainingBatch"),
    "SpecFeature": ("data.feature_spec", "SpecFeature"),
    "SplitBinaryBatches": ("data.split_binary", "SplitBinaryBatches"),
    "SplitBinaryWriter": ("data.split_binary", "SplitBinaryWriter"),
    "StreamingDataset": ("data.dataset", "StreamingDataset"),
    "StripedBatches": ("data.striped", "StripedBatches"),
    "SyntheticClicks": ("data.synthetic", "SyntheticClicks"),
    "open_batches": ("data.opening", "open_batches"),
}


def __getattr__(name: str) -> object:
    if name in _PLACES:
        module, attribute = _PLACES[name]
        return getattr(importlib.import_module(f"persia.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
