"""EarlyStopping: which evaluation is the best, when to stop, and its state over restarts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from persia.errors import InvalidArgumentError, InvalidTypeError
from persia.nn import ClickQuality, EarlyStopping


def quality(auc: float = math.nan, log_loss: float = math.nan) -> ClickQuality:
    return ClickQuality(
        num_samples=10,
        num_nonfinite=0,
        auc=auc,
        gauc=None,
        log_loss=log_loss,
        normalized_entropy=math.nan,
        calibration=1.0,
    )


def test_patience_counts_evaluations_without_a_new_best() -> None:
    stopping = EarlyStopping(patience=2)
    found = [stopping.update(step, quality(auc)) for step, auc in enumerate([0.5, 0.7, 0.6], start=1)]
    assert found == [True, True, False]
    assert stopping.reason is None
    assert not stopping.update(4, quality(0.7))  # as good is no new best
    assert stopping.reason == "auc was best at step 2 (patience=2)"
    assert (stopping.best_step, stopping.best["auc"]) == (2, 0.7)
    assert "gauc" not in stopping.best


def test_a_lower_loss_is_better() -> None:
    stopping = EarlyStopping("log_loss", target=0.4)
    assert stopping.update(1, quality(log_loss=0.6))
    assert not stopping.update(2, quality(log_loss=0.7))
    assert stopping.reason is None
    assert stopping.update(3, quality(log_loss=0.4))
    assert stopping.reason == "log_loss is that of target=0.4 or better"


def test_an_evaluation_that_is_nan_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStopping(patience=1)
    assert not stopping.update(3, quality())
    assert (stopping.best_step, stopping.since_best, stopping.reason) == (None, 0, None)
    assert "step 3: auc is NaN" in caplog.text


def test_a_restarted_job_continues() -> None:
    first = EarlyStopping(patience=2)
    for step, auc in ((10, 0.7), (20, 0.6)):
        first.update(step, quality(auc))
    second = EarlyStopping(patience=2)
    second.load_state_dict(first.state_dict())
    # Steps up to the best one, trained once more, do not count.
    assert not second.update(10, quality(0.6))
    assert second.reason is None
    assert not second.update(30, quality(0.6))
    assert second.reason == "auc was best at step 10 (patience=2)"


def test_the_best_evaluation_becomes_that_of_the_best_checkpoint() -> None:
    """It may be newer than the checkpoint that a recovery returned to, or removed."""
    newer, stopping = EarlyStopping(), EarlyStopping()
    newer.update(5, quality(0.8))
    stopping.load_state_dict({"best_step": 2, "best": {"auc": 0.1}, "since_best": 3})
    stopping.take_best({"best_step": 2, "best": {"auc": 0.1}, "since_best": 0})
    assert stopping.since_best == 3  # it has it already
    stopping.take_best(newer.state_dict())
    assert (stopping.best_step, stopping.best["auc"], stopping.since_best) == (5, 0.8, 0)
    stopping.take_best({})
    assert (stopping.best_step, stopping.best) == (None, {})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"metric": "accuracy"}, InvalidArgumentError, "metric='accuracy' must be one of auc, log_loss"),
        ({"patience": 0}, InvalidArgumentError, "patience is 0"),
        ({"target": "0.8"}, InvalidTypeError, "target='0.8' is a str"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EarlyStopping(**arguments)
