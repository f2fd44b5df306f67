"""DLRM and DCNv2: the dense part; parameter servers have the embeddings.

Annotations are evaluated here: `torch.jit.script` cannot resolve those that
`from __future__ import annotations` leaves as strings.
"""

from collections.abc import Sequence
from typing import (  # noqa: UP035 - torch.jit.script resolves typing.List under every supported Python
    List,
    Optional,
)

import torch
from torch import nn

from persia.embedding.checks import at_least
from persia.errors import InvalidArgumentError


def make_mlp(num_inputs: int, sizes: Sequence[int], *, relu_at_end: bool) -> nn.Sequential:
    """Linear layers of `sizes` with ReLU between them, initialized as in the published DLRM.

    Args:
        num_inputs: features of a sample.
        sizes: outputs of each layer, at least one.
        relu_at_end: whether the last layer has a ReLU, too.

    Raises InvalidArgumentError for no sizes, or for one below 1.
    """
    if not sizes:
        raise InvalidArgumentError("sizes is empty: name the outputs of at least one layer")
    layers: list[nn.Module] = []
    for index, size in enumerate(sizes):
        layer = nn.Linear(at_least(1, "num_inputs", num_inputs), at_least(1, f"sizes[{index}]", size))
        nn.init.xavier_normal_(layer.weight)
        nn.init.normal_(layer.bias, std=(1 / size) ** 0.5)
        layers += [layer, nn.ReLU()]
        num_inputs = size
    return nn.Sequential(*(layers if relu_at_end else layers[:-1]))


