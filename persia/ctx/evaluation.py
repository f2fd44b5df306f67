"""How good the model of a training context is, over held-out batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from persia.ctx.embedding import eval_ctx
from persia.ctx.ranks import meet
from persia.data.dataloader import DataLoader
from persia.data.dataset import IterableDataset
from persia.data.striped import Batches, StripedBatches
from persia.embedding.data import PersiaBatch
from persia.nn.metrics import ClickQuality, quality_of

if TYPE_CHECKING:
    from persia.ctx.train import TrainCtx


def evaluate(ctx: TrainCtx, batches: Batches) -> ClickQuality:
    """The quality of the model of `ctx` over `batches`: its output is a logit for each sample.

    All ranks call it, after the same step, and none may have run out of batches to train: at steps that some
    rank does not reach, the others would wait for it. It waits until the updates of all ranks are applied.
    Each rank evaluates its share of the batches, and the result of all is equal on every rank.
    Modules are in the mode of evaluation meanwhile, and then in the mode that each had.

    Raises InvalidArgumentError for a label other than 0 and 1 in the first column.
    """
    wait_for_updates(ctx)
    model, outputs, targets = ctx.model, [], []
    assert model is not None, "a TrainCtx has one"
    modes = {module: module.training for module in model.modules()}
    model.eval()
    if ctx.world_size > 1:
        share_buffers(model)
    if isinstance(model, DistributedDataParallel):  # it may call collectives, and shares are uneven
        model = model.module
    try:
        with eval_ctx(model=model) as evaluation, torch.no_grad():
            for batch in DataLoader(_Share(batches, ctx.rank, ctx.world_size)):
                output, labels = evaluation.forward(batch)
                assert labels is not None, "only inference has none"
                outputs.append(output.reshape(len(labels[0]), -1)[:, 0].float())
                targets.append(labels[0].reshape(len(labels[0]), -1)[:, 0])
    finally:
        for module, was_training in modes.items():  # the script may have frozen some
            module.training = was_training
    group = dist.group.WORLD if ctx.world_size > 1 else None
    return quality_of(outputs, targets, from_logits=True, group=group)


def wait_for_updates(ctx: TrainCtx) -> None:
    """Returns when the gradients that all ranks have handed in are applied. All ranks call it."""
    ctx.wait_for_gradients()
    meet(ctx.world_size)


def share_buffers(model: torch.nn.Module) -> None:
    """Gives all ranks rank 0's buffers, as DDP does at the next step."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


class _Share(IterableDataset):
    """What one rank evaluates."""

    def __init__(self, batches: Batches, rank: int, world_size: int) -> None:
        super().__init__()
        self._batches, self._share = batches, (rank, world_size)

    def __iter__(self) -> Iterator[PersiaBatch]:
        return iter(StripedBatches(self._batches, *self._share, requires_grad=False))
