"""Synthetic clicks: the power law, the planted model's AUC, and that written and streamed data are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from persia.data import CRITEO_CARDINALITIES, ParquetBatches, SplitBinaryBatches, SyntheticClicks
from persia.errors import InvalidArgumentError

SIZES = [3, 1000, 40_000]


def clicks(**changes: Any) -> SyntheticClicks:
    return SyntheticClicks(SIZES, **({"num_batches": 4, "batch_size": 500, "num_numerical": 2} | changes))


def test_cardinalities_are_those_of_criteo() -> None:
    assert {limit: len(sizes) for limit, sizes in CRITEO_CARDINALITIES.items()} == {15: 26, 3: 26, 0: 26}
    # Parameters of NVIDIA's models of embedding dim 128: 4.2, 22.8 and 113 billion.
    billions = {limit: sum(sizes) * 128 / 1e9 for limit, sizes in CRITEO_CARDINALITIES.items()}
    assert {limit: round(count, 1) for limit, count in billions.items()} == {15: 4.2, 3: 22.8, 0: 113.0}


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.45])
def test_ids_follow_the_power_law(alpha: float) -> None:
    batch = SyntheticClicks([1000], num_batches=1, batch_size=50_000, alpha=alpha, num_numerical=0)
    ids = batch.columns(0)[1][0]
    assert ids.min() >= 0
    assert ids.max() < 1000
    # Shares of the ID ranges [0, 1), [1, 10), [10, 100) and [100, 1000), by the integral of x ** -alpha.
    edges = np.array([0, 1, 10, 100, 1000])
    integral = np.log(edges + 1.0) if alpha == 1 else (edges + 1.0) ** (1 - alpha) / (1 - alpha)
    expected = np.diff(integral) / (integral[-1] - integral[0])
    shares = np.histogram(ids, edges)[0] / len(ids)
    np.testing.assert_allclose(shares, expected, atol=0.01)


def test_best_auc_is_that_of_the_planted_logits() -> None:
    source = clicks()
    columns = [source.columns(batch) for batch in range(4)]
    labels, logits = (np.concatenate([batch[index] for batch in columns]) for index in (2, 3))
    assert source.best_auc() == pytest.approx(roc_auc_score(labels, logits), abs=1e-6)
    # Each logit is the true probability of its label.
    assert labels.mean() == pytest.approx((1 / (1 + np.exp(-logits))).mean(), abs=0.03)
    assert clicks(seed=1).best_auc() != source.best_auc()


def test_the_planted_model_is_that_of_its_seed() -> None:
    def effect(source: SyntheticClicks) -> Any:
        numerical, categorical, _, logits = source.columns(0)
        features = np.concatenate([numerical, np.stack(categorical, axis=1) == 0], axis=1)
        return np.linalg.lstsq(np.column_stack([features, np.ones(len(logits))]), logits, rcond=None)[0][:2]

    # The numerical effects, found again from other rows.
    np.testing.assert_allclose(
        effect(clicks(seed=1, strength=1)), effect(clicks(seed=2, strength=1)), atol=0.2
    )
    assert not np.allclose(effect(clicks(planted_seed=3)), effect(clicks(planted_seed=4)), atol=0.2)


def test_rare_ids_have_no_effect() -> None:
    source = SyntheticClicks([10_000], num_batches=1, num_known=5, num_numerical=0, alpha=0.5, bias=-2)
    _, (ids,), _, logits = source.columns(0)
    assert set(logits[ids >= 5]) == {-2.0}
    assert -2.0 not in logits[ids < 5]
    assert (ids < 5).any()


def equal(batch: Any, other: Any) -> None:
    for ours, theirs in zip(batch.id_type_features, other.id_type_features, strict=True):
        assert np.array_equal(ours.ids, theirs.ids)
        assert np.array_equal(ours.offsets, theirs.offsets)
    assert np.array_equal(batch.non_id_type_features[0].data, other.non_id_type_features[0].data)
    assert np.array_equal(batch.labels[0].data, other.labels[0].data)


def test_split_binary_has_what_is_streamed(tmp_path: Path) -> None:
    source = clicks(hotness=[1, 4, 2])
    source.write_split_binary(str(tmp_path))
    written = SplitBinaryBatches(tmp_path, batch_size=500)
    written.check_values()
    assert len(written) == len(source)
    for number in source.read():
        made = source.make(number, requires_grad=False)
        equal(written.make(number, requires_grad=False), made)
    assert [feature.name for feature in made.id_type_features] == list(written.spec.categorical)


def test_parquet_has_what_is_streamed(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source = clicks(hotness=[1, 4, 2])
    source.write_parquet(str(tmp_path / "clicks.parquet"))
    written = ParquetBatches(
        str(tmp_path), labels=["label"], dense=["I1", "I2"], ids=["C1", "C2", "C3"], batch_size=500
    )
    assert [file.name for file in tmp_path.iterdir()] == ["clicks.parquet"]
    for number, rows in enumerate(written.read()):
        equal(written.make(rows, requires_grad=False), source.make(number, requires_grad=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hotness": [1, 2]}, "hotness has 2 values, cardinalities 3"),
        ({"hotness": [1, 2, 0]}, "hotness is 0"),
        ({"alpha": -1}, "alpha=-1 must be at least 0"),
        ({"batch_size": 65_536}, "batch_size=65536 is above 65535"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        clicks(**changes)
