"""What all systems on torch share: the constant upstream gradient, the lookup, and the small dense model."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.cases import DENSE_LEARNING_RATE, MLP_WIDTHS, Case
from benchmarks.systems.base import System
from benchmarks.workload import NUM_DENSE_FEATURES, Batch

__all__ = ["TorchBatch", "TorchSystem", "uniform_"]


def uniform_(weight: torch.Tensor) -> None:
    """The initial values of every system's rows; writing them also makes every page present."""
    with torch.no_grad():
        weight.uniform_(-0.01, 0.01)


@dataclasses.dataclass(frozen=True)
class TorchBatch:
    """`ids` is whatever `TorchSystem.pooled` takes; `dense` [batch, 13] and `labels` [batch, 1] float32."""

    ids: Any
    dense: torch.Tensor
    labels: torch.Tensor


class TorchSystem(System):
    """A system whose pooled embeddings are torch tensors [batch, num_slots * dim] with a gradient."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        torch.set_num_threads(case.threads)
        torch.manual_seed(case.workload.seed)
        width = case.workload.num_slots * case.dim
        self.gradient = torch.empty(case.workload.batch_size, width).uniform_(-1e-3, 1e-3)
        self._model = _mlp(NUM_DENSE_FEATURES + width)
        self._dense_optimizer = torch.optim.Adam(self._model.parameters(), lr=DENSE_LEARNING_RATE)
        self._loss = nn.BCEWithLogitsLoss()

    @abstractmethod
    def prepare_ids(self, batch: Batch) -> Any:
        """The input of `pooled`; not timed."""

    @abstractmethod
    def pooled(self, ids: Any) -> torch.Tensor:
        """Sum-pooled embeddings, float32 [batch, num_slots * dim]."""

    def update(self) -> None:
        """The embeddings' optimizer, where `backward` does not run it."""
        return None

    def prepare(self, batch: Batch) -> TorchBatch:
        return TorchBatch(
            self.prepare_ids(batch), torch.from_numpy(batch.dense), torch.from_numpy(batch.labels)
        )

    @property
    def step(self) -> Callable[[TorchBatch], object]:
        return {"train": self._train, "lookup": self._lookup, "mlp": self.train_mlp}[self.case.work]

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def _train(self, batch: TorchBatch) -> None:
        torch.autograd.backward(self.pooled(batch.ids), self.gradient)
        self.update()

    def _lookup(self, batch: TorchBatch) -> None:
        with torch.no_grad():
            self.pooled(batch.ids)

    def train_mlp(self, batch: TorchBatch) -> torch.Tensor:
        """The training step of embeddings and dense model; the loss before it."""
        logits = self._model(torch.cat([batch.dense, self.pooled(batch.ids)], dim=1))
        loss: torch.Tensor = self._loss(logits, batch.labels)
        torch.autograd.backward(loss)
        self.update()
        self._dense_optimizer.step()
        self._dense_optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _mlp(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for next_width in MLP_WIDTHS:
        layers += [nn.Linear(width, next_width), nn.ReLU()]
        width = next_width
    return nn.Sequential(*layers, nn.Linear(width, 1))
