"""Hyper-parameters of embeddings: honoured or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from persia import _native
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.initializers import Normal
from persia.embedding.optim import FTRL, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Lion, Optimizer, RMSprop
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError


def test_published_defaults() -> None:
    config = get_default_embedding_config()
    assert (config.emb_initialization, config.admit_probability, config.weight_bound) == (
        (-0.01, 0.01),
        1.0,
        10,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"emb_initialization": (1, 0)},
        {"emb_initialization": (0, float("inf"))},
        {"emb_initialization": 3},
        {"emb_initialization": ("a", 1)},
        {"admit_probability": -0.1},
        {"admit_probability": 1.1},
        {"weight_bound": -1},
        {"weight_bound": float("nan")},
        {"seed": -1},
        {"admit_after": 0},
        {"admit_after": 256},
        {"time_to_live_sec": 0},
        {"time_to_live_sec": float("inf")},
        {"min_norm": -1},
    ],
)
def test_bad_values_are_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InvalidArgumentError, match=name):
        EmbeddingConfig(**changes)


@pytest.mark.parametrize(
    "changes", [{"admit_probability": "x"}, {"weight_bound": None}, {"weight_bound": True}, {"seed": 1.5}]
)
def test_what_is_no_number_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InvalidTypeError, match=name):
        EmbeddingConfig(**changes)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.1),
        SGD(0.1, momentum=0.9, weight_decay=0.01),
        Adagrad(),
        Adagrad(1e-3, initial_accumulator_value=0, weight_decay=0.1, g_square_momentum=0.9, eps=1e-8),
        Adagrad(vectorwise_shared=True),
        Adam(),
        Adam(1e-2, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-7),
        SGD(0.1, momentum=0.9, nesterov=True),
        SGD(0.1, momentum=0.9, dampening=0.5),
        AdamW(),
        Adamax(),
        RMSprop(),
        RMSprop(momentum=0.9, centered=True),
        Adadelta(),
        Lion(),
        Lion(1e-3, betas=(0.8, 0.9), weight_decay=0.1),
        FTRL(),
        FTRL(l1=1, l2=1, beta=1, initial_accumulator_value=0),
    ],
)
def test_every_documented_setting_is_taken(optimizer: Optimizer) -> None:
    optimizer.train_config(EmbeddingConfig())


@pytest.mark.parametrize("kind", [Adagrad, Adam, AdamW, Adamax, RMSprop, Adadelta, FTRL, Lion])
def test_defaults_are_those_that_a_slot_of_a_file_has(kind: type[Optimizer]) -> None:
    optimizer = kind()
    by_name = _native.TrainConfig(optimizer=optimizer.settings()["name"], lr=optimizer.lr)
    assert optimizer.train_config(EmbeddingConfig()).encode() == by_name.encode()


@pytest.mark.parametrize("kind", [Adam, AdamW, Adamax, RMSprop, Adadelta])
def test_defaults_are_those_of_torch(kind: type[Optimizer]) -> None:
    theirs = getattr(torch.optim, kind.__name__)([torch.zeros(1)]).defaults
    ours = vars(kind())
    shared = set(theirs) & set(ours)
    assert {"lr", "eps", "weight_decay"} <= shared
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_settings_name_what_the_optimizer_was_made_with() -> None:
    numbers = {"lr": 0.1, "l1": 2.0, "l2": 3.0, "beta": 4.0, "initial_accumulator_value": 5.0}
    assert FTRL(0.1, 2, 3, 4, 5).settings() == {"name": "ftrl", **numbers}


def test_set_lr_reaches_whoever_uses_the_optimizer() -> None:
    class User:
        def __init__(self) -> None:
            self.rates: list[float] = []

        def register_embedding_optimizer(self, optimizer: Optimizer) -> None:
            self.rates.append(optimizer.lr)

    optimizer, user = SGD(0.5), User()
    optimizer.subscribe(user.register_embedding_optimizer)
    optimizer.set_lr(0.25)
    optimizer.set_lr(0.25)
    optimizer.set_lr(0)
    assert user.rates == [0.25, 0.0]
    for wrong in (-1.0, float("nan")):
        with pytest.raises(InvalidArgumentError, match="lr"):
            optimizer.set_lr(wrong)
    with pytest.raises(InvalidTypeError, match="lr"):
        optimizer.set_lr("0.1")  # type: ignore[arg-type]
    assert optimizer.lr == 0.0
    optimizer.unsubscribe(user.register_embedding_optimizer)
    optimizer.set_lr(1.0)
    assert user.rates == [0.25, 0.0]


def test_an_initializer_takes_the_place_of_the_bounds() -> None:
    plain = EmbeddingConfig(emb_initialization=Normal(std=0.5))
    assert plain.initializer == Normal(std=0.5)
    assert SGD(0.1).train_config(plain).encode() != SGD(0.1).train_config(EmbeddingConfig()).encode()


@pytest.mark.parametrize(
    ("optimizer", "settings", "named"),
    [
        (SGD, {"lr": 0.0}, "lr"),
        (SGD, {"lr": 0.1, "momentum": 1.0}, "momentum"),
        (SGD, {"lr": 0.1, "weight_decay": -1.0}, "weight_decay"),
        (Adagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
        (Adagrad, {"g_square_momentum": 2.0}, "g_square_momentum"),
        (Adagrad, {"eps": -1.0}, "eps"),
        (Adam, {"betas": (1.0, 0.9)}, "beta1"),
        (Adam, {"betas": (0.9,)}, "betas"),
        (Adam, {"lr": float("nan")}, "lr"),
        (SGD, {"lr": 0.1, "nesterov": True}, "nesterov"),
        (SGD, {"lr": 0.1, "dampening": 0.5}, "dampening"),
        (RMSprop, {"alpha": 1.0}, "alpha"),
        (Adadelta, {"rho": -0.1}, "rho"),
        (FTRL, {"l1": -1.0}, "l1"),
        (FTRL, {"initial_accumulator_value": 0.0}, "beta"),
        (AdamW, {"betas": (0.9, 1.0)}, "beta2"),
    ],
)
def test_settings_out_of_range_are_refused(
    optimizer: type[Optimizer], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        optimizer(**settings)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (SGD, {"lr": "0.1"}),
        (SGD, {"lr": 0.1, "momentum": None}),
        (Adagrad, {"eps": "1e-8"}),
        (Adam, {"weight_decay": True}),
        (SGD, {"lr": 0.1, "nesterov": 1}),
        (RMSprop, {"centered": "yes"}),
    ],
)
def test_settings_that_are_no_numbers_are_refused(
    optimizer: type[Optimizer], settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidTypeError, match=list(settings)[-1]):
        optimizer(**settings)


def test_apply_needs_a_context() -> None:
    with pytest.raises(FailedPreconditionError, match="TrainCtx"):
        SGD(0.1).apply()
