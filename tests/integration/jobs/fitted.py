"""`recovered.py` with a `Trainer` and its evaluations; same arguments, and the same lines in its log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from recovered import training

from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.train import Trainer
from persia.utils import setup_seed
from train import Model

NUM_SAMPLES = 32


class Clicks:
    """Batches that depend on their number alone, which is in the first dense feature."""

    def __init__(self, num_batches: int, first: int = 0) -> None:
        self._numbers = range(first, first + num_batches)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, first: int = 0) -> Iterator[int]:
        yield from self._numbers[first:]

    def make(self, rows: int, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
        random = np.random.default_rng(rows)
        ids = random.integers(50, size=(2, NUM_SAMPLES)).astype(np.uint64)
        clicked = (ids[0] % 2 == 0) ^ (random.random(NUM_SAMPLES) < 0.1)
        dense = np.full((NUM_SAMPLES, 2), rows / 1024, np.float32)
        return PersiaBatch(
            [IDTypeFeatureWithSingleID("user", ids[0]), IDTypeFeatureWithSingleID("items", ids[1])],
            non_id_type_features=[NonIDTypeFeature(dense)],
            labels=[Label(clicked.astype(np.float32).reshape(-1, 1))],
            requires_grad=requires_grad,
            meta=meta,
        )


class Watched(Model):
    def __init__(self) -> None:
        super().__init__()
        self.trains: Callable[[int], None] = lambda number: None

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        if self.training:
            self.trains(round(dense[0][0, 0].item() * 1024))
        return super().forward(dense, embeddings)


def make_trainer(folder: Path, num_batches: int) -> Trainer:
    valid = Clicks(2, first=10_000)
    return Trainer(Clicks(num_batches), valid, directory=str(folder / "trainer"), evaluate_every=30)


def main() -> None:
    folder, every_steps, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    setup_seed(7)
    model, trainer = Watched(), make_trainer(folder, int(sys.argv[4]))
    with training(model, folder, every_steps=every_steps, state={"trainer": trainer}) as (ctx, log):

        def trains(number: int) -> None:
            time.sleep(pace_s)
            log.write(f"{ctx.step + 1} {number}\n")
            sys.stdout.write(f"step {ctx.step + 1}\n")
            sys.stdout.flush()

        model.trains = trains
        fit = trainer.fit(ctx, reproducible=ctx.world_size == 1)
        sys.stdout.write(f"ended at {fit.step}\n")


if __name__ == "__main__":
    main()
