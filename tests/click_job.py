"""What tests of Trainer share: clicks to train on, a model and its job, and what a callback was told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from persia import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch, TrainCtx
from persia.ctx import Recovery
from persia.embedding.lr_schedule import LRSchedule
from persia.embedding.optim import Adagrad
from persia.train import Callback, Fit, Trainer
from persia.utils import setup_seed

SLOTS = {"slots_config": {"C{1..2}": {"dim": 4}}}
SIZE = 32


class Clicks:
    """Made-up batches, in which one ID decides, with noise. The dense feature is the number of the row."""

    def __init__(self, num_batches: int = 12, first: int = 0) -> None:
        self._num_batches, self._first = num_batches, first

    def __len__(self) -> int:
        return self._num_batches

    def read(self, first: int = 0) -> Iterator[int]:
        yield from range(self._first + first, self._first + self._num_batches)

    def make(self, rows: int, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
        random = np.random.default_rng(rows)
        ids = random.integers(20, size=(2, SIZE)).astype(np.uint64)
        clicked = (ids[0] < 10) ^ (random.random(SIZE) < 0.1)
        return PersiaBatch(
            [IDTypeFeature(f"C{i + 1}", list(ids[i].reshape(-1, 1))) for i in range(2)],
            [NonIDTypeFeature(np.arange(rows * SIZE, (rows + 1) * SIZE, dtype=np.float32).reshape(-1, 1))],
            [Label(clicked.astype(np.float32).reshape(-1, 1))],
            requires_grad=requires_grad,
            meta=meta,
        )


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.trained: list[int] = []  # rows

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        if self.training:
            self.trained += dense[0][:, 0].int().tolist()
        logits: torch.Tensor = self.tower(torch.cat(embeddings, dim=1)).squeeze(1)
        return logits


class Recorded(Callback):
    """What a callback was told; fails at the evaluation after step `fail_at`, as a job that is killed."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.calls: list[Any] = []

    def start(self) -> None:
        self.calls.append("start")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((step, dict(values)))
        if "auc" in values and self.fail_at is not None and step > self.fail_at:
            raise ZeroDivisionError("killed")

    def end(self) -> None:
        self.calls.append("end")


class Job:
    """A model and its context, which a test trains."""

    slots: Any = SLOTS

    def __init__(self) -> None:
        setup_seed(7)
        self.model = Model()
        self.embedding_optimizer = Adagrad(lr=0.1)
        self.dense_optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def ctx(self, recovery: Recovery | None = None) -> TrainCtx:
        return TrainCtx(
            self.embedding_optimizer,
            self.dense_optimizer,
            model=self.model,
            slots=self.slots,
            recovery=recovery,
        )

    def fit(
        self,
        trainer: Trainer,
        then: Callable[[TrainCtx], None] = lambda ctx: None,
        recovery: Recovery | None = None,
    ) -> Fit:
        with self.ctx(recovery) as ctx:
            fit = trainer.fit(ctx, reproducible=True)
            then(ctx)
        return fit

    def schedulers(self) -> list[Any]:
        def make(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=30)

        return [make(self.dense_optimizer), LRSchedule(self.embedding_optimizer, make)]
