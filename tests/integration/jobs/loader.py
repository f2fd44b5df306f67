"""A data loader of synthetic batches. The data of a batch depends on its batch_id alone."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from persia.ctx import DataCtx
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

NUM_SAMPLES = 16
ANY_IDS = np.arange(200, dtype=np.uint64)


def ids_of_server_0() -> np.ndarray:
    """200 IDs whose rows two servers have on the first one, in either slot."""
    from persia.nn.exported import sign_hash

    ids = torch.arange(2000)
    is_even = [sign_hash(ids | slot << 56) >> 52 & 1 == 0 for slot in (1, 2)]
    return ids[is_even[0] & is_even[1]][:200].numpy().astype(np.uint64)


def make_batch(batch_id: int, ids: np.ndarray = ANY_IDS) -> PersiaBatch:
    rng = np.random.default_rng(batch_id)
    users = ids[rng.integers(0, 50, NUM_SAMPLES)]
    items = [ids[rng.integers(0, 200, rng.integers(0, 4))] for _ in range(NUM_SAMPLES)]
    label = ((users % 2).astype(np.float32) + rng.normal(0, 0.1, NUM_SAMPLES).astype(np.float32)).reshape(
        -1, 1
    )
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("user", users), IDTypeFeature("items", items)],
        non_id_type_features=[NonIDTypeFeature(rng.normal(size=(NUM_SAMPLES, 2)).astype(np.float32))],
        labels=[Label(label)],
        meta=str(batch_id).encode(),
    )


def wait_for_gate(gate: Path) -> None:
    deadline = time.monotonic() + 240
    while not gate.exists():
        assert time.monotonic() < deadline, f"{gate} never appeared"
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--total", type=int, default=0, help="batches of all loaders, instead of --batches")
    parser.add_argument("--resume", action="store_true", help="begin with the first batch that is missing")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch's data")
    parser.add_argument("--fail-after", type=int, default=-1, help="raise after that many batches")
    parser.add_argument("--hang-after", type=int, default=-1, help="stop sending, without ending")
    parser.add_argument("--gates", type=Path, default=None, help="wait there for a file N before batch N")
    parser.add_argument("--gate-at", type=int, action="append", default=[], help="N; may be repeated")
    parser.add_argument("--uneven", action="store_true", help="IDs of the first of two servers")
    options = parser.parse_args()
    ids = ids_of_server_0() if options.uneven else ANY_IDS
    with DataCtx() as ctx:
        if options.total:
            options.batches = len(range(ctx.replica_index, options.total, ctx.replica_size))
        start = ctx.resume() if options.resume else 0
        print(f"begins at {start}", flush=True)
        for sequence in range(start, options.batches):
            if sequence == options.fail_after:
                raise ValueError("row 17 of the file is broken")
            if sequence == options.hang_after:
                print("hanging", flush=True)
                time.sleep(600)
            if sequence in options.gate_at:
                wait_for_gate(options.gates / str(sequence))
            ctx.send_data(make_batch(options.first + sequence * ctx.replica_size + ctx.replica_index, ids))
    print(f"sent {options.batches}", flush=True)


if __name__ == "__main__":
    main()
