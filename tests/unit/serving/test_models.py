"""Several models in one process: their names, and rows that they share."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from persia.checkpoint.checkpoints import Source
from persia.config import SlotsConfig
from persia.errors import NotFoundError, UnavailableError
from persia.observability.exposition import Families
from persia.serving.batcher import Batcher, BatchingOptions
from persia.serving.embeddings import EmbeddedRows
from persia.serving.inference import Inference
from persia.serving.models import Models, ServingSource
from persia.serving.predictor import ModelSettings
from persia.serving.statistics import ServingStatistics
from persia.serving.versions import ServedModel
from persia.storage.location import Location
from tests.following import answer, reached, wait_until
from tests.packet_trainer import PacketTrainer


@pytest.fixture
def load(trainer: PacketTrainer) -> Iterator[Callable[..., ServedModel]]:
    """Serves a checkpoint."""
    with ExitStack() as stack:

        def start(location: Path, name: str = "m", **settings: Any) -> ServedModel:
            given = {"slots": trainer.slots, "poll_s": 0.02, **settings}
            model = ServedModel(ModelSettings(name=name, location=Location.of(location), **given))
            stack.callback(model.close)
            return model

        yield start


def inference_of(model: ServedModel) -> Inference:
    return Inference(model, Batcher(model.predict, BatchingOptions()), ServingStatistics(), 60.0)


def metrics(*models: ServedModel) -> dict[tuple[str, str], float]:
    """By their names and the label of the model."""
    families = Families()
    ServingSource(Models.of([inference_of(model) for model in models]), 0, 1).add_metrics(families)
    return {
        (sample.name, sample.labels.get("model", "-")): sample.value
        for family in families.collect()
        for sample in family.samples
    }


def test_models_with_the_same_row_files_have_one_copy_of_the_rows(
    load: Callable[..., ServedModel], trainer: PacketTrainer, tmp_path: Path
) -> None:
    trainer.checkpoint(tmp_path / "first", 3.0)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    trainer.set(5.0)
    trainer.checkpoint(tmp_path / "other", 5.0)
    first, second = load(tmp_path / "first", "first"), load(tmp_path / "second", "second")
    alone, both = metrics(first), metrics(first, second)
    assert alone["persia_serving_rows", "-"] > 0
    for name in ("persia_serving_rows", "persia_serving_row_bytes"):
        assert both[name, "-"] == alone[name, "-"]
    assert both["persia_serving_version_info", "first"] == both["persia_serving_version_info", "second"] == 1
    missing = "persia_serving_missing_rows_total"
    assert (missing, "first") in both
    assert (missing, "second") not in both, "it would be counted twice"
    other = load(tmp_path / "other", "other")
    three = metrics(first, second, other)
    assert three["persia_serving_rows", "-"] == 2 * alone["persia_serving_rows", "-"], "rows of another dump"
    assert answer(first)[1] == answer(second)[1] != answer(other)[1]


def test_a_copy_ends_with_its_last_model(
    load: Callable[..., ServedModel], trainer: PacketTrainer, tmp_path: Path
) -> None:
    trainer.checkpoint(tmp_path / "first", 3.0)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    first, second = load(tmp_path / "first"), load(tmp_path / "second")
    rows = weakref.ref(first.current.predictor.embeddings)
    trainer.set(5.0)
    trainer.checkpoint(tmp_path / "first", 5.0)
    wait_until(lambda: answer(first)[1] == [50.0], lambda: first.error)
    assert rows() is second.current.predictor.embeddings, "the other one still reads them"
    trainer.checkpoint(tmp_path / "second", 5.0)
    wait_until(lambda: answer(second)[1] == [50.0], lambda: second.error)
    gc.collect()
    assert rows() is None


def test_a_load_that_hangs_holds_up_those_of_the_same_rows_alone(
    trainer: PacketTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()

    class Slow(EmbeddedRows):
        def __init__(self, source: Source, slots: SlotsConfig) -> None:
            began.set()
            assert may_end.wait(60)
            super().__init__(source, slots)

    trainer.checkpoint(tmp_path / "slow", 3.0)
    slow = Source(Location.of(tmp_path / "slow"))
    trainer.set(5.0)
    trainer.checkpoint(tmp_path / "other", 5.0)
    other = Source(Location.of(tmp_path / "other"))
    with ThreadPoolExecutor(2) as pool:
        try:
            loading = pool.submit(Slow.shared, slow, trainer.slots)
            assert began.wait(60)
            assert pool.submit(EmbeddedRows.shared, other, trainer.slots).result(60).stats().num_rows > 0
            monkeypatch.setenv("PERSIA_DEADLINE_SEC", "0.01")
            with pytest.raises(UnavailableError, match="slow are being loaded.*PERSIA_DEADLINE_SEC"):
                EmbeddedRows.shared(slow, trainer.slots)
        finally:
            may_end.set()
        monkeypatch.setenv("PERSIA_DEADLINE_SEC", "60")
        assert EmbeddedRows.shared(slow, trainer.slots) is loading.result(60)


def test_rows_that_packets_change_are_not_shared(
    serve: Callable[..., ServedModel],
    load: Callable[..., ServedModel],
    trainer: PacketTrainer,
    tmp_path: Path,
) -> None:
    trainer.checkpoint(tmp_path / "model", 3.0)
    still = load(tmp_path / "model")
    before = answer(still)[1]
    following = serve()
    reached(following, trainer.trained(7))
    assert answer(still)[1] == before


def test_a_head_reads_the_rows_of_a_model_that_follows_packets(
    serve: Callable[..., ServedModel],
    load: Callable[..., ServedModel],
    trainer: PacketTrainer,
    tmp_path: Path,
) -> None:
    """The dense model is its own: of the checkpoint. The rows are those of the other one's last packet."""
    trainer.checkpoint(tmp_path / "head", 3.0)
    following = serve()
    head = load(tmp_path / "head", "head", slots=None, embeddings=following)
    for value in (4, 5):
        reached(following, trainer.trained(value))
        # The factor of the head's own model stays.
        assert answer(head)[1] == [answer(following)[1][0] / value * 3.0]
    assert head.not_ready() is None
    shown = metrics(following, head)
    assert shown["persia_serving_rows", "-"] == metrics(following)["persia_serving_rows", "-"]
    assert ("persia_serving_missing_rows_total", following.settings.name) in shown
    assert ("persia_serving_missing_rows_total", "head") not in shown


