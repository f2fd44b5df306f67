"""persia: a PyTorch-native hybrid trainer for recommendation models that do not fit one machine.

The names of a training script are here: `from persia import TrainCtx, DataLoader, optim`. All are loaded
when they are first used, so that `import persia`, the servers and `persia-launcher --help` do not pay for
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from persia._version import __version__

if TYPE_CHECKING:
    from persia import ctx, data, embedding, logger, nn, prelude, service, utils
    from persia.ctx import DataCtx, EmbeddingCtx, InferCtx, Recovery, TrainCtx, eval_ctx
    from persia.data import DataLoader, IterableDataset, StreamingDataset
    from persia.embedding import EmbeddingConfig, optim
    from persia.embedding.data import (
        IDTypeFeature,
        IDTypeFeatureWithSingleID,
        Label,
        NonIDTypeFeature,
        PersiaBatch,
    )
    from persia.nn import EmbeddingBagCollection

__all__ = [
    "DataCtx",
    "DataLoader",
    "EmbeddingBagCollection",
    "EmbeddingConfig",
    "EmbeddingCtx",
    "IDTypeFeature",
    "IDTypeFeatureWithSingleID",
    "InferCtx",
    "IterableDataset",
    "Label",
    "NonIDTypeFeature",
    "PersiaBatch",
    "Recovery",
    "StreamingDataset",
    "TrainCtx",
    "__version__",
    "ctx",
    "data",
    "embedding",
    "eval_ctx",
    "logger",
    "nn",
    "optim",
    "prelude",
    "service",
    "utils",
]

_MODULES = {
    "DataCtx": "ctx",
    "DataLoader": "data",
    "EmbeddingBagCollection": "nn",
    "EmbeddingConfig": "embedding",
    "EmbeddingCtx": "ctx",
    "IDTypeFeature": "embedding.data",
    "IDTypeFeatureWithSingleID": "embedding.data",
    "InferCtx": "ctx",
    "IterableDataset": "data",
    "Label": "embedding.data",
    "NonIDTypeFeature": "embedding.data",
    "PersiaBatch": "embedding.data",
    "Recovery": "ctx",
    "StreamingDataset": "data",
    "TrainCtx": "ctx",
    "eval_ctx": "ctx",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"persia.{_MODULES[name]}"), name)
    if name == "optim":
        return importlib.import_module("persia.embedding.optim")
    if name in __all__:
        return importlib.import_module(f"persia.{name}")
    raise AttributeError(f"module 'persia' has no attribute {name!r}")
