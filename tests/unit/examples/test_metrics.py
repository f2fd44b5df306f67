"""AUC against its definition, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics import roc_auc


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=40))
def test_auc_is_the_share_of_pairs_in_order(samples: list[tuple[bool, int]]) -> None:
    positive = [score for label, score in samples if label]
    negative = [score for label, score in samples if not label]
    labels = np.array([label for label, _ in samples], dtype=np.float32)
    scores = np.array([score for _, score in samples], dtype=np.float32)
    if not positive or not negative:
        with pytest.raises(ValueError, match="both classes"):
            roc_auc(labels, scores)
        return
    wins = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    assert roc_auc(labels, scores) == pytest.approx(np.mean(wins))


def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        roc_auc(np.array([0.0, 1.0]), np.array([0.5, np.nan]))
