"""What the code blocks of a page share, and what the scripts and jobs of the reader have."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia.ctx import DataCtx, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.helper import PersiaServiceCtx
from tests.documented import Block

SLOTS = {"slots_config": {"user": {"dim": 16}}}
NUM_BATCHES = 5
TIMEOUT_S = 240.0
TRAINING = """\
        output, labels = ctx.forward(batch)
        ctx.backward(loss_fn(output, labels[0]))
"""


@dataclass
class Stage:
    """What the blocks of a page share."""

    folder: Path
    fixture: Callable[[str], Any]
    names: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)  # in Python and in commands
    sources: list[str] = field(default_factory=list)  # of the Python blocks so far
    contexts: list[TrainCtx] = field(default_factory=list)  # that its blocks have made
    background: list[subprocess.Popen[str]] = field(default_factory=list)
    job: dict[str, str] = field(default_factory=dict)  # variables by which its commands find a running job

    def source(self, block: Block) -> str:
        text = block.text
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text


SetUp = Callable[[Stage], Iterator[None]]
AROUND: dict[tuple[str, str], Callable[[Stage], AbstractContextManager[None]]] = {}


def around(page: str, mark: str = "") -> Callable[[SetUp], SetUp]:
    """Registers what runs around the one block that has this mark in its text, or around the whole page."""

    def register(set_up: SetUp) -> SetUp:
        AROUND[page, mark] = contextmanager(set_up)
        return set_up

    return register


# --- what the reader's script has ---------------------------------------------------------------------------


def make_batch(*, requires_grad: bool = True) -> PersiaBatch:
    return PersiaBatch(
        [IDTypeFeature("user", [np.array(ids, np.uint64) for ids in ([1, 2], [], [3])])],
        non_id_type_features=[NonIDTypeFeature(np.ones((3, 1), np.float32))],
        labels=[Label(np.array([[0], [1], [1]], np.float32))],
        requires_grad=requires_grad,
    )


class Batches(IterableDataset):
    requires_grad = True

    def __iter__(self) -> Iterator[PersiaBatch]:
        return (make_batch(requires_grad=self.requires_grad) for _ in range(NUM_BATCHES))


class EndlessBatches(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        while True:
            yield make_batch()


class EvaluationBatches(Batches):
    requires_grad = False


class HeldOutBatches:
    def __len__(self) -> int:
        return NUM_BATCHES

    def read(self, first: int = 0) -> Iterator[int]:
        yield from range(first, NUM_BATCHES)

    def make(self, rows: int, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
        return make_batch(requires_grad=requires_grad)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1 + 16, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return torch.sigmoid(self.linear(torch.cat([dense[0], embeddings[0]], dim=1)))


def script(stage: Stage) -> None:
    """The names of a training script. Its `TrainCtx(...)` takes what the page leaves out."""
    model, optimizer = Model(), Adagrad(lr=1e-2)

    def train_ctx(*omitted: Any, **options: Any) -> TrainCtx:
        assert all(argument is ... for argument in omitted)
        arguments: dict[str, Any] = {
            "model": model,
            "embedding_optimizer": optimizer,
            "dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "slots": SLOTS,
        }
        stage.contexts.append(TrainCtx(**(arguments | options)))
        return stage.contexts[-1]

    stage.names |= {
        "Adagrad": Adagrad,
        "DataCtx": DataCtx,
        "DataLoader": DataLoader,
        "StreamingDataset": StreamingDataset,
        "TestBatches": EvaluationBatches,
        "TrainCtx": train_ctx,
        "embedding_optimizer": optimizer,
        "eval_ctx": eval_ctx,
        "loader": DataLoader(Batches()),
        "loss_fn": torch.nn.BCELoss(),
        "model": model,
        "my_batches": Batches,
        "nullcontext": nullcontext,
        "torch": torch,
        "valid": HeldOutBatches(),
    }


@contextmanager
def training(stage: Stage) -> Iterator[None]:
    """A block that is the body of a context, which trains all batches of the loader."""
    with stage.names["TrainCtx"]() as stage.names["ctx"]:
        yield
        stage.names["ctx"].wait_for_gradients()
        assert stage.names["ctx"].counters.batches_trained == NUM_BATCHES


@contextmanager
def running_job(stage: Stage) -> Iterator[TrainCtx]:
    """Broker, embedding worker and parameter server, with a training script: their commands find them."""
    with (
        PersiaServiceCtx(embedding_config=SLOTS, global_config={}),  # with metrics
        stage.names["TrainCtx"]() as ctx,
    ):
        stage.job |= {name: value for name, value in os.environ.items() if name.startswith("PERSIA_")}
        ctx.set_embedding("user", np.array([7], np.uint64), np.ones((1, 16), np.float32))
        yield ctx


@contextmanager
def training_on_a_thread(stage: Stage, ctx: TrainCtx, loader: DataLoader) -> Iterator[threading.Event]:
    """Trains the loader's batches while the block runs; setting the event ends that after the next batch."""
    is_over = threading.Event()

    def train() -> None:
        for batch in loader:
            output, labels = ctx.forward(batch)
            ctx.backward(stage.names["loss_fn"](output, labels[0]))
            if is_over.is_set():
                return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield is_over
    finally:
        thread.join(TIMEOUT_S)


@contextmanager
def training_job(stage: Stage) -> Iterator[TrainCtx]:
    """A running job whose rank trains until the block ends."""
    with (
        running_job(stage) as ctx,
        training_on_a_thread(stage, ctx, DataLoader(EndlessBatches())) as is_over,
    ):
        try:
            yield ctx
        finally:
            is_over.set()
    stage.job = {}
