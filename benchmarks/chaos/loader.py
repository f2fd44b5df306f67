"""The data loader of the job: batch `n` depends on `n` alone."""

from __future__ import annotations

import sys

import numpy as np

from persia.ctx import DataCtx
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

SAMPLES = 16


def make_batch(number: int) -> PersiaBatch:
    rng = np.random.default_rng(number)
    users = rng.integers(0, 50, SAMPLES).astype(np.uint64)
    items = [rng.integers(0, 200, rng.integers(0, 4)).astype(np.uint64) for _ in range(SAMPLES)]
    labels = (users % 2).astype(np.float32).reshape(-1, 1)
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("user", users), IDTypeFeature("items", items)],
        non_id_type_features=[NonIDTypeFeature(rng.normal(size=(SAMPLES, 2)).astype(np.float32))],
        labels=[Label(labels)],
        meta=str(number).encode(),
    )


def main() -> None:
    total = int(sys.argv[1])
    with DataCtx() as ctx:
        first = ctx.resume() * ctx.replica_size + ctx.replica_index
        for number in range(first, total, ctx.replica_size):
            ctx.send_data(make_batch(number))


if __name__ == "__main__":
    main()
