"""When a canary is rolled back: errors and drift of its last answers, and what counts as neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from persia.errors import InternalError, PersiaError, UnavailableError
from persia.serving.batch_predict import Prediction
from persia.serving.batcher import BatchingOptions
from persia.serving.canary import Canary, CanaryOptions, Trial
from persia.serving.predictor import ModelSettings, Version
from persia.serving.versions import ServedModel
from persia.storage.location import Location
from tests.following import BATCH, answer, reached, wait_until
from tests.packet_trainer import PacketTrainer

FIRST, SECOND = Version("1", "", Mock()), Version("2", "", Mock())


def options(**given: Any) -> CanaryOptions:
    return CanaryOptions(location=Location.of("nowhere"), **given)


def test_errors_of_the_last_hundred_answers_count() -> None:
    trial = Trial(options(max_errors=2))
    for error in ["no rows", "", "no rows", *[""] * 99, "no rows"]:  # the first is forgotten
        trial.add(FIRST, error)
    assert not trial.reason(FIRST)
    trial.add(FIRST, "no rows")
    trial.add(FIRST, "again")
    assert trial.reason(FIRST) == (
        "it failed 3 of its last 100 requests, more than --canary-max-errors 2: again"
    )
    assert (trial.num_errors, trial.num_rollbacks) == (5, 1)
    assert not trial.reason(SECOND), "of a newer version nothing is known"
    for _ in range(2):
        trial.add(SECOND, "no rows")
    assert not trial.reason(SECOND)
    trial.add(SECOND, "no rows")
    assert "3 of its last 3" in trial.reason(SECOND)
    assert trial.num_rollbacks == 2


def test_drift_is_a_mean_of_ten_or_more() -> None:
    trial = Trial(options(drift_limit=0.5))
    trial.add(FIRST, drift=5.0)
    for _ in range(8):
        trial.add(FIRST, drift=0.25)
    assert (trial.drift, trial.reason(FIRST)) == (None, "")
    trial.add(FIRST, drift=0.25)
    assert trial.drift == pytest.approx(0.725)
    assert "by 0.725 on average, more than --canary-max-drift 0.5" in trial.reason(FIRST)


def test_a_canary_is_a_checkpoint_beside_a_version_that_follows_packets(
    serve: Callable[..., ServedModel], trainer: PacketTrainer, tmp_path: Path
) -> None:
    stable = serve()
    trainer.checkpoint(tmp_path / "next", 3.0)
    given = CanaryOptions(location=Location.of(tmp_path / "next"))
    canary = Canary(stable.settings, given, BatchingOptions(), 1)
    try:
        wait_until(lambda: canary.model is not None, lambda: canary.error)
        reached(stable, trainer.trained(2))
        assert answer(stable)[1] == [8.0]
        assert canary.batcher.submit(BATCH, 60).result(60).outputs[0][0, 0] == 6.0, "rows of its own"
        assert canary.remark() == ""
    finally:
        canary.close()


@pytest.mark.parametrize(
    ("found", "stable", "num_errors", "num_compared"),
    [
        ([0.5, 0.5], [0.0, 0.5], 0, 1),
        ([np.nan, 0.5], [0.0, 0.5], 1, 0),
        ([np.nan, 0.5], [np.nan, 0.5], 0, 0),
        ([0.5], [0.0, 0.5], 1, 0),
        (InternalError("a fault"), [0.0, 0.5], 1, 0),
        (UnavailableError("no server of rows"), [0.0, 0.5], 0, 0),
    ],
)
def test_what_a_shadow_request_counts_as(
    tmp_path: Path, found: Any, stable: list[float], num_errors: int, num_compared: int
) -> None:
    settings = ModelSettings(name="m", location=Location.of(tmp_path))
    canary = Canary(settings, options(shadow_share=1.0), BatchingOptions(), 1)
    try:
        prediction = Prediction("1", [np.array(stable, np.float32)])
        canary.shadow(Mock(), prediction, "")  # without effect: nothing is loaded
        model = Mock(current=FIRST)
        if isinstance(found, PersiaError):
            model.predict.side_effect = found
        else:
            model.predict.return_value = Prediction("2", [np.array(found, np.float32)])
        canary.model = model
        canary.shadow(Mock(), prediction, "")
    finally:
        canary.close()
    assert model.predict.call_count == 1
    assert canary.trial.num_errors == num_errors
    assert sum(canary.trial._histogram) == num_compared
    assert canary.status()["num_shadows_dropped"] == 0
