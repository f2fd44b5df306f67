"""What `convert` replaces, what it refuses, and what replaced modules do with unusual input.

That they train like the originals: tests/numerics/test_converted_models_against_torch.py.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from persia.config import parse_embedding_config
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from persia.nn import StoreEmbedding, StoreEmbeddingBag, convert, slots_for


def both(module: nn.Module, **options: Any) -> tuple[Any, Any]:
    """The original and its conversion."""
    return module, convert(copy.deepcopy(module), SGD(lr=1.0), **options)


# --- what is replaced ---


def test_modules_anywhere_are_replaced_and_parameters_are_the_dense_ones() -> None:
    model = nn.ModuleDict(
        {
            "deep": nn.ModuleList([nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))]),
            "bag": nn.EmbeddingBag(4, 2, mode="sum"),
        }
    )
    dense = model["deep"][0][1]
    assert convert(model, SGD(lr=1.0)) is model
    assert isinstance(model["deep"][0][0], StoreEmbedding)
    assert isinstance(model["bag"], StoreEmbeddingBag)
    assert [id(p) for p in model.parameters()] == [id(p) for p in dense.parameters()]
    assert list(model.state_dict()) == ["deep.0.1.weight", "deep.0.1.bias"]
    assert repr(model["bag"].rows) == "StoreRows(4 IDs, dim=2; SGD, rows=4)"


def test_an_embedding_by_itself() -> None:
    original, converted = both(nn.Embedding(5, 3))
    assert isinstance(converted, StoreEmbedding)
    assert torch.equal(converted(torch.arange(5)), original.weight)


def test_select_and_frozen_modules() -> None:
    model = nn.ModuleDict(
        {"small": nn.Embedding(3, 2), "large": nn.Embedding(1000, 2), "frozen": nn.Embedding(1000, 2)}
    )
    model["frozen"].weight.requires_grad_(False)
    frozen = model["frozen"].weight.clone()
    convert(model, SGD(lr=1.0), select=lambda name, module: module.num_embeddings > 100)
    assert [type(model[name]) for name in model] == [nn.Embedding, StoreEmbedding, nn.Embedding]
    assert torch.equal(model["frozen"].weight, frozen)


def test_replaced_weights_are_emptied() -> None:
    module = nn.Embedding(1000, 8)
    weight = module.weight
    convert(nn.Sequential(module), SGD(lr=1.0))
    assert weight.shape == (0, 8)


def test_one_module_in_two_places_stays_one() -> None:
    shared = nn.Embedding(5, 3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    convert(model, SGD(lr=1.0))
    assert model["a"] is model["b"][0]


def test_tied_weights_stay_tied() -> None:
    rows, bags = nn.Embedding(5, 3), nn.EmbeddingBag(5, 3, mode="sum")
    bags.weight = rows.weight
    model = convert(nn.ModuleDict({"rows": rows, "bags": bags}), SGD(lr=1.0))
    before = model["rows"](torch.tensor([2])).detach()
    model["bags"](torch.tensor([[2]])).sum().backward()
    assert torch.equal(model["rows"](torch.tensor([2])), before - 1)
    assert model["rows"].rows is model["bags"].rows


def test_modes_of_training_are_kept() -> None:
    converted = convert(nn.Sequential(nn.Embedding(5, 3)).eval(), SGD(lr=1.0))
    assert not converted[0].rows.training
    assert not converted(torch.tensor([1])).requires_grad
    assert converted.train()(torch.tensor([1])).requires_grad


def test_large_weights_are_taken_over_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.nn.store_embedding._BLOCK_BYTES", 100)
    original, converted = both(nn.Embedding(1000, 3))
    assert torch.equal(converted(torch.arange(1000)), original.weight)


# --- what is refused ---


class OwnForward(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def parametrized() -> nn.Module:
    module = nn.Embedding(5, 3)
    torch.nn.utils.parametrizations.spectral_norm(module)
    return module


def hooked() -> nn.Module:
    module = nn.Embedding(5, 3)
    module.register_forward_hook(lambda *args: None)
    return module


def infinite() -> nn.Module:
    module = nn.Embedding(5, 3)
    module.weight.data[2, 1] = float("inf")
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Embedding(5, 3, max_norm=1.0), r"'0' has max_norm=1.0.*or leave it out by select="),
        (lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), "'0' has scale_grad_by_freq"),
        (lambda: nn.EmbeddingBag(5, 3, mode="max"), "'0' has mode='max'"),
        (lambda: nn.Embedding(5, 3, dtype=torch.float64), "'0' has a weight of torch.float64"),
        (lambda: nn.Embedding(5, 3, device="meta"), "'0' is on the meta device"),
        (lambda: OwnForward(5, 3), "'0' is a OwnForward with a forward of its own"),
        (parametrized, "'0' is parametrized"),
        (hooked, "'0' has hooks"),
        (infinite, "'0' has a NaN or an infinity"),
    ],
)
def test_what_a_store_cannot_stand_for_is_refused_and_nothing_is_changed(make: Any, reason: str) -> None:
    model = nn.Sequential(make(), nn.Embedding(5, 3))
    with pytest.raises(InvalidArgumentError, match=reason):
        convert(model, SGD(lr=1.0))
    assert type(model[1]) is nn.Embedding
    assert model[1].weight.shape == (5, 3)
    convert(model, SGD(lr=1.0), select=lambda name, module: name == "1")
    assert isinstance(model[1], StoreEmbedding)


def test_a_weight_that_is_used_elsewhere_is_refused() -> None:
    model = nn.ModuleDict({"in": nn.Embedding(5, 3), "out": nn.Linear(3, 5, bias=False)})
    model["out"].weight = model["in"].weight
    with pytest.raises(InvalidArgumentError, match=r"'out.weight' is the weight of a chosen embedding too"):
        convert(model, SGD(lr=1.0))


def test_nothing_to_convert_and_wrong_types() -> None:
    with pytest.raises(InvalidArgumentError, match="Linear has 0 trainable .* nothing to convert"):
        convert(nn.Linear(2, 2), SGD(lr=1.0))
    with pytest.raises(InvalidArgumentError, match="has 1 trainable"):
        convert(nn.Sequential(nn.Embedding(2, 2)), SGD(lr=1.0), select=lambda name, module: False)
    with pytest.raises(InvalidTypeError, match="model is a list"):
        convert([nn.Embedding(2, 2)], SGD(lr=1.0))  # type: ignore[arg-type]
    model = nn.Sequential(nn.Embedding(2, 2))
    with pytest.raises(InvalidTypeError, match="torch.optim"):
        convert(model, torch.optim.SGD(model.parameters(), lr=1.0))  # type: ignore[arg-type]
    assert type(model[0]) is nn.Embedding


def test_a_capacity_below_the_vocabulary_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(100, 2))
    with pytest.raises(InvalidArgumentError, match=r"capacity is too small for '0': \d+ of 100 rows"):
        convert(model, SGD(lr=1.0), capacity=50)
    assert model[0].weight.shape == (100, 2)


# --- inputs ---


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 0), (0,), (2, 2, 2)])
def test_rows_of_any_shape_of_ids(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    original, converted = both(nn.Embedding(7, 3))
    ids = torch.randint(0, 7, shape).to(dtype)
    assert torch.equal(converted(ids), original(ids))
    with torch.no_grad():
        assert torch.equal(converted(ids), original(ids))


def test_ids_of_any_strides() -> None:
    original, converted = both(nn.Embedding(7, 3))
    ids = torch.randint(0, 7, (4, 6)).t()[::2]
    assert torch.equal(converted(ids), original(ids))


@pytest.mark.parametrize("row", [0.0, 2.5])
def test_the_padding_row_is_constant(row: float) -> None:
    module = nn.Embedding(5, 3, padding_idx=1)
    module.weight.data[1] = row
    original, converted = both(module)
    ids = torch.tensor([[0, 1], [1, 4]])
    assert torch.equal(converted(ids), original(ids))
    converted(ids).sum().backward()
    assert converted(ids)[1, 0].tolist() == [row] * 3
    assert torch.equal(converted(ids)[1, 1], original.weight[4] - 1)
    assert torch.equal(converted(torch.tensor([1])), original(torch.tensor([1])))


BAGS = torch.tensor([4, 1, 1, 0, 3]), torch.tensor([0, 2, 2])


@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_with_and_without_offsets(mode: str, padding_idx: int | None) -> None:
    original, converted = both(nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding_idx))
    ids, offsets = BAGS
    for args in [(ids, offsets), (ids[:4].view(2, 2),), (ids, offsets.int())]:
        torch.testing.assert_close(converted(*args), original(*(a.long() for a in args)))


def test_bags_with_the_last_offset() -> None:
    original, converted = both(nn.EmbeddingBag(5, 3, mode="sum", include_last_offset=True))
    ids, offsets = BAGS
    bounds = torch.cat([offsets, torch.tensor([5])])
    assert torch.equal(converted(ids, bounds), original(ids, bounds))


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_weighted_bags_and_the_gradient_of_their_weights(padding_idx: int | None) -> None:
    original, converted = both(nn.EmbeddingBag(5, 3, mode="sum", padding_idx=padding_idx))
    ids, offsets = BAGS
    gradients = []
    for module in (original, converted):
        weights = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0], requires_grad=True)
        pooled = module(ids, offsets, per_sample_weights=weights)
        pooled.pow(2).sum().backward()
        gradients.append((pooled, weights.grad))
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(converted(torch.arange(5)[:, None]), original.weight - original.weight.grad)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((torch.tensor([1, 2]),), "offsets is missing"),
        ((torch.tensor([[1, 2]]), torch.tensor([0])), "offsets was given beside a 2D input"),
        ((torch.tensor([[[1]]]),), r"input has the shape \[1, 1, 1\]"),
        ((torch.tensor([1, 2]), torch.tensor([1])), "offsets must begin with 0"),
        ((torch.tensor([1, 2]), torch.tensor([0, 2, 1])), "offsets must begin with 0, not fall"),
        ((torch.tensor([1, 2]), torch.tensor([0, 3])), "stay within the 2 IDs"),
        ((torch.tensor([[1, 2]]), None, torch.ones(2)), r"per_sample_weights has the shape \[2\]"),
    ],
)
def test_bags_that_do_not_fit(args: Any, named: str) -> None:
    _, converted = both(nn.EmbeddingBag(5, 3, mode="sum"))
    with pytest.raises(InvalidArgumentError, match=named):
        converted(*args)


def test_weights_need_a_sum_and_ids_are_integers() -> None:
    _, converted = both(nn.EmbeddingBag(5, 3, mode="mean"))
    with pytest.raises(InvalidArgumentError, match="per_sample_weights was given with mode='mean'"):
        converted(torch.tensor([[1]]), None, torch.ones(1, 1))
    with pytest.raises(InvalidTypeError, match="input is torch.float32"):
        converted(torch.ones(2, 2))
    with pytest.raises(InvalidTypeError, match="offsets is torch.float32"):
        converted(torch.tensor([1]), torch.zeros(1))


# --- IDs beyond the vocabulary ---


@pytest.mark.parametrize("unknown", [5, -1, 2**40])
def test_ids_beyond_the_vocabulary_are_refused(unknown: int) -> None:
    model = convert(nn.Sequential(nn.Embedding(5, 3)), SGD(lr=1.0))
    with pytest.raises(
        InvalidArgumentError, match=rf"'0' was given the ID {unknown}, .* 0 to 4: .*grow=True"
    ):
        model(torch.tensor([1, unknown]))
    assert model[0].rows.stats().num_rows == 5


def test_a_growing_vocabulary_makes_rows_in_training_only() -> None:
    config = EmbeddingConfig(emb_initialization=(0.5, 0.5))
    model = convert(nn.Embedding(5, 3), SGD(lr=1.0), grow=True, embedding_config=config)
    ids = torch.tensor([2**40, -7])
    assert model.num_embeddings is None
    assert not model.eval()(ids).any()
    assert model.train()(ids).tolist() == [[0.5] * 3] * 2
    assert model.rows.stats().num_rows == 7


# --- updates ---


def test_one_backward_is_one_update_however_often_a_module_is_used() -> None:
    optimizer = Adagrad(lr=1.0, initial_accumulator_value=0.0)
    model = convert(nn.Embedding(5, 2), optimizer)
    before = model(torch.tensor([3])).detach()
    loss = model(torch.tensor([3])).sum() + 3 * model(torch.tensor([3, 0])).sum()
    loss.backward()
    # Adagrad's first step is lr whatever the gradient's size; two updates would be more.
    torch.testing.assert_close(model(torch.tensor([3])), before - 1)
    assert model.rows.stats().num_updated == 2


def test_ids_may_be_overwritten_before_backward() -> None:
    model = convert(nn.Embedding(5, 1), SGD(lr=1.0))
    before = model(torch.arange(5)).detach()
    ids = torch.tensor([1])
    loss = (model(ids) + model(ids)).sum()
    ids.fill_(4)
    loss.backward()
    torch.testing.assert_close(before - model(torch.arange(5)), torch.tensor([[0.0], [2], [0], [0], [0]]))


def test_a_failed_backward_leaves_nothing_for_the_next() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("on purpose")

    model = convert(nn.Embedding(5, 1), SGD(lr=1.0))
    before = model(torch.arange(5)).detach()
    scale = torch.ones(1, requires_grad=True)
    early = scale * 1.0
    early.register_hook(fail)
    with pytest.raises(KeyError):
        (model(torch.tensor([1])).sum() + early).backward()
    model(torch.tensor([2])).sum().backward()
    change = before - model(torch.arange(5))
    torch.testing.assert_close(change[2], torch.tensor([1.0]))
    assert not change[1].any()


def test_errors_of_an_update_reach_backward() -> None:
    model = convert(nn.Embedding(5, 1), SGD(lr=1.0))
    loss = model(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(FailedPreconditionError, match="updated already"):
        loss.backward()


# --- copies, pickles, state ---


def test_copies_and_pickles_are_refused_and_a_weight_is_explained() -> None:
    model = convert(nn.Sequential(nn.Embedding(5, 3)), SGD(lr=1.0))
    with pytest.raises(FailedPreconditionError, match="StoreRows cannot be copied or pickled"):
        copy.deepcopy(model)
    with pytest.raises(FailedPreconditionError, match="StoreRows cannot be copied or pickled"):
        pickle.dumps(model)
    with pytest.raises(AttributeError, match="has no weight: its rows are in a store"):
        _ = model[0].weight
    assert not hasattr(model[0], "weight")


def test_the_state_of_the_original_is_taken_over() -> None:
    original = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 1))
    model = convert(copy.deepcopy(original), SGD(lr=1.0))
    nn.init.normal_(original[0].weight)
    model.load_state_dict(original.state_dict())
    assert torch.equal(model(torch.arange(5)), original(torch.arange(5)))
    state = {**original.state_dict(), "0.weight": torch.ones(5, 4)}
    with pytest.raises(InvalidArgumentError, match=r"'0' has the shape \[5, 4\], must be \[n, 3\]"):
        model.load_state_dict(state)
    model.load_state_dict(model.state_dict())


# --- slots for servers ---


def test_slots_for_servers_are_those_of_the_weights() -> None:
    model = nn.ModuleDict(
        {"user": nn.Embedding(5, 3), "bags": nn.Sequential(nn.EmbeddingBag(4, 2, mode="sum"))}
    )
    model["same"] = nn.EmbeddingBag(5, 3, mode="sum")
    model["same"].weight = model["user"].weight
    slots = slots_for(model)
    assert slots == {
        "feature_index_prefix_bit": 8,
        "slots_config": {"user": {"dim": 3}, "bags.0": {"dim": 2}},
    }
    assert list(parse_embedding_config(slots).slots_config) == ["user", "bags.0"]
    assert type(model["user"]) is nn.Embedding
    only = slots_for(model, select=lambda name, module: name.startswith("bags"))
    assert list(only["slots_config"]) == ["bags.0"]
    many = nn.ModuleList(nn.Embedding(2, 2) for _ in range(300))
    assert slots_for(many)["feature_index_prefix_bit"] == 9
    with pytest.raises(InvalidArgumentError, match="has max_norm"):
        slots_for(nn.Embedding(5, 3, max_norm=1.0))
    with pytest.raises(InvalidTypeError, match="model is a list"):
        slots_for([])  # type: ignore[arg-type]
