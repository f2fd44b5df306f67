"""Several batches answered by one computation, each for itself when that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from persia.embedding.data import PersiaBatch
from persia.errors import DeadlineExceededError, InternalError, PersiaError, UnavailableError
from persia.logger import get_default_logger
from persia.serving.merging import merged, split

__all__ = ["Predict", "Prediction", "predict_together"]

# Computes one batch with the current version: (version, outputs).
Predict = Callable[[PersiaBatch], tuple[str, list[NDArray[Any]]]]


@dataclass(frozen=True)
class Prediction:
    """The answer to one request."""

    version: str
    outputs: list[NDArray[Any]]


def predict_together(predict: Predict, batches: Sequence[PersiaBatch]) -> list[Prediction | PersiaError]:
    """An answer to each of `batches`, which must have one layout."""
    try:
        version, outputs = predict(merged(batches))
        parts = split(outputs, [batch.batch_size for batch in batches])
    except Exception as failure:
        if len(batches) == 1 or isinstance(failure, (UnavailableError, DeadlineExceededError)):
            return [_typed(failure)] * len(batches)
        # One batch's fault must not be the others': each gets an answer of its own.
        return [predict_together(predict, [batch])[0] for batch in batches]
    return [Prediction(version, part) for part in parts]


def _typed(failure: Exception) -> PersiaError:
    if isinstance(failure, PersiaError):
        return failure
    get_default_logger().error("a prediction failed", exc_info=failure)
    return InternalError(f"the prediction failed: {type(failure).__name__}: {failure}")
