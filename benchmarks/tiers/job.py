"""One embedded job in a process of its own, `python -m benchmarks.tiers.job`: lines of JSON answer others.

    {"op": "open", "job": ...}                                    ->  {"num_rows": ...}
    {"op": "run", "seed": ..., "steps": ..., "variant": ..., "checkpoint": ...}
                                                                  ->  {"seconds": ..., "num_ids": ..., ...}
    {"op": "memory"}                                              ->  {"resident_bytes": ..., ...}

A turn trains `steps` batches through a `DataLoader`. They are made before the clock starts, which stops when
the last gradient has been applied.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import json
import os
import queue
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.workload import hash_ranks
from persia.ctx import DataCtx, TrainCtx
from persia.data import DataLoader, IterableDataset, PersiaTrainingBatch, StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad

__all__ = ["VARIANTS", "JobOptions"]

_NUM_DENSE = 13
_WARM_UP_STEPS = 30  # more than a loader looks up ahead
_CELL_FLOATS = 4  # beside embedding and state of a row in a cache


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a turn trains."""

    dense: bool = True  # else the embeddings' mean is the output
    staleness: int | None = None


VARIANTS = {
    "training": Variant(),
    "training, staleness 1": Variant(staleness=1),
    "sparse part alone": Variant(dense=False),
}


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """`cache`: a share of the rows, or, with `counts_bytes`, of the bytes that they have: then the index of
    all rows counts, too. `directory` of the pool, which is the job's alone."""

    rows: int
    slots: int
    dim: int
    batch_size: int
    exponent: float
    kind: str = "dram"
    cache: float = 1.0
    counts_bytes: bool = False
    directory: str = ""
    announces: bool = False  # batches come from a StreamingDataset
    stream_staleness: int | None = None  # a variant's, for the whole stream

    @property
    def rows_of_slot(self) -> int:
        return self.rows // self.slots

    @property
    def cache_bytes(self) -> int:
        """Embedding and Adagrad's state of each row, and what the cache knows of it."""
        return int(self.rows * self.cache) * 4 * (2 * self.dim + _CELL_FLOATS)

    @property
    def server(self) -> dict[str, Any]:
        if self.kind == "dram":
            return {}
        cache: dict[str, int] = {"cache_rows": int(self.rows * self.cache)}
        if self.counts_bytes:
            cache = {"cache_bytes": self.cache_bytes}
        # Shards have not all as many rows, and small ones differ the most.
        return {
            "capacity": self.rows * 17 // 16 + 1000,
            "storage": {"kind": self.kind, "path": self.directory, **cache},
        }


