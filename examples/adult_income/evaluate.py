"""Test AUC through the same servers that the training uses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from batches import to_persia_batch
from dataset import Split
from metrics import roc_auc
from model import DNN
from persia.ctx import eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import PersiaBatch


class TestDataset(IterableDataset):
    """Every test row once, in file order; can be iterated again for the next evaluation."""

    __test__ = False  # A data set, not a test case, whatever pytest makes of its name.

    def __init__(self, split: Split, buffer_size: int = 10) -> None:
        super().__init__(buffer_size)
        self._split = split

    def __iter__(self) -> Iterator[PersiaBatch]:
        for batch in self._split.batches():
            yield to_persia_batch(batch, requires_grad=False)


def evaluate(model: DNN, split: Split, device_id: int | None) -> float:
    """AUC over every row of `split`; leaves the model in training mode, as it was.

    `model` is the plain module, never its DDP wrapper: one rank evaluates alone, and the wrapper would wait
    for the others.
    """
    labels, scores = [], []
    model.eval()
    with eval_ctx(model=model, device_id=device_id) as ctx, torch.no_grad():
        for batch in DataLoader(TestDataset(split)):
            output, batch_labels = ctx.forward(batch)
            assert batch_labels is not None, "only inference has none"
            scores.append(output.cpu().numpy())
            labels.append(batch_labels[0].cpu().numpy())
    model.train()
    return roc_auc(np.concatenate(labels), np.concatenate(scores))
