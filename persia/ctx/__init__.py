"""The contexts that scripts enter: `DataCtx` in data loaders, `TrainCtx` and `eval_ctx` in NN workers,
`InferCtx` in inference servers.

Loaded when first used: a data loader does not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persia.ctx.base import BaseCtx, PreprocessMode, cnt_ctx
    from persia.ctx.data import DataCtx
    from persia.ctx.embedding import EmbeddingCtx, eval_ctx
    from persia.ctx.evaluation import evaluate
    from persia.ctx.infer import InferCtx
    from persia.ctx.recovery import Recovery
    from persia.ctx.train import TrainCtx

__all__ = [
    "BaseCtx",
    "DataCtx",
    "EmbeddingCtx",
    "InferCtx",
    "PreprocessMode",
    "Recovery",
    "TrainCtx",
    "cnt_ctx",
    "eval_ctx",
    "evaluate",
]

_MODULES = {
    "BaseCtx": "base",
    "DataCtx": "data",
    "EmbeddingCtx": "embedding",
    "InferCtx": "infer",
    "PreprocessMode": "base",
    "Recovery": "recovery",
    "TrainCtx": "train",
    "cnt_ctx": "base",
    "eval_ctx": "embedding",
    "evaluate": "evaluation",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