def test_models_by_their_names() -> None:
    one, two = (Mock(statistics=ServingStatistics()) for _ in range(2))
    one.model.settings.name, two.model.settings.name = "one", "two"
    assert Models.of([one]).statistics is one.statistics
    models = Models.of([one, two])
    assert models.named("two") is two
    assert models.statistics_of("one") is one.statistics
    assert models.statistics_of("x") is models.statistics not in (one.statistics, two.statistics)
    with pytest.raises(NotFoundError, match="there is no model 'x': this server has 'one', 'two'"):
        models.named("x")
    one.model.not_ready.return_value, two.model.not_ready.return_value = None, "no rows"
    assert ServingSource(models, 0, 1).not_ready() == "two: no rows"


def test_the_sums_have_the_requests_of_no_model(
    load: Callable[..., ServedModel], trainer: PacketTrainer, tmp_path: Path
) -> None:
    trainer.checkpoint(tmp_path / "model", 3.0)
    models = Models.of([inference_of(load(tmp_path / "model", name)) for name in ("one", "two")])
    for name in ("one", "x"):
        models.statistics_of(name).add_request(time.monotonic_ns(), "RESOURCE_EXHAUSTED")
    status = ServingSource(models, 0, 1).status()
    assert (status["num_requests"], status["num_failed"], status["num_waiting"]) == (2, 2, 0)
    assert [model["num_requests"] for model in status["models"]] == [1, 0]
    # A version is one of a model, so without a name it says nothing.
    assert [one["name"] for one in models.model_statistics("", "9")["model_stats"]] == ["one", "two"]
