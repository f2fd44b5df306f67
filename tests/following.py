"""What tests of a model that follows packets share: a batch, its answer, and waiting for both."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from persia.embedding.data import IDTypeFeatureWithSingleID, NonIDTypeFeature, PersiaBatch
from persia.serving.versions import ServedModel
from persia.storage.position import Position
from tests.packet_trainer import IDS

WAIT_S = 60.0


def make_batch(ids: Any) -> PersiaBatch:
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("user", np.asarray(ids, np.uint64))],
        [NonIDTypeFeature(np.zeros((len(ids), 1), np.float32))],
        requires_grad=False,
    )


BATCH = make_batch(IDS)


def wait_until(condition: Callable[[], bool], what: Any = None) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what() if what else "not in time"
        time.sleep(0.01)


def reached(model: ServedModel, position: Position) -> None:
    wait_until(lambda: model.version == str(position), lambda: model.following)


def answer(model: ServedModel, batch: PersiaBatch = BATCH) -> tuple[str, list[float]]:
    prediction = model.predict(batch)
    (outputs,) = prediction.outputs
    return prediction.version, sorted(set(outputs[:, 0].tolist()))