class _Model(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.is_dense = True
        self.tower = torch.nn.Sequential(
            torch.nn.Linear(width, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 1),
        )

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        if not self.is_dense:
            return torch.stack([embedding.mean(dim=1) for embedding in embeddings]).sum(0)[:, None]
        output: torch.Tensor = self.tower(torch.cat([*dense, *embeddings], dim=1))
        return output


class _Batches(IterableDataset):
    def __init__(self, batches: Iterable[PersiaBatch]) -> None:
        super().__init__()
        self._batches = batches

    def __iter__(self) -> Iterator[PersiaBatch]:
        return iter(self._batches)


class _Stream:
    """One for the context's whole life, which receives no second one; batches come from a data loader."""

    def __init__(self, staleness: int | None) -> None:
        self._waiting: queue.SimpleQueue[PersiaBatch | None] = queue.SimpleQueue()
        self._loader = DataLoader(StreamingDataset(loader=self._send), embedding_staleness=staleness)

    def train_on(self, batches: Sequence[PersiaBatch]) -> Iterator[PersiaTrainingBatch]:
        for batch in batches:
            self._waiting.put(batch)
        return itertools.islice(iter(self._loader), len(batches))

    def close(self) -> None:
        self._waiting.put(None)

    def _send(self) -> None:
        with DataCtx() as data:
            while (batch := self._waiting.get()) is not None:
                data.send_data(batch)


class Job:
    """A context whose rows are all there, and settled. To be closed."""

    def __init__(self, options: JobOptions) -> None:
        torch.manual_seed(0)
        self._options = options
        self._model = _Model(_NUM_DENSE + options.slots * options.dim)
        self._stream = _Stream(options.stream_staleness) if options.announces else None
        slots = {f"slot{i}": {"dim": options.dim} for i in range(options.slots)}
        self._ctx = TrainCtx(
            model=self._model,
            embedding_optimizer=Adagrad(lr=0.02),
            dense_optimizer=torch.optim.Adam(self._model.parameters(), lr=0.001),
            mixed_precision=False,
            slots={"slots_config": slots},
            global_config={"embedding_parameter_server_config": options.server},
        ).__enter__()
        # What training needs whatever the number of rows is; some have come.
        self.run({"seed": 0, "steps": _WARM_UP_STEPS, "variant": "training"})
        before = _resident_bytes() - self._tier_stats().get("memory_bytes", 0)
        self._model.is_dense = False
        self._train(DataLoader(_Batches(self._every_row())))
        self._resident_of_rows = _resident_bytes() - before

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._ctx.__exit__(None, None, None)

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        random = np.random.default_rng(request["seed"])
        batches = [self._drawn(random) for _ in range(request["steps"])]
        before = self._counts()
        started = time.perf_counter()
        if request.get("checkpoint"):
            self._ctx.dump_embedding(Path(self._options.directory) / "c", blocking=False, in_place=True)
        asked = time.perf_counter()
        self._train_as(VARIANTS[request["variant"]], batches)
        seconds = time.perf_counter() - started
        after = self._counts()
        if request.get("checkpoint"):
            self._ctx.wait_for_dump_embedding()
        return {
            "seconds": seconds,
            "num_ids": request["steps"] * self._options.slots * self._options.batch_size,
            "num_lookups": after["num_looked_up"] - before["num_looked_up"],
            "num_missed": after["num_missed"] - before["num_missed"],
            "num_prefetched": after["num_prefetched"] - before["num_prefetched"],
            "asking_seconds": asked - started,
            "was_committed": after["num_pending"] == 0,
        }

    def memory(self) -> dict[str, int]:
        return {
            "resident_bytes": self._resident_of_rows,
            "store_bytes": self._tier_stats().get("memory_bytes", 0),
            "num_rows": sum(self._ctx.get_embedding_size()),
            "num_cached": self._tier_stats().get("num_hot", 0),
            "limit_bytes": self._options.cache_bytes if self._options.counts_bytes else 0,
        }

    def _tier_stats(self) -> dict[str, int]:
        store = self._ctx.runtime.backend.local_store
        assert store is not None, "the job is embedded"
        return store.tier_stats() or {}

    def _train_as(self, variant: Variant, batches: Sequence[PersiaBatch]) -> None:
        self._model.is_dense = variant.dense
        if self._stream is None:
            self._train(DataLoader(_Batches(batches), embedding_staleness=variant.staleness))
        else:
            self._train(self._stream.train_on(batches))

    def _train(self, batches: Iterable[PersiaTrainingBatch]) -> None:
        for batch in batches:
            output, labels = self._ctx.forward(batch)
            assert labels is not None, "every batch has some"
            self._ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
        self._ctx.wait_for_gradients()

    def _counts(self) -> dict[str, int]:
        found = self._tier_stats()
        if not found:
            return {"num_looked_up": 0, "num_missed": 0, "num_prefetched": 0, "num_pending": 0}
        return {
            "num_looked_up": found["num_hits"] + found["num_misses"],
            "num_missed": found["num_misses"] + found["num_prefetched"],
            "num_prefetched": found["num_prefetched"],
            "num_pending": found["num_pending"],
        }

    def _drawn(self, random: np.random.Generator) -> PersiaBatch:
        """Ranks by a bounded Zipf law, as in native/bench/workload.h."""
        options = self._options
        power = 1 - options.exponent
        mass = (options.rows_of_slot + 1.0) ** power - 1
        shape = (options.slots, options.batch_size)
        ranks = (1 + random.random(shape) * mass) ** (1 / power) - 1
        return self._batch(random, np.minimum(ranks.astype(np.uint64), options.rows_of_slot - 1))

    def _batch(self, random: np.random.Generator, ranks: NDArray[np.uint64]) -> PersiaBatch:
        size = ranks.shape[1]
        ids = [hash_ranks(slot, of_slot).view(np.uint64) for slot, of_slot in enumerate(ranks)]
        dense = random.standard_normal((size, _NUM_DENSE), dtype=np.float32)
        return PersiaBatch(
            [IDTypeFeatureWithSingleID(f"slot{i}", of_slot) for i, of_slot in enumerate(ids)],
            non_id_type_features=[NonIDTypeFeature(dense)],
            labels=[Label(random.random((size, 1), dtype=np.float32))],
            requires_grad=True,
        )

    def _every_row(self) -> Iterator[PersiaBatch]:
        """In batches that need no more memory than those of the law: their IDs are all different ones."""
        random, options = np.random.default_rng(0), self._options
        size = max(options.batch_size // 8, 1)
        for first in reversed(range(0, options.rows_of_slot, size)):
            part = np.arange(first, min(first + size, options.rows_of_slot), dtype=np.uint64)
            yield self._batch(random, np.tile(part, (options.slots, 1)))


def _resident_bytes() -> int:
    """This process's memory that is present, without files: what a pool of kind pmem maps is not counted."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    [found] = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(found) * 1024


def main() -> None:
    """Answers until the input ends."""
    # Libraries print to standard output: it is kept for replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job: Job | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "open":
            job = Job(JobOptions(**request["job"]))
            reply: dict[str, Any] = {"num_rows": job.memory()["num_rows"]}
        else:
            assert job is not None, "open comes first"
            reply = job.run(request) if request["op"] == "run" else job.memory()
        print(json.dumps(reply), file=replies, flush=True)
    if job is not None:
        job.close()


if __name__ == "__main__":
    main()
