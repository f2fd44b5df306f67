"""Features are matched by name: loaders may disagree about their order, and not about anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List  # noqa: UP035 - torch.jit.script resolves typing's

import numpy as np
import pytest
import torch

from persia.ctx import TrainCtx, eval_ctx
from persia.ctx.inputs import TrainedInputs
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import SGD
from persia.errors import InvalidArgumentError
from persia.storage.manifest import MANIFEST_NAME

SLOTS = {
    "slots_config": {
        "user": {"dim": 2},
        "item": {"dim": 2},
        "clicks": {"dim": 2, "embedding_summation": False, "sample_fixed_size": 3},
    }
}


class ByPosition(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        # User, item and the two dense features count differently: an exchange changes the result.
        total = (
            embeddings[0].sum(1) + 10 * embeddings[1].sum(1) + 100 * dense[0][:, 0] + 1000 * dense[1][:, 0]
        )
        return (total + self.bias).unsqueeze(1)


class ByName(ByPosition):
    def forward(
        self,
        dense: Dict[str, torch.Tensor],  # noqa: UP006
        embeddings: Dict[str, torch.Tensor],  # noqa: UP006
    ) -> torch.Tensor:
        total = embeddings["user"].sum(1) + 10 * embeddings["item"].sum(1)
        total = total + 100 * dense["age"][:, 0] + 1000 * dense["price"][:, 0]
        return (total + self.bias).unsqueeze(1)


IDS = ("user", "item", "clicks")


def batch(
    ids: tuple[str, ...] = IDS,
    dense: tuple[str, ...] = ("age", "price"),
    width: int = 1,
    dtype: str = "float32",
) -> PersiaBatch:
    numbers = {"user": 1, "item": 2, "clicks": 3}
    values = {"age": 0.5, "price": 0.25}
    return PersiaBatch(
        [
            IDTypeFeature("clicks", [np.array([3], np.uint64)])
            if name == "clicks"
            else IDTypeFeatureWithSingleID(name, np.array([numbers.get(name, 9)], np.uint64))
            for name in ids
        ],
        [NonIDTypeFeature(np.full((1, width), values.get(name, 0), dtype), name) for name in dense],
        [Label(np.ones((1, 1), np.float32))],
        requires_grad=False,
    )


def context(model: torch.nn.Module) -> TrainCtx:
    return TrainCtx(
        SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), model=model, mixed_precision=False, slots=SLOTS
    )


def fill(ctx: TrainCtx) -> None:
    for name, number in (("user", 1), ("item", 2)):
        ctx.set_embedding(name, np.array([number], np.uint64), np.full((1, 2), number, np.float32))


EXPECTED = 2 + 10 * 4 + 50 + 250


@pytest.mark.parametrize("model", [ByPosition(), ByName()])
def test_another_order_of_features_changes_no_output(model: torch.nn.Module) -> None:
    with context(model) as ctx:
        fill(ctx)
        for ids, dense in (
            (IDS, ("age", "price")),
            (("clicks", "item", "user"), ("age", "price")),
            (("item", "user", "clicks"), ("price", "age")),
        ):
            looked_up = ctx.get_embedding_from_data(batch(ids, dense))
            output, _ = ctx.forward(looked_up)
            assert output.item() == pytest.approx(EXPECTED), (ids, dense)
        with eval_ctx(model=model) as evaluation:
            looked_up = evaluation.get_embedding_from_data(
                batch(("clicks", "item", "user"), ("price", "age"))
            )
            assert evaluation.forward(looked_up)[0].item() == pytest.approx(EXPECTED)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (batch(("user", "clicks")), r"ID features.*missing: item.*trained with user, item, clicks"),
        (batch(dense=("age", "size")), r"dense features.*unknown: size; missing: price"),
        (batch(dense=("age",)), r"missing: price"),
        (batch(dtype="float64"), r"'age' is float64\[1, 1\]: .*trained with float32\[1, 1\]"),
    ],
)
def test_a_batch_with_other_features_is_refused(other: PersiaBatch, named: str) -> None:
    with context(ByPosition()) as ctx:
        ctx.forward(ctx.get_embedding_from_data(batch()))
        looked_up = ctx.get_embedding_from_data(other)
        with pytest.raises(InvalidArgumentError, match=named):
            ctx.forward(looked_up)


def test_a_checkpoint_tells_the_features_and_a_load_brings_their_order_back(tmp_path: Path) -> None:
    model = ByPosition()
    with context(model) as ctx:
        fill(ctx)
        ctx.forward(ctx.get_embedding_from_data(batch()))
        ctx.forward(ctx.get_embedding_from_data(batch(width=4)))
        ctx.dump_checkpoint(str(tmp_path / "model"))
    manifest = json.loads((tmp_path / "model" / MANIFEST_NAME).read_text())
    assert manifest["dense"]["signature"] == {
        "ids": [
            {"name": "user", "shape": [2], "raw": False},
            {"name": "item", "shape": [2], "raw": False},
            {"name": "clicks", "shape": [3, 3], "raw": True},
        ],
        # The width differed between batches.
        "dense": [
            {"name": "age", "dtype": "float32", "shape": [-1]},
            {"name": "price", "dtype": "float32", "shape": [-1]},
        ],
    }
    with context(model) as ctx:
        ctx.load_checkpoint(str(tmp_path / "model"))
        looked_up = ctx.get_embedding_from_data(batch(("clicks", "item", "user"), ("price", "age")))
        assert ctx.forward(looked_up)[0].item() == pytest.approx(EXPECTED), "the first batch after a restart"


def test_features_by_name_must_have_names_of_their_own() -> None:
    with context(ByName()) as ctx:
        looked_up = ctx.get_embedding_from_data(batch(dense=("age", "age")))
        with pytest.raises(InvalidArgumentError, match="not unique: age, age; name each NonIDTypeFeature"):
            ctx.forward(looked_up)


def test_ranks_agree_on_the_order_of_the_one_that_had_a_batch_first(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        first, second = TrainedInputs(2), TrainedInputs(2)
        second._key = first._key  # as on another rank, which has made as many contexts
        with context(ByPosition()) as ctx:
            signatures = []
            for inputs, order in ((first, IDS), (second, ("clicks", "item", "user"))):
                looked_up = ctx.get_embedding_from_data(batch(order))
                embeddings = looked_up.consume_all_id_type_feature_embedding_tensors()
                signatures.append(inputs.signature(None, looked_up, embeddings))
        assert signatures[0] == signatures[1]
        assert [feature.name for feature in signatures[1].ids] == list(IDS)
    finally:
        torch.distributed.destroy_process_group()
