"""When a canary is rolled back: errors and drift of its last answers, and what counts as neither."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from persia.errors import DeadlineExceededError, InternalError, PersiaError, UnavailableError
from persia.serving.batch_predict import Prediction
from persia.serving.batcher import Batcher, BatchingOptions
from persia.serving.canary import Canary, CanaryOptions, Trial
from persia.serving.inference import Inference
from persia.serving.predictor import ModelSettings, Version
from persia.serving.statistics import ServingStatistics
from persia.serving.tensors import Tensor
from persia.serving.versions import ServedModel
from persia.storage.location import Location
from tests.following import BATCH, answer, reached, wait_until
from tests.packet_trainer import PacketTrainer

FIRST, SECOND = Version("1", "a", Mock()), Version("2", "b", Mock())
WAIT_S = 60.0


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


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    """Both have no version that is loaded yet."""
    settings = ModelSettings(name="m", location=Location.of(tmp_path))
    made = Canary(settings, options(share=1.0, shadow_share=1.0), BatchingOptions(), 1)
    yield made
    made.close()


def inference(canary: Canary) -> Inference:
    """With a stable version that answers at once."""
    stable = Mock(version="1", checked=lambda batch: batch)
    stable.settings.name = "m"
    batcher = Batcher(lambda batch: Prediction("1", [np.zeros(batch.batch_size)]), BatchingOptions())
    return Inference(stable, batcher, ServingStatistics(), 60.0, canary)


TENSORS = [Tensor("batch", "BYTES", (1,), [BATCH.to_bytes()])]


def test_a_canary_that_does_not_answer(canary: Canary) -> None:
    release = threading.Event()

    def predict(_batch: Any) -> Prediction:
        assert release.wait(WAIT_S)
        return Prediction("2", [])

    canary.model = Mock(current=FIRST, version="2", checked=lambda batch: batch, predict=predict)
    served = inference(canary)
    try:
        # Also requests without a deadline, which would otherwise never end.
        with pytest.raises(DeadlineExceededError, match="passed before its answer"):
            asyncio.run(served.infer("canary", TENSORS, 0.01))
        assert canary.trial.num_errors == 0
        assert asyncio.run(served.infer("", TENSORS, 6.0)).version == "1"
        assert canary.trial.num_errors == 1
        assert canary.statistics.status()["by_status"] == {"DEADLINE_EXCEEDED": 2}
    finally:
        release.set()
        served.batcher.close()


@pytest.mark.parametrize(
    ("failure", "current", "num_errors"),
    [
        (InternalError("a fault"), FIRST, 1),
        (InternalError("a fault of the version before"), SECOND, 0),
        (UnavailableError("no server of rows"), FIRST, 0),
    ],
)
def test_what_a_request_of_the_share_counts_as(
    canary: Canary, failure: PersiaError, current: Version, num_errors: int
) -> None:
    canary.model = model = Mock(current=FIRST, checked=lambda batch: batch)

    def predict(_batch: Any) -> Prediction:
        model.current = current
        raise failure

    model.predict = predict
    served = inference(canary)
    try:
        assert asyncio.run(served.infer("", TENSORS)).version == "1"
    finally:
        served.batcher.close()
    assert canary.trial.num_errors == num_errors


def test_a_trial_does_not_keep_the_rows_of_a_version() -> None:
    trial, version = Trial(options()), Version("1", "a", Mock())
    trial.add(version)
    alive = weakref.ref(version)
    del version
    assert alive() is None


def test_a_canary_that_is_being_loaded_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun, release, model = threading.Event(), threading.Event(), Mock()

    def load(*_: Any, **__: Any) -> Any:
        begun.set()
        assert release.wait(WAIT_S)
        return model

    monkeypatch.setattr("persia.serving.canary.ServedModel", load)
    canary = Canary(ModelSettings(name="m", location=Location.of(tmp_path)), options(), BatchingOptions(), 1)
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=canary.close)
    closing.start()
    wait_until(lambda: not canary.batcher._threads[0].is_alive())
    release.set()
    closing.join(WAIT_S)
    assert model.close.called


@pytest.mark.parametrize(
    ("found", "stable", "num_errors", "num_compared"),
    [
        ([0.5, 0.5], [0.0, 0.5], 0, 1),
        ([np.nan, 0.5], [0.0, 0.5], 1, 0),
        ([np.nan, 0.5], [np.nan, 0.5], 0, 0),
        ([0.5], [0.0, 0.5], 1, 0),
        (InternalError("a fault"), [0.0, 0.5], 1, 0),
        (UnavailableError("no server of rows"), [0.0, 0.5], 0, 0),
        (DeadlineExceededError("rows came late"), [0.0, 0.5], 0, 0),
        (AssertionError(), [0.0, 0.5], 1, 0),
    ],
)
def test_what_a_shadow_request_counts_as(
    canary: Canary, found: Any, stable: list[float], num_errors: int, num_compared: int
) -> None:
    prediction = Prediction("1", [np.array(stable, np.float32)])
    canary.shadow(Mock(), prediction, "")  # without effect: nothing is loaded
    canary.model = model = Mock(current=FIRST)
    if isinstance(found, Exception):
        model.predict.side_effect = found
    else:
        model.predict.return_value = Prediction("2", [np.array(found, np.float32)])
    canary.shadow(Mock(), prediction, "")
    canary.close()
    assert model.predict.call_count == 1
    assert canary.trial.num_errors == num_errors
    assert sum(canary.trial._histogram) == num_compared
    assert canary.status()["num_shadows_dropped"] == 0
