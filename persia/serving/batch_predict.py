"""Several requests answered by one computation: features end to end, predictions cut apart again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.embedding.data import IDTypeFeature, NonIDTypeFeature, PersiaBatch
from persia.errors import DeadlineExceededError, InternalError, PersiaError, UnavailableError
from persia.logger import get_default_logger

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
        # A peer that does not answer would not answer the batches one by one either, and each would wait for
        # it.
        if len(batches) == 1 or isinstance(failure, (UnavailableError, DeadlineExceededError)):
            if not isinstance(failure, PersiaError):
                get_default_logger().error("a prediction failed", exc_info=failure)
                what = f"the prediction failed: {type(failure).__name__}: {failure}"
                return [InternalError(what)] * len(batches)
            return [failure] * len(batches)
        # One batch's fault must not be the others': each gets an answer of its own.
        return [predict_together(predict, [batch])[0] for batch in batches]
    return [Prediction(version, part) for part in parts]


# What batches must have in common to become one: names in order, dtypes and shapes of a sample.
Layout = tuple[Any, ...]


def layout_of(batch: PersiaBatch) -> Layout:
    # By name and in order: the model gets embeddings by position.
    ids = tuple((feature.name, feature.weights is None) for feature in batch.id_type_features)
    dense = tuple(
        (feature.name, feature.data.dtype.str, feature.data.shape[1:])
        for feature in batch.non_id_type_features
    )
    return ids, dense


def merged(batches: Sequence[PersiaBatch]) -> PersiaBatch:
    """One batch of all samples, in order, without labels. All must have one layout."""
    if len(batches) == 1:
        return batches[0]
    ids = [
        _joined_ids([batch.id_type_features[i] for batch in batches])
        for i in range(len(batches[0].id_type_features))
    ]
    dense = []
    for i, first in enumerate(batches[0].non_id_type_features):
        parts = [batch.non_id_type_features[i].data for batch in batches]
        dense.append(NonIDTypeFeature(np.concatenate(parts), first.name))
    return PersiaBatch(ids, dense, requires_grad=False)


def split(outputs: Sequence[NDArray[Any]], batch_sizes: Sequence[int]) -> list[list[NDArray[Any]]]:
    bounds = np.cumsum(batch_sizes)[:-1]
    parts = [np.split(output, bounds) for output in outputs]
    return [[part[i] for part in parts] for i in range(len(batch_sizes))]


def _joined_ids(features: Sequence[IDTypeFeature]) -> IDTypeFeature:
    # Offsets of a feature count from its own first ID.
    starts = np.cumsum([0, *(len(feature.ids) for feature in features[:-1])])
    offsets = [
        feature.offsets[1:].astype(np.int64) + start for feature, start in zip(features, starts, strict=True)
    ]
    weights = None
    if features[0].weights is not None:
        weights = np.concatenate([feature.weights for feature in features if feature.weights is not None])
    return IDTypeFeature.from_csr(
        features[0].name,
        np.concatenate([feature.ids for feature in features]),
        np.concatenate([[0], *offsets]).astype(np.int64),
        weights,
    )
