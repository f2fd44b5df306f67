"""The network of the example, with and without persia."""

from __future__ import annotations

import torch
from torch import nn

NUM_SLOTS = 6
DIM = 16


class ClickModel(nn.Module):
    """A factorization machine beside a small network, as in DeepFM."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(NUM_SLOTS * DIM + 1, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        """A dense tensor [batch, 1] and an embedding [batch, DIM] for each slot; gives logits [batch, 1]."""
        fields = torch.stack(embeddings, dim=1)
        pairs = (fields.sum(1).pow(2) - fields.pow(2).sum(1)).sum(1, keepdim=True) / 2
        logits: torch.Tensor = self.deep(torch.cat([fields.flatten(1), dense[0]], dim=1)) + pairs
        return logits