class DotInteraction(nn.Module):
    """The dot products of all pairs of vectors: [batch, count, dim] to [batch, count * (count - 1) / 2].

    Pairs are in the order of `torch.triu_indices`, as in torchrec.

    Args:
        count: vectors of a sample, at least 2.
    """

    pairs: torch.Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        count = at_least(2, "count", count)
        first, second = torch.triu_indices(count, count, offset=1)
        # A buffer of flat positions: it moves with the model, and one gather is faster than two.
        self.register_buffer("pairs", first * count + second, persistent=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """The products of each sample."""
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return products.index_select(1, self.pairs)


class LowRankCrossNet(nn.Module):
    """Cross layers of DCNv2: x[l+1] = x[0] * (W V x[l] + b) + x[l], for [batch, num_inputs].

    Args:
        num_inputs: features of a sample.
        num_layers: cross layers.
        rank: rows of V; the published recipes use 512.
    """

    def __init__(self, num_inputs: int, num_layers: int, rank: int) -> None:
        super().__init__()
        at_least(1, "num_inputs", num_inputs)
        at_least(1, "num_layers", num_layers)
        at_least(1, "rank", rank)
        downs = [nn.Linear(num_inputs, rank, bias=False) for _ in range(num_layers)]
        ups = [nn.Linear(rank, num_inputs) for _ in range(num_layers)]
        for down, up in zip(downs, ups, strict=True):
            nn.init.xavier_normal_(down.weight)
            nn.init.xavier_normal_(up.weight)
            nn.init.zeros_(up.bias)
        self.down, self.up = nn.ModuleList(downs), nn.ModuleList(ups)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The crossed features, [batch, num_inputs]."""
        crossed = inputs
        for down, up in zip(self.down, self.up):  # noqa: B905 - torch.jit.script knows no strict=
            crossed = inputs * up(down(crossed)) + crossed
        return crossed


class _Ranking(nn.Module):
    """What both models share: the bottom MLP, and the vectors of a sample."""

    def __init__(self, num_dense: int, num_embeddings: int, dim: int, bottom: Sequence[int]) -> None:
        super().__init__()
        at_least(0, "num_dense", num_dense)
        at_least(1, "num_embeddings", num_embeddings)
        at_least(1, "dim", dim)
        if num_dense and (not bottom or bottom[-1] != dim):
            raise InvalidArgumentError(
                f"bottom_mlp_sizes={list(bottom)} must end with the embedding dim {dim}: dot products and "
                "cross layers need vectors of one size"
            )
        made = make_mlp(num_dense, bottom, relu_at_end=True) if num_dense else None
        self.bottom: Optional[nn.Sequential] = made  # noqa: UP045 - as List above
        self.count = num_embeddings + bool(num_dense)

    def vectors(
        self,
        dense: List[torch.Tensor],  # noqa: UP006
        embeddings: List[torch.Tensor],  # noqa: UP006
    ) -> torch.Tensor:
        """[batch, count, dim]: the vector of the dense features first, if there are any."""
        if self.bottom is not None:
            embeddings = [self.bottom(dense[0])] + embeddings  # noqa: RUF005 - not scriptable
        return torch.stack(embeddings, dim=1)


class DLRM(_Ranking):
    """DLRM: a bottom MLP for dense features, dot products of all pairs of vectors, a top MLP.

    `forward` takes what a context gives: `dense`, a list of one float tensor [batch, num_dense] (empty if
    `num_dense` is 0), and `embeddings`, a list of one pooled tensor [batch, dim] for each slot. It
    returns logits, [batch, 1]. Works under autocast, `torch.compile` and `torch.jit.script`.

    Args:
        num_dense: dense features of a sample; 0: none, and there is no bottom MLP.
        num_embeddings: slots.
        dim: of each slot's embeddings.
        bottom_mlp_sizes: must end with `dim`.
        top_mlp_sizes: must end with 1.

    Raises:
        InvalidArgumentError: sizes that do not fit, naming the argument.
    """

    def __init__(
        self,
        num_dense: int = 13,
        num_embeddings: int = 26,
        dim: int = 128,
        *,
        bottom_mlp_sizes: Sequence[int] = (512, 256, 128),
        top_mlp_sizes: Sequence[int] = (1024, 1024, 512, 256, 1),
    ) -> None:
        super().__init__(num_dense, num_embeddings, dim, bottom_mlp_sizes)
        self.interaction = DotInteraction(self.count)
        _check_top(top_mlp_sizes)
        num_pairs = self.count * (self.count - 1) // 2
        self.top = make_mlp((dim if num_dense else 0) + num_pairs, top_mlp_sizes, relu_at_end=False)

    def forward(
        self,
        dense: List[torch.Tensor],  # noqa: UP006
        embeddings: List[torch.Tensor],  # noqa: UP006
    ) -> torch.Tensor:
        """The logits, [batch, 1]."""
        vectors = self.vectors(dense, embeddings)
        features = self.interaction(vectors)
        if self.bottom is not None:
            features = torch.cat([vectors[:, 0], features], dim=1)
        return self.top(features)  # type: ignore[no-any-return]


class DCNv2(_Ranking):
    """DLRM-DCNv2: as `DLRM`, with low-rank cross layers in the place of dot products.

    `forward` is that of `DLRM`.

    Args:
        num_dense: dense features of a sample; 0: none, and there is no bottom MLP.
        num_embeddings: slots.
        dim: of each slot's embeddings.
        bottom_mlp_sizes: must end with `dim`.
        top_mlp_sizes: must end with 1.
        num_cross_layers: cross layers.
        cross_layer_projection_dim: rank of their matrices.

    Raises:
        InvalidArgumentError: sizes that do not fit, naming the argument.
    """

    def __init__(
        self,
        num_dense: int = 13,
        num_embeddings: int = 26,
        dim: int = 128,
        *,
        bottom_mlp_sizes: Sequence[int] = (512, 256, 128),
        top_mlp_sizes: Sequence[int] = (1024, 1024, 512, 256, 1),
        num_cross_layers: int = 3,
        cross_layer_projection_dim: int = 512,
    ) -> None:
        super().__init__(num_dense, num_embeddings, dim, bottom_mlp_sizes)
        self.cross = LowRankCrossNet(self.count * dim, num_cross_layers, cross_layer_projection_dim)
        _check_top(top_mlp_sizes)
        self.top = make_mlp(self.count * dim, top_mlp_sizes, relu_at_end=False)

    def forward(
        self,
        dense: List[torch.Tensor],  # noqa: UP006
        embeddings: List[torch.Tensor],  # noqa: UP006
    ) -> torch.Tensor:
        """The logits, [batch, 1]."""
        return self.top(self.cross(self.vectors(dense, embeddings).flatten(1)))  # type: ignore[no-any-return]


def _check_top(sizes: Sequence[int]) -> None:
    if not sizes or sizes[-1] != 1:
        raise InvalidArgumentError(f"top_mlp_sizes={list(sizes)} must end with 1: the model returns a logit")
