"""Slots with `index: array`: the same rows and checkpoints as with the hash index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from persia.config import SlotConfig, parse_embedding_config
from persia.embedding.optim import Adagrad
from persia.errors import ConfigError, InvalidArgumentError
from persia.nn import EmbeddingBagCollection

NUM_IDS = 70_000
HASHED = {"hash_stack_rounds": 1, "embedding_size": 9}


def collection(*, array: bool, **settings: Any) -> EmbeddingBagCollection:
    index = {"index": "array", "cardinality": NUM_IDS} if array else {}
    slots = {"item": SlotConfig(dim=8, **index), "user": SlotConfig(dim=8), "tag": SlotConfig(dim=8, **index)}
    return EmbeddingBagCollection(slots, Adagrad(lr=0.1), num_threads=1, **settings)


def train(module: EmbeddingBagCollection, num_batches: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    outputs = []
    for _ in range(num_batches):
        lengths = torch.randint(0, 4, (3, 32), generator=generator)
        values = torch.randint(0, 300, (int(lengths.sum()),), generator=generator) * 233
        pooled = module(values, lengths)
        pooled.pow(2).sum().backward()
        outputs.append(pooled.detach().clone())
    return outputs


def files_of(directory: Path) -> dict[str, bytes]:
    """Those with rows; others have the time."""
    return {path.name: path.read_bytes() for path in sorted(directory.rglob("*.emb*"))}


@pytest.mark.parametrize("capacity", [1_000_000, 400])
def test_rows_and_checkpoints_are_those_of_the_hash_index(tmp_path: Path, capacity: int) -> None:
    modules = {array: collection(array=array, capacity=capacity) for array in (False, True)}
    outputs = {array: train(module, 30) for array, module in modules.items()}
    assert all(torch.equal(a, b) for a, b in zip(outputs[False], outputs[True], strict=True))
    assert modules[True].stats().num_evicted == modules[False].stats().num_evicted
    assert (modules[True].stats().num_evicted > 0) == (capacity == 400)
    for array, module in modules.items():
        module.dump(tmp_path / str(array))
    assert files_of(tmp_path / "True")
    assert files_of(tmp_path / "True") == files_of(tmp_path / "False")
    # Either kind loads what the other one wrote.
    for array, module in modules.items():
        module.load(tmp_path / str(not array))
    assert all(torch.equal(a, b) for a, b in zip(*(train(m, 5) for m in modules.values()), strict=True))


@pytest.mark.parametrize("value", [NUM_IDS, -1])
def test_ids_beyond_the_cardinality_are_refused(value: int) -> None:
    module = collection(array=True)
    with pytest.raises(InvalidArgumentError, match=r"slot 'tag' has the ID \d+, .* cardinality of 70000"):
        module(torch.tensor([1, 2, value]), torch.ones(3, 1, dtype=torch.int64))
    assert module.stats().num_rows == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs cardinality"),
        ({"cardinality": 2**31 + 1}, "cardinality of 2147483649 is more than the 2147483648"),
        (
            {"cardinality": 5, "hash_stack_config": {"hash_stack_rounds": 1, "embedding_size": 9}},
            "hash_stack",
        ),
        ({"cardinality": 5, "placement": "dense"}, "placement='dense' excludes index='array'"),
    ],
)
def test_what_cannot_be_an_array_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_embedding_config({"slots_config": {"a": {"dim": 2, "index": "array", **settings}}})


def test_slots_of_a_group_have_one_array() -> None:
    slots = {
        "a": {"dim": 2, "index": "array", "cardinality": 5},
        "b": {"dim": 2, "index": "array", "cardinality": 6},
    }
    with pytest.raises(ConfigError, match=r"whose arrays \(5 and 6 IDs\) differ"):
        parse_embedding_config({"slots_config": slots, "feature_groups": {"both": ["a", "b"]}})


def test_an_array_is_not_placed_in_the_dense_model_by_the_threshold() -> None:
    slots = {"a": {"dim": 2, "index": "array", "cardinality": 5}, "b": {"dim": 2, "cardinality": 5}}
    config = parse_embedding_config({"slots_config": slots, "dense_placement_threshold": 10})
    assert list(config.dense_slots) == ["b"]
