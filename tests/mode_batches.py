"""Batches of three slots, pooled and raw, and data sets of them, for tests of modes of consistency."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from persia.ctx import DataCtx
from persia.data import IterableDataset, StreamingDataset
from persia.data.dataset import IterableDatasetBase
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, PersiaBatch

STEPS = 12
IDS = np.array([3, 5, 3], np.uint64)  # of every batch: each step trains on the rows of the step before


def make_batch(*, requires_grad: bool = True) -> PersiaBatch:
    pairs = [np.array([i, 7], np.uint64) for i in IDS]
    features = [
        IDTypeFeatureWithSingleID("first", IDS),
        IDTypeFeature("second", pairs),
        IDTypeFeatureWithSingleID("third", IDS),
    ]
    return PersiaBatch(features, labels=[Label(np.ones((3, 1), np.float32))], requires_grad=requires_grad)


class Batches(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        return (make_batch() for _ in range(STEPS))


def local() -> IterableDatasetBase:
    return Batches(buffer_size=STEPS)


def streamed() -> IterableDatasetBase:
    def load() -> None:
        with DataCtx() as ctx:
            for _ in range(STEPS):
                ctx.send_data(make_batch())

    return StreamingDataset(buffer_size=STEPS, loader=load)
