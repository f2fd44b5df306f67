"""ROC AUC in a few lines of NumPy, so that the example needs no further dependency for one number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def roc_auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """The probability that a positive sample scores above a negative one, ties counting half.

    Raises ValueError unless both classes occur, and for scores that are not finite.
    """
    positive = np.ravel(labels) > 0.5
    scores = np.ravel(scores).astype(np.float64)
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        raise ValueError(
            f"AUC needs both classes: {num_positive} positive and {num_negative} negative labels given"
        )
    if not np.isfinite(scores).all():
        raise ValueError("AUC needs finite scores: the model's output holds NaN or infinity")
    _, group, group_size = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(group_size)
    mean_rank = last_rank - (group_size - 1) / 2  # Equal scores share the mean of their ranks.
    rank_sum = float(mean_rank[group][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
