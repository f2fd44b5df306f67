"""Several requests answered by one computation: features end to end, predictions cut apart again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.embedding.data import IDTypeFeature, NonIDTypeFeature, PersiaBatch
from persia.errors import DeadlineExceededError, InternalError, PersiaError, UnavailableError
from persia.logger import get_default_logger


@dataclass(frozen=True)
class Prediction:
    """The answer to one request, or to a batch of them."""

    version: str
    outputs: list[NDArray[Any]]
    has_default_rows: bool = False  # zeros in place of all rows: a server of rows was down
    is_canary: bool = False

    @property
    def parameters(self) -> dict[str, bool]:
        """Of the reply, in both protocols."""
        marks = {"default_rows": self.has_default_rows, "canary": self.is_canary}
        return {name: True for name, is_set in marks.items() if is_set}


# Computes one batch with the current version.
Predict = Callable[[PersiaBatch], Prediction]


def predict_together(predict: Predict, batches: Sequence[PersiaBatch]) -> list[Prediction | PersiaError]:
    """An answer to each of `batches`, which must have one layout."""
    try:
        together = predict(merged(batches))
        parts = split(together.outputs, [batch.batch_size for batch in batches])
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
    return [replace(together, outputs=part) for part in parts]


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
    ids = _joined_ids([batch.id_type_features for batch in batches])
    dense = []
    for i, first in enumerate(batches[0].non_id_type_features):
        parts = [batch.non_id_type_features[i].data for batch in batches]
        dense.append(NonIDTypeFeature(np.concatenate(parts), first.name))
    return PersiaBatch(ids, dense, requires_grad=False)


def split(outputs: Sequence[NDArray[Any]], batch_sizes: Sequence[int]) -> list[list[NDArray[Any]]]:
    bounds = np.cumsum(batch_sizes)[:-1]
    parts = [np.split(output, bounds) for output in outputs]
    return [[part[i] for part in parts] for i in range(len(batch_sizes))]


def _joined_ids(requests: Sequence[Sequence[IDTypeFeature]]) -> list[IDTypeFeature]:
    """Feature by feature, the IDs of all requests end to end.

    Offsets of all features are computed together, as numpy's calls cost more than the work of small requests.
    """
    features = list(zip(*requests, strict=True))  # of each feature, those of all requests
    num_samples = [request[0].batch_size for request in requests]
    num_ids = np.array([[len(feature.ids) for feature in column] for column in features])
    # Offsets of a request's feature count from its own first ID.
    starts = np.cumsum(num_ids, axis=1) - num_ids
    ends = np.concatenate([feature.offsets[1:] for column in features for feature in column])
    offsets = np.zeros((len(features), 1 + sum(num_samples)), np.uint32)
    offsets[:, 1:] = ends.reshape(len(features), -1) + np.repeat(starts, num_samples, axis=1)
    return [_joined(column, offsets[i]) for i, column in enumerate(features)]


def _joined(column: Sequence[IDTypeFeature], offsets: NDArray[np.uint32]) -> IDTypeFeature:
    weights = None
    if column[0].weights is not None:
        weights = np.concatenate([feature.weights for feature in column if feature.weights is not None])
    # Every part was checked when its request was read.
    return IDTypeFeature._of(
        column[0].name, np.concatenate([feature.ids for feature in column]), offsets, weights
    )
