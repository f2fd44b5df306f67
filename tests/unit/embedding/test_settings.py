"""Hyper-parameters of embeddings: honoured or refused."""

from __future__ import annotations

from typing import Any

import pytest

from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
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
    ],
)
def test_every_documented_setting_is_taken(optimizer: Optimizer) -> None:
    optimizer.train_config(EmbeddingConfig())


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
