"""One job, its rows in memory and in pools with caches of several sizes, end to end and in turns.

    python -m benchmarks.tiers --rows 1000000 --cache 0.1 0.05 0.02 --directory /dev/shm

Each run is an embedded job in a process of its own: it makes every row, trains until its cache has settled,
and is then timed over whole training steps (lookup, forward, backward, gradients applied). IDs follow a power
law: `--skew` says how steep, and the table how many rows were not cached, as a share of the IDs. With
`--checkpoint-every` a checkpoint in place is asked for so often while time is taken.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia.ctx import TrainCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad

_NUM_DENSE = 8
_CHILD_S = 3600.0


class _Model(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
        )

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.layers(torch.cat([*dense, *embeddings], dim=1))
        return output


class _Batches:
    """Of a job whose slots share `rows` IDs evenly."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._generator = np.random.default_rng(0)
        self._rows_of_slot = options.rows // options.slots
        # Neighbours in the power law are no neighbours in anything else.
        self._ids = self._generator.permutation(self._rows_of_slot).astype(np.uint64)

    def _batch(self, ranks: list[Any]) -> PersiaBatch:
        size = len(ranks[0])
        dense = self._generator.standard_normal((size, _NUM_DENSE), dtype=np.float32)
        return PersiaBatch(
            [IDTypeFeatureWithSingleID(f"slot{i}", self._ids[rank]) for i, rank in enumerate(ranks)],
            non_id_type_features=[NonIDTypeFeature(dense)],
            labels=[Label(self._generator.random((size, 1), dtype=np.float32))],
            requires_grad=True,
        )

    def every_row(self) -> list[PersiaBatch]:
        size = self._options.batch_size
        firsts = range(0, self._rows_of_slot, size)
        parts = [np.arange(first, min(first + size, self._rows_of_slot)) for first in firsts]
        return [self._batch([part] * self._options.slots) for part in parts]

    def drawn(self) -> PersiaBatch:
        shape = (self._options.slots, self._options.batch_size)
        ranks = self._rows_of_slot * self._generator.random(shape) ** self._options.skew
        return self._batch(list(ranks.astype(np.int64)))


def _train(ctx: TrainCtx, batch: PersiaBatch) -> None:
    output, labels = ctx.forward(ctx.get_embedding_from_data(batch))
    assert labels is not None, "every batch has some"
    ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One run, in this process. `options.kind`, `options.cache_rows` say where rows are."""
    torch.manual_seed(0)
    slots = {f"slot{i}": {"dim": options.dim} for i in range(options.slots)}
    storage: dict[str, Any] = {}
    if options.kind != "dram":
        storage = {"kind": options.kind, "path": str(directory), "cache_rows": options.cache_rows}
    model = _Model(_NUM_DENSE + options.slots * options.dim)
    batches = _Batches(options)
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.05),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        mixed_precision=False,
        slots={"slots_config": slots},
        global_config={"embedding_parameter_server_config": {"storage": storage}},
    ) as ctx:
        for batch in batches.every_row():
            _train(ctx, batch)
        for _ in range(options.settle):
            _train(ctx, batches.drawn())
        ctx.wait_for_gradients()
        before = _counts(ctx)
        drawn = [batches.drawn() for _ in range(options.steps)]
        last_checkpoint = started = time.perf_counter()
        num_checkpoints = 0
        for batch in drawn:
            _train(ctx, batch)
            if options.checkpoint_every and time.perf_counter() - last_checkpoint > options.checkpoint_every:
                last_checkpoint = time.perf_counter()
                ctx.dump_embedding(directory / "c", blocking=False, in_place=True)
                num_checkpoints += 1
        ctx.wait_for_gradients()
        seconds = time.perf_counter() - started
        after = _counts(ctx)
    num_ids = options.steps * options.slots * options.batch_size
    misses = after["num_misses"] - before["num_misses"]
    return {
        "ms_per_step": seconds / options.steps * 1e3,
        "miss_share": misses / num_ids,
        "num_checkpoints": num_checkpoints,
    }


def _counts(ctx: TrainCtx) -> dict[str, int]:
    store = ctx.backend.local_store
    assert store is not None, "the job is embedded"
    return store.tier_stats() or {"num_misses": 0}


def _in_a_process(arguments: list[str], kind: str, cache_rows: int, directory: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=directory) as place:
        command = [sys.executable, "-m", "benchmarks.tiers", *arguments]
        command += ["--kind", kind, "--cache-rows", str(cache_rows), "--child", place]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="of all slots")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--skew", type=float, default=16.0)
    parser.add_argument("--settle", type=int, default=200, help="batches before time is taken")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cache", type=float, nargs="+", default=[0.1], help="shares of the rows")
    parser.add_argument("--kind", default="pmem", help="file or pmem")
    parser.add_argument("--checkpoint-every", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="of the pools; /dev/shm is tmpfs")
    parser.add_argument("--cache-rows", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(measure(options, options.child)))
        return
    arguments = sys.argv[1:]
    cases = [("dram", 0.0), *((options.kind, share) for share in options.cache)]
    found: dict[tuple[str, float], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(options.repeats):
        for kind, share in cases:
            every = [] if kind != "dram" else ["--checkpoint-every", "0"]
            rows = int(options.rows * share)
            found[kind, share].append(_in_a_process([*arguments, *every], kind, rows, options.directory))
    in_memory = statistics.median(run["ms_per_step"] for run in found["dram", 0.0])
    print(f"{'storage':>8} {'cache':>6} {'ms/step':>8} {'slower':>7} {'misses':>7} {'checkpoints':>11}")
    for (kind, share), runs in found.items():
        ms = statistics.median(run["ms_per_step"] for run in runs)
        misses = statistics.median(run["miss_share"] for run in runs)
        num_checkpoints = sum(run["num_checkpoints"] for run in runs)
        slower = f"{ms / in_memory - 1:.1%}"
        print(f"{kind:>8} {share:>6.0%} {ms:>8.2f} {slower:>7} {misses:>7.1%} {num_checkpoints:>11}")


if __name__ == "__main__":
    main()
