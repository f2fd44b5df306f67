"""A converted model under DDP: two real ranks over gloo, beside the original under DDP."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from persia.nn import convert
from tests.rank_group import be_rank, run_ranks

RULE = Adagrad(lr=0.1, initial_accumulator_value=0.01)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(20, 4)
        self.item = nn.EmbeddingBag(30, 4, mode="mean")
        self.tower = nn.Linear(8, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.tower(torch.cat([self.user(users), self.item(items)], dim=1))
        return output


def train(rank: int) -> None:
    """Ranks have batches of different sizes; rank 1 does not use one of the modules in one step."""
    torch.manual_seed(rank)  # DDP and convert both make rank 0's values everybody's
    original = Model()
    with torch.no_grad():
        converted = Model()
        converted.load_state_dict(original.state_dict())
    group = dist.group.WORLD
    assert group is not None
    convert(converted, RULE, process_group=group)
    ddp = DistributedDataParallel(converted)
    reference = DistributedDataParallel(original)
    dense = torch.optim.SGD(converted.parameters(), lr=0.1)
    reference_dense = torch.optim.SGD(original.tower.parameters(), lr=0.1)
    reference_rows = torch.optim.Adagrad(
        [original.user.weight, original.item.weight], lr=0.1, initial_accumulator_value=0.01
    )
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(20):
        size = 3 + 2 * rank
        users = torch.randint(0, 20, (size,), generator=generator)
        items = torch.randint(0, 30, (size, 3), generator=generator)
        labels = torch.rand(size, 1, generator=generator)
        loss, expected = (nn.functional.mse_loss(model(users, items), labels) for model in (ddp, reference))
        torch.testing.assert_close(loss, expected)
        for optimizer in (dense, reference_dense, reference_rows):
            optimizer.zero_grad()
        loss.backward()
        expected.backward()
        for optimizer in (dense, reference_dense, reference_rows):
            optimizer.step()
    for module, weight in ((converted.user, original.user.weight), (converted.item, original.item.weight)):
        ids = torch.arange(len(weight))
        found = module(ids) if module is converted.user else module(ids[:, None])
        torch.testing.assert_close(found, weight)
        same: list[Any] = [None, None]
        dist.all_gather_object(same, found.detach())
        assert torch.equal(same[0], same[1])  # not only close: ranks add in one order


def fresh_rows(rank: int) -> None:
    """An ID that only rank 1 has seen is a row of both after its update."""
    config = EmbeddingConfig(seed=5 + rank)  # rank 0's counts
    model = convert(
        nn.Embedding(4, 2), RULE, grow=True, embedding_config=config, process_group=dist.group.WORLD
    )
    model(torch.tensor([1000 * rank])).sum().backward()
    rows: list[Any] = [None, None]
    dist.all_gather_object(rows, model.eval()(torch.tensor([0, 1000])))
    assert torch.equal(rows[0], rows[1])
    assert rows[0].all()


def refused(rank: int) -> None:
    """Counting batches, which ranks look up once more to update them."""
    admission = EmbeddingConfig(admit_after=2)
    with pytest.raises(InvalidArgumentError, match="admit_after=2"):
        convert(nn.Embedding(4, 2), RULE, embedding_config=admission, process_group=dist.group.WORLD)


def evicting(rank: int) -> None:
    model = convert(nn.Embedding(4, 2), RULE, grow=True, capacity=64, process_group=dist.group.WORLD)

    def train_on_new_ids() -> None:
        for start in range(0, 1000, 20):
            ids = torch.arange(start, start + 10 * (rank + 1))
            model(ids).sum().backward()

    # On both ranks, after the same step: neither is left waiting.
    with pytest.raises(ResourceExhaustedError, match="'Embedding' has more rows than its capacity"):
        train_on_new_ids()


def without_group(rank: int) -> None:
    model = convert(nn.Sequential(nn.Embedding(4, 2)), RULE)
    with pytest.raises(FailedPreconditionError, match=r"'0' is trained on 2 ranks.*process_group="):
        model(torch.tensor([1]))
    assert model.eval()(torch.tensor([1])).any()  # reading is no rank's business


def group_ended(rank: int) -> None:
    world = dist.new_group()
    ended = weakref.ref(world)
    model = convert(nn.Sequential(nn.Embedding(4, 2)), RULE, process_group=world)
    model(torch.tensor([rank])).sum().backward()
    dist.destroy_process_group(world)
    del world
    assert ended() is None, "a model keeps no group, whose threads would outlive the interpreter"
    with pytest.raises(FailedPreconditionError, match="has ended"):
        model(torch.tensor([rank])).sum().backward()


CASES = {case.__name__: case for case in (train, fresh_rows, evicting, without_group, group_ended, refused)}


@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks(case: str, tmp_path: Path) -> None:
    run_ranks(__file__, case, tmp_path)


if __name__ == "__main__":
    be_rank(CASES, *sys.argv[1:])
