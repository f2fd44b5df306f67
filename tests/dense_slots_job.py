"""What tests of slots in the dense model share: a model, its embedding config, batches and steps."""

from __future__ import annotations

from functools import partial
from typing import Any, List  # noqa: UP035 - TorchScript reads these

import numpy as np
import torch
from torch import nn

from persia.ctx import TrainCtx, eval_ctx
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
from persia.embedding.optim import SGD
from persia.storage.dense_slots import DenseSlots

ROWS, DIM, SAMPLES = 20, 4, 6
SCALINGS = {"sum": {}, "mean": {"mean_scaling": True}, "root.of-sum": {"sqrt_scaling": True}}
DENSE = (*SCALINGS, "far")
# Not 0, as a lost accumulator would be.
ADAGRAD = partial(torch.optim.Adagrad, initial_accumulator_value=0.1)


class Tower(nn.Module):
    """Sees each number of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.linear = nn.Linear(DIM * (len(SCALINGS) + 1), 1)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(self.linear.weight.shape, generator=generator))
            self.linear.bias.zero_()

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        return self.linear(torch.cat(embeddings, dim=1)).tanh()


def config(*dense: str, **settings: Any) -> dict[str, Any]:
    """Slots of each scaling and one more. Those named in `dense` are in the dense model."""
    slots: dict[str, Any] = {
        name: {"dim": DIM, "cardinality": ROWS, **SCALINGS.get(name, {})} for name in DENSE
    }
    for name in dense:
        slots[name]["placement"] = "dense"
    return {"slots_config": slots, **settings}


def batch(seed: int, *, weighted: bool = True, requires_grad: bool = True) -> PersiaBatch:
    """Samples of no ID, one and several; some IDs repeated."""
    random = np.random.default_rng(seed)
    features = []
    for name in DENSE:
        ids = [random.integers(0, ROWS, count).astype(np.uint64) for count in [0, 1, 5, *[3] * (SAMPLES - 3)]]
        weights = [random.random(len(sample)).astype(np.float32) + 0.5 for sample in ids]
        features.append(IDTypeFeature(name, ids, weights if weighted else None))
    labels = [Label(random.random((SAMPLES, 1)).astype(np.float32))]
    return PersiaBatch(features, labels=labels, requires_grad=requires_grad)


def training(model: nn.Module, slots: Any, optimizer: Any = None, **options: Any) -> TrainCtx:
    return TrainCtx(
        SGD(lr=0.5),
        optimizer or torch.optim.SGD(model.parameters(), lr=0.5),
        model=model,
        slots=slots,
        embedding_config=EmbeddingConfig(emb_initialization=(-1.0, 1.0), admit_after=3, seed=5),
        **options,
    )


def step(ctx: TrainCtx, seed: int, **options: Any) -> None:
    output, labels = ctx.forward(ctx.get_embedding_from_data(batch(seed, **options)))
    assert labels is not None
    ctx.backward((output - labels[0]).square().mean())
    ctx.wait_for_gradients()


def predictions(ctx: TrainCtx, seed: int = 99) -> torch.Tensor:
    with torch.no_grad(), eval_ctx(model=ctx.model) as evaluation:
        looked_up = evaluation.get_embedding_from_data(batch(seed, requires_grad=False))
        output, _ = evaluation.forward(looked_up)
    return torch.as_tensor(output)


def rows_of(model: nn.Module) -> DenseSlots:
    """The rows in the model, which must have some."""
    slots = DenseSlots.find(model)
    assert slots is not None
    return slots
