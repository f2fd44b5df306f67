"""A data loader that uses all that a batch can have; prints how much it has sent. See test_everything.py."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from persia.ctx import DataCtx
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

NUM_SAMPLES = 32
EVALUATED_EVERY = 16  # batch_ids; an even number, so that all ranks have as many
DEADLINE_S = 120.0

Ids = list[NDArray[np.uint64]]


def lists(rng: np.random.Generator, num_ids: int, max_length: int) -> Ids:
    """For each sample 0 to max_length IDs, repetitions included."""
    lengths = rng.integers(0, max_length + 1, NUM_SAMPLES)
    return [rng.integers(0, num_ids, length).astype(np.uint64) for length in lengths]


def singles(rng: np.random.Generator, first: int, num_ids: int) -> NDArray[np.uint64]:
    return rng.integers(first, first + num_ids, NUM_SAMPLES).astype(np.uint64)


def make_batch(batch_id: int) -> PersiaBatch:
    rng = np.random.default_rng(batch_id)
    user = singles(rng, 0, 60)
    items, clicks = lists(rng, 300, 4), lists(rng, 100, 9)
    flat = [f"word {i}" for i in rng.integers(0, 50, NUM_SAMPLES)]
    offsets = np.arange(0, NUM_SAMPLES + 1, dtype=np.uint32)
    features = [
        IDTypeFeatureWithSingleID("user", user),
        IDTypeFeature("friends", lists(rng, 60, 5)),
        IDTypeFeature("items", items, [rng.uniform(0.5, 2, len(s)).astype(np.float32) for s in items]),
        IDTypeFeature.from_strings("words", flat),
        IDTypeFeature("clicks", clicks),
        IDTypeFeature("path", lists(rng, 1000, 4)),
        IDTypeFeatureWithSingleID("campaign", singles(rng, 0, 40)),
        IDTypeFeatureWithSingleID("session", singles(rng, batch_id * 4, 8)),
        IDTypeFeature.from_csr("crowd", singles(rng, 0, 1_000_000), offsets),
        IDTypeFeatureWithSingleID("visits", singles(rng, 0, 10_000)),
        IDTypeFeatureWithSingleID("faint", singles(rng, 0, 20)),
        IDTypeFeatureWithSingleID("broken", singles(rng, 0, 20)),
        IDTypeFeatureWithSingleID("unused", singles(rng, 0, 20)),
    ]
    lengths = np.array([len(sample) for sample in clicks])
    return PersiaBatch(
        features,
        non_id_type_features=[
            NonIDTypeFeature(rng.normal(size=(NUM_SAMPLES, 2)).astype(np.float32), name="floats"),
            NonIDTypeFeature(lengths.astype(np.uint16).reshape(-1, 1), name="lengths"),
            NonIDTypeFeature(user.astype(np.uint32).reshape(-1, 1), name="users"),
        ],
        labels=[Label((user % 2).astype(np.float32).reshape(-1, 1))],
        meta=f"batch {batch_id}".encode(),
        requires_grad=batch_id % EVALUATED_EVERY >= 2,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--leave", type=Path, required=True, help="a file that says when to end")
    options = parser.parse_args()
    num_ids = 0
    with DataCtx() as ctx:
        for sequence in range(options.batches):
            batch = make_batch(sequence * ctx.replica_size + ctx.replica_index)
            num_ids += sum(len(feature.ids) for feature in batch.id_type_features)
            ctx.send_data(batch)
        print(f"sent {options.batches} batches of {num_ids} IDs.", flush=True)
        deadline = time.monotonic() + DEADLINE_S
        while not options.leave.exists() and time.monotonic() < deadline:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
