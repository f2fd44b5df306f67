"""A generated data set with the shape of Adult, for machines with neither network nor copy of the real one.

Labels are drawn from known probabilities, so the best AUC that a model can be expected to reach is known
too, and a run on this data is judged against that number, never against the published one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataset import CATEGORICAL, CONTINUOUS, DatasetInfo, Split
from metrics import roc_auc

TRAIN_ROWS, TEST_ROWS = 32_561, 16_281
NUM_CATEGORIES = dict(zip(CATEGORICAL, (9, 16, 7, 15, 6, 5, 2, 42), strict=True))


def generate(seed: int = 0) -> tuple[DatasetInfo, Split, Split]:
    """The same data for the same seed, on every machine."""
    rng = np.random.default_rng(seed)
    rows = TRAIN_ROWS + TEST_ROWS
    ids = np.stack([_skewed(rng, num, rows) for num in NUM_CATEGORIES.values()], axis=1)
    dense = rng.standard_normal((rows, len(CONTINUOUS)), dtype=np.float32)
    probabilities = _probabilities(rng, ids, dense)
    labels = (rng.random(rows) < probabilities).astype(np.float32)[:, None]
    train, test = slice(0, TRAIN_ROWS), slice(TRAIN_ROWS, rows)
    info = DatasetInfo(
        dataset="generated",
        train_rows=TRAIN_ROWS,
        test_rows=TEST_ROWS,
        num_categories=dict(NUM_CATEGORIES),
        best_auc=roc_auc(labels[test], probabilities[test]),
    )
    return (
        info,
        Split(ids=ids[train], dense=dense[train], labels=labels[train]),
        Split(ids=ids[test], dense=dense[test], labels=labels[test]),
    )


def _skewed(rng: np.random.Generator, num_categories: int, rows: int) -> NDArray[np.uint64]:
    weights = 1.0 / np.arange(1, num_categories + 1)
    return rng.choice(num_categories, size=rows, p=weights / weights.sum()).astype(np.uint64)


def _probabilities(
    rng: np.random.Generator, ids: NDArray[np.uint64], dense: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Logits sum effects of categories and columns: what a model linear up to its sigmoid can represent."""
    effects = [rng.standard_normal(num) for num in NUM_CATEGORIES.values()]
    categorical = sum(effect[ids[:, column]] for column, effect in enumerate(effects))
    logits = -1.5 + categorical + dense @ rng.normal(scale=0.5, size=dense.shape[1])
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))
