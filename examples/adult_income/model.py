"""The network of the published adult-income example, layer for layer."""

from __future__ import annotations

from typing import List  # noqa: UP035 - torch.jit.script resolves typing.List under every supported Python.

import torch
from torch import nn

NUM_SLOTS = 8
EMBEDDING_DIM = 8
NUM_CONTINUOUS = 5


class DNN(nn.Module):
    """Dense columns and embeddings each pass a linear layer and BatchNorm; joined, they give a probability.

    There are no activations between the linear layers: that is how the published figures were made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dense_layer = nn.Linear(NUM_CONTINUOUS, 16)
        self.dense_norm = nn.BatchNorm1d(16)
        self.embedding_layer = nn.Linear(NUM_SLOTS * EMBEDDING_DIM, 128)
        self.embedding_norm = nn.BatchNorm1d(128)
        self.head = nn.Sequential(nn.Linear(16 + 128, 256), nn.Linear(256, 128), nn.Linear(128, 1))

    def forward(
        self,
        non_id_type_feature_tensors: List[torch.Tensor],  # noqa: UP006
        id_type_feature_embedding_tensors: List[torch.Tensor],  # noqa: UP006
    ) -> torch.Tensor:
        """A dense tensor [batch, 5], eight embeddings [batch, 8], float32; gives probabilities [batch, 1]."""
        dense = self.dense_norm(self.dense_layer(non_id_type_feature_tensors[0]))
        embeddings = torch.cat(id_type_feature_embedding_tensors, dim=1)
        sparse = self.embedding_norm(self.embedding_layer(embeddings))
        return torch.sigmoid(self.head(torch.cat([dense, sparse], dim=1)))
