"""Converted models train like the originals with the same sparse rule, and their exports give what they give.

SGD and Adagrad leave rows without a gradient alone, so torch.optim over whole weights is the reference. Both
sides compute in float32; sums of a row's gradients may be taken in another order, which the tolerance
is for.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from persia.embedding.optim import SGD, Adagrad, Optimizer
from persia.nn import convert, export

RTOL, ATOL = 2e-4, 2e-5

OPTIMIZERS: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SGD(lr=0.1), lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adagrad": (
        Adagrad(lr=0.05, initial_accumulator_value=0.01),
        lambda weights: torch.optim.Adagrad(weights, lr=0.05, initial_accumulator_value=0.01),
    ),
}
NUM_STEPS = 40
Batch = tuple[tuple[Any, ...], torch.Tensor]  # the model's arguments, labels


def follow(
    model: nn.Module, batches: list[Batch], name: str, *, logit: Callable[[Any], torch.Tensor]
) -> None:
    """The same loop for both: only where the embeddings' rule runs differs."""
    rule, torch_rule = OPTIMIZERS[name]
    original, converted = model, convert(copy.deepcopy(model), rule)
    tables = [m for m in original.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    weights = list({id(m.weight): m.weight for m in tables}.values())
    dense = [p for p in original.parameters() if not any(p is weight for weight in weights)]
    assert len(list(converted.parameters())) == len(dense) > 0
    first = {id(weight): weight.detach().clone() for weight in weights}
    sides = [
        (original, [torch.optim.Adam(dense, lr=0.01), torch_rule(weights)]),
        (converted, [torch.optim.Adam(converted.parameters(), lr=0.01)]),
    ]
    losses: list[list[float]] = [[], []]
    for arguments, labels in batches:
        for side, (module, optimizers) in enumerate(sides):
            loss = nn.functional.binary_cross_entropy_with_logits(logit(module(*arguments)), labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses[side].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=RTOL, atol=ATOL)
    exported = export(converted)
    with torch.no_grad():
        assert torch.equal(exported(*batches[0][0]), converted.eval()(*batches[0][0]))
    originals = dict(original.named_modules())
    for place, module in converted.named_modules():
        if hasattr(module, "rows"):
            weight = originals[place].weight
            found = module.rows.pool(torch.arange(len(weight)), torch.ones(len(weight), dtype=torch.int64))
            torch.testing.assert_close(found, weight, rtol=RTOL, atol=ATOL)
            assert (weight - first[id(weight)]).abs().max() > 10 * ATOL


class EveryKind(nn.Module):
    """Padding, sum, mean, weights, a module used twice, two modules over one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Embedding(50, 8, padding_idx=3)
        self.mean = nn.EmbeddingBag(40, 8, mode="mean", padding_idx=1)
        self.weighted = nn.EmbeddingBag(40, 8, mode="sum")
        self.tied = nn.EmbeddingBag(50, 8, mode="sum")
        self.tied.weight = self.single.weight
        self.tower = nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(
        self, ids: torch.Tensor, flat: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        parts = [
            self.single(ids).sum(1),
            self.single(ids[:, 0]),
            self.mean(flat, offsets),
            self.weighted(flat, offsets, per_sample_weights=weights),
            self.tied(ids),
        ]
        output: torch.Tensor = self.tower(torch.cat(parts, dim=1))
        return output


def random_ids(generator: torch.Generator, bound: int, *shape: int) -> torch.Tensor:
    """Some often, most seldom, as IDs come."""
    return (torch.rand(shape, generator=generator).pow(2) * bound).long()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_kind_of_module(name: str) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches: list[Batch] = []
    for _ in range(NUM_STEPS):
        offsets = torch.randint(0, 30, (16,), generator=generator).sort().values
        offsets[0] = 0
        flat, weights = random_ids(generator, 40, 30), torch.rand(30, generator=generator)
        labels = torch.randint(0, 2, (16, 1), generator=generator).float()
        batches.append(((random_ids(generator, 50, 16, 3), flat, offsets, weights), labels))
    follow(EveryKind(), batches, name, logit=lambda output: output)


def imported(name: str) -> Any:
    """A library that may be absent, and is not as quiet as these tests."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("kind", ["DeepFM", "WDL"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_deepctr_torch(kind: str, name: str) -> None:
    imported("deepctr_torch")
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

    columns = [
        SparseFeat("user", 100, embedding_dim=4),
        SparseFeat("item", 200, embedding_dim=4),
        VarLenSparseFeat(
            SparseFeat("history", 200, embedding_dim=4, embedding_name="item"), 3, combiner="mean"
        ),
        DenseFeat("age", 1),
    ]
    # Their L2 terms reach every row in every step; the sparse rules' weight_decay reaches the batch's rows.
    options = {"l2_reg_linear": 0, "l2_reg_embedding": 0}
    model = getattr(models, kind)(columns, columns, dnn_hidden_units=(16, 8), init_std=0.5, **options)
    generator = torch.Generator().manual_seed(2)
    batches: list[Batch] = []
    for _ in range(NUM_STEPS):
        user, rest = random_ids(generator, 100, 32, 1), random_ids(generator, 200, 32, 4)
        inputs = torch.cat([user, rest, torch.rand(32, 1, generator=generator)], dim=1)
        batches.append(((inputs,), (rest[:, :1] % 2).float()))
    # The models end in a sigmoid.
    follow(model, batches, name, logit=lambda output: torch.logit(output, eps=1e-6))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_torchrec_dlrm(name: str) -> None:
    torchrec = imported("torchrec")
    from torchrec.models.dlrm import DLRM

    torch.manual_seed(0)
    tables = [
        torchrec.EmbeddingBagConfig(
            name="users", embedding_dim=8, num_embeddings=100, feature_names=["user"]
        ),
        torchrec.EmbeddingBagConfig(
            name="item_table", embedding_dim=8, num_embeddings=200, feature_names=["item", "history"]
        ),
        torchrec.EmbeddingBagConfig(
            name="tags",
            embedding_dim=8,
            num_embeddings=50,
            feature_names=["tag"],
            pooling=torchrec.PoolingType.MEAN,
        ),
    ]
    model = DLRM(
        torchrec.EmbeddingBagCollection(tables=tables),
        dense_in_features=4,
        dense_arch_layer_sizes=[16, 8],
        over_arch_layer_sizes=[16, 1],
    )
    generator = torch.Generator().manual_seed(3)
    batches: list[Batch] = []
    for _ in range(NUM_STEPS):
        lengths = torch.randint(0, 4, (4, 16), generator=generator)
        values = [
            random_ids(generator, bound, int(lengths[i].sum())) for i, bound in enumerate([50, 200, 100, 200])
        ]
        jagged = torchrec.KeyedJaggedTensor.from_lengths_sync(
            ["tag", "history", "user", "item"], torch.cat(values), lengths.flatten()
        )
        dense = torch.rand(16, 4, generator=generator)
        batches.append(((dense, jagged), (dense[:, :1] > 0.5).float()))
    follow(model, batches, name, logit=lambda output: output)
