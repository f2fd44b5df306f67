"""A trainer that writes packets, and models that follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from persia.logger import get_default_logger
from persia.packets.follower import FollowOptions
from persia.serving.gate import Gate
from persia.serving.predictor import ModelSettings
from persia.serving.versions import ServedModel
from persia.storage.location import Location
from tests.packet_trainer import PacketTrainer


@pytest.fixture
def trainer(tmp_path: Path) -> PacketTrainer:
    made = PacketTrainer(tmp_path / "packets")
    made.trained(1)
    return made


@pytest.fixture
def serve(tmp_path: Path, trainer: PacketTrainer) -> Iterator[Callable[..., ServedModel]]:
    models: list[ServedModel] = []

    def start(*, gate: Gate | None = None, **options: Any) -> ServedModel:
        follow = FollowOptions(
            **{
                "poll_s": 0.02,
                "num_tries": 3,
                "packets": Location.of(tmp_path / "packets"),
                "checkpoints": Location.of(tmp_path / "model"),
                **options,
            },
        )
        settings = ModelSettings(
            name="m", location=Location.of(tmp_path / "model"), slots=trainer.slots, follow=follow, gate=gate
        )
        models.append(ServedModel(settings))
        return models[-1]

    yield start
    for model in models:
        model.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(get_default_logger(), "propagate", True)  # else pytest does not see records
    return caplog
