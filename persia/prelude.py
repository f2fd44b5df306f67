"""What scripts of the published system import from its native module.

Little of that has a counterpart: the native code of this package stands behind contexts and features. Asking
for a name that has none says what takes its place; docs/published_system.md lists the same names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persia.pipeline.batch import PersiaTrainingBatch

__all__ = ["REPLACEMENTS", "PersiaTrainingBatch", "is_cuda_feature_available"]

_GRADIENTS = "`TrainCtx.backward` returns gradients"
_EMBEDDINGS = "`PersiaTrainingBatch.consume_all_id_type_feature_embedding_tensors` gives torch tensors"
_QUEUE = "a queue of Python's `multiprocessing`: the published package did not use it itself"
_DATA_SETS = "a subclass of `persia.data.IterableDataset` with `__iter__`"

# Published name -> what to use instead.
REPLACEMENTS = {
    "PyPersiaBatchData": "`persia.embedding.data.PersiaBatch` with its `to_bytes`",
    "PersiaCommonContext": "the contexts of `persia.ctx`, whose methods these are",
    "Tensor": "torch tensors",
    "Embedding": _EMBEDDINGS,
    "GradientBatch": _GRADIENTS,
    "Backward": _GRADIENTS,
    "Forward": "`persia.data.DataLoader`",
    "PersiaBatchDataChannel": _DATA_SETS,
    "PersiaBatchDataSender": _DATA_SETS,
    "PersiaBatchDataReceiver": _DATA_SETS,
    "PersiaMessageQueueServer": _QUEUE,
    "PersiaMessageQueueClient": _QUEUE,
    "check_pyarray_dtype_valid": "`persia.embedding.data.NonIDTypeFeature`, which checks when it is made",
}


def is_cuda_feature_available() -> bool:
    """Whether this installation can use CUDA: whether torch was built with it."""
    import torch

    return bool(torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]


def __getattr__(name: str) -> object:
    if name == "PersiaTrainingBatch":
        return importlib.import_module("persia.pipeline.batch").PersiaTrainingBatch
    if name in REPLACEMENTS:
        # As an AttributeError, `from persia.prelude import ...` would replace it by one that gives no reason.
        raise ImportError(f"persia.prelude has no {name}: use {REPLACEMENTS[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
