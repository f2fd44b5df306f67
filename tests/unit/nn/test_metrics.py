"""ClickMetrics against scikit-learn, and what its window holds."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist

from persia.errors import InvalidArgumentError, InvalidTypeError
from persia.nn.metrics import ClickMetrics, ClickQuality

SAMPLES = st.lists(
    st.tuples(
        # Few distinct values, so that there are ties; and any in between.
        st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1, width=32)),
        st.booleans(),
        st.sampled_from([-5, 0, 3, 2**62]),
    ),
    min_size=1,
    max_size=60,
)


def columns(samples: list[tuple[float, bool, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    predictions, labels, users = zip(*samples, strict=True)
    return torch.tensor(predictions), torch.tensor(labels).float(), torch.tensor(users)


def expected_quality(predictions: Any, labels: Any, users: Any) -> dict[str, float]:
    """By scikit-learn, in float64."""
    sklearn = pytest.importorskip("sklearn.metrics")
    predictions, labels = predictions.astype(np.float64), labels.astype(np.float64)

    def auc(mask: Any) -> float:
        chosen = labels[mask]
        if len(set(chosen)) < 2:
            return math.nan
        return float(sklearn.roc_auc_score(chosen, predictions[mask]))

    by_user = [(auc(users == user), int((users == user).sum())) for user in set(users)]
    known = [(value, count) for value, count in by_user if not math.isnan(value)]
    epsilon = np.finfo(np.float32).eps  # what scikit-learn, too, takes for 0 in a float32
    log_loss = float(sklearn.log_loss(labels, predictions.clip(epsilon, 1 - epsilon), labels=[0, 1]))
    rate = labels.mean()
    base = float(sklearn.log_loss(labels, np.full(len(labels), rate), labels=[0, 1]))
    total = sum(count for _, count in known)
    return {
        "auc": auc(np.ones(len(labels), bool)),
        "gauc": sum(value * count for value, count in known) / total if total else math.nan,
        "log_loss": log_loss,
        "normalized_entropy": log_loss / base if 0 < rate < 1 else math.nan,
        "calibration": predictions.mean() / rate if rate else math.nan,
    }


def assert_quality(found: ClickQuality, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), name


@settings(max_examples=300, deadline=None, derandomize=True)
@given(samples=SAMPLES, window=st.integers(1, 80), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_any_batches_over_any_window(
    samples: list[tuple[float, bool, int]], window: int, cuts: list[int]
) -> None:
    batch = columns(samples)
    metrics = ClickMetrics(window)
    bounds = [0, *sorted(min(cut, len(samples)) for cut in cuts), len(samples)]
    for begin, end in itertools.pairwise(bounds):
        metrics.update(*(column[begin:end] for column in batch))
    predictions, labels, users = (column[-window:].numpy() for column in batch)
    found = metrics.compute()
    assert (found.num_samples, found.num_nonfinite) == (len(predictions), 0)
    assert_quality(found, expected_quality(predictions, labels, users))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(samples=SAMPLES)
def test_logits(samples: list[tuple[float, bool, int]]) -> None:
    predictions, labels, users = columns(samples)
    logits = (predictions - 0.5) * 8
    of_logits, of_probabilities = ClickMetrics(from_logits=True), ClickMetrics()
    of_logits.update(logits, labels, users)
    of_probabilities.update(torch.sigmoid(logits), labels, users)
    found, expected = of_logits.compute(), of_probabilities.compute()
    for name in ("log_loss", "normalized_entropy", "calibration"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5, nan_ok=True)
    assert found.auc == pytest.approx(expected.auc, abs=1e-6, nan_ok=True)


def test_logits_of_any_size_have_a_loss() -> None:
    metrics = ClickMetrics(from_logits=True)
    metrics.update(torch.tensor([1000.0, -1000.0]), torch.tensor([0, 1]))
    found = metrics.compute()
    assert (found.log_loss, found.auc, found.calibration) == (1000.0, 0.0, 1.0)


def test_a_large_window_is_exact() -> None:
    generator = np.random.default_rng(0)
    predictions = generator.random(200_000).astype(np.float32).round(3)
    labels = (generator.random(200_000) < predictions).astype(np.float32)
    users = generator.integers(0, 500, 200_000)
    metrics = ClickMetrics(200_000)
    metrics.update(*(torch.from_numpy(column) for column in (predictions, labels, users)))
    assert_quality(metrics.compute(), expected_quality(predictions, labels, users))


def test_predictions_that_are_not_finite_are_left_out_and_counted() -> None:
    metrics = ClickMetrics()
    nan, infinity = math.nan, math.inf
    metrics.update(torch.tensor([nan, 0.2, 0.9, infinity]), torch.tensor([0, 0, 1, 1]), torch.arange(4))
    found = metrics.compute()
    assert (found.num_samples, found.num_nonfinite, found.auc) == (2, 2, 1.0)


def test_without_samples_and_after_reset() -> None:
    metrics = ClickMetrics()
    metrics.update(torch.tensor([[0.5]]), torch.tensor([[1]]), torch.tensor([3]))
    metrics.reset()
    found = metrics.compute()
    assert found.num_samples == 0
    values = (found.auc, found.log_loss, found.normalized_entropy, found.calibration)
    assert all(math.isnan(value) for value in values)
    metrics.update(torch.tensor([0.5]), torch.tensor([1]))  # without users now


def test_what_was_not_asked_for_is_not_there() -> None:
    metrics = ClickMetrics()
    metrics.update(torch.tensor([0.25, 0.75]), torch.tensor([0, 1]))
    assert metrics.compute().gauc is None
    assert str(metrics.compute()) == (
        "num_samples=2, num_nonfinite=0, auc=1, log_loss=0.287682, normalized_entropy=0.415037, calibration=1"
    )
    metrics.reset()
    metrics.update(torch.tensor([0.25, 0.75]), torch.tensor([0, 1]), torch.tensor([5, 5]))
    assert "gauc=1, " in str(metrics.compute())


def test_gradients_are_not_kept() -> None:
    weight = torch.ones(1, requires_grad=True)
    metrics = ClickMetrics(window=2)
    metrics.update(weight * 0.5, torch.tensor([1]))
    assert not any(ring.requires_grad for ring in metrics._rings)


@pytest.mark.parametrize(
    ("args", "error", "named"),
    [
        ((torch.tensor([1]), torch.tensor([1])), InvalidTypeError, "predictions is torch.int64"),
        (([0.5], torch.tensor([1])), InvalidTypeError, "predictions is a list"),
        ((torch.rand(2), torch.ones(3)), InvalidArgumentError, "labels has 3 elements.*2 predictions"),
        ((torch.rand(2), torch.ones(2), torch.arange(1)), InvalidArgumentError, "users has 1 elements"),
        ((torch.rand(2), torch.ones(2), torch.rand(2)), InvalidTypeError, "users is torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(args: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        ClickMetrics().update(*args)


def test_users_come_always_or_never_and_labels_are_0_or_1() -> None:
    metrics = ClickMetrics()
    metrics.update(torch.rand(2), torch.tensor([0.0, 0.5]))
    with pytest.raises(InvalidArgumentError, match="users was given with some batches"):
        metrics.update(torch.rand(1), torch.ones(1), torch.arange(1))
    with pytest.raises(InvalidArgumentError, match="labels has 0.5, must be 0 or 1"):
        metrics.compute()
    with pytest.raises(InvalidArgumentError, match="window=0"):
        ClickMetrics(window=0)


# --- ranks ---

MANY = [(((7 * i) % 11) / 10, i % 3 == 0, i % 4) for i in range(50)]


def of_rank(rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(column[:17] if rank == 0 else column[17:] for column in columns(MANY))


def test_two_ranks_have_the_result_of_all_samples(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    alone = ClickMetrics()
    alone.update(*columns(MANY))
    assert outputs == [str(alone.compute())] * 2


def main(store: str, rank: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    metrics = ClickMetrics()
    metrics.update(*of_rank(int(rank)))
    print(metrics.compute(dist.group.WORLD))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
