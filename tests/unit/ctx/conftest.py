"""Contexts over an embedding worker and store in this process: real lookups and updates, no servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from persia import env
from persia._native import EmbeddedClient, SlotConfig
from persia.ctx import TrainCtx
from persia.data import IterableDataset
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.pipeline.backend import EmbeddingBackend
from tests.threads import expect_ended

DIM = 4


class Model(torch.nn.Module):
    """One output a sample from one dense column and the slots "a" and "b"."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1 + 2 * DIM, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.linear(torch.cat([dense[0], embeddings[0], embeddings[1]], dim=1))
        return output


def make_batch(number: int = 0, *, requires_grad: bool = True) -> PersiaBatch:
    ids = [np.array([number, i], np.uint64) for i in range(3)]
    return PersiaBatch(
        [IDTypeFeature("a", ids), IDTypeFeature("b", ids)],
        non_id_type_features=[NonIDTypeFeature(np.full((3, 1), number, np.float32))],
        labels=[Label(np.ones((3, 1), np.float32))],
        requires_grad=requires_grad,
        meta=str(number).encode(),
    )


class Batches(IterableDataset):
    """`num_batches` batches, then `failure` if there is one."""

    def __init__(
        self, num_batches: int, failure: Exception | None = None, *, requires_grad: bool = True
    ) -> None:
        super().__init__(buffer_size=2)
        self._num_batches = num_batches
        self._failure = failure
        self._requires_grad = requires_grad

    def __iter__(self) -> Iterator[PersiaBatch]:
        for number in range(self._num_batches):
            yield make_batch(number, requires_grad=self._requires_grad)
        if self._failure is not None:
            raise self._failure


@pytest.fixture
def make_dataset() -> type[Batches]:
    return Batches


@pytest.fixture
def new_batch() -> Callable[..., PersiaBatch]:
    return make_batch


@pytest.fixture
def client() -> EmbeddedClient:
    slots = [
        SlotConfig(name=name, dim=DIM, index_prefix=(i + 1) << 56, group=i + 1) for i, name in enumerate("ab")
    ]
    return EmbeddedClient(slots=slots, feature_index_prefix_bit=8)


@pytest.fixture
def backend(client: EmbeddedClient) -> EmbeddingBackend:
    return EmbeddingBackend(client, deadline_s=10.0)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def make_ctx(backend: EmbeddingBackend, model: Model) -> Callable[..., TrainCtx]:
    def make(**kwargs: Any) -> TrainCtx:
        arguments: dict[str, Any] = {
            "model": model,
            "embedding_optimizer": SGD(lr=0.1),
            "dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "mixed_precision": False,
            "backend": backend,
        }
        return TrainCtx(**{**arguments, **kwargs})

    return make


@pytest.fixture(autouse=True)
def single_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"):
        monkeypatch.delenv(name, raising=False)
    env.reload_env()
    yield
    monkeypatch.undo()
    env.reload_env()


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Every test must end the threads it has started."""
    before = set(threading.enumerate())
    yield
    expect_ended(before, "persia")
