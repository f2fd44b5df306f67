"""Our optimizers by the names that cases use."""

from __future__ import annotations

from benchmarks.cases import LEARNING_RATE, Optimizer
from persia.embedding import optim

__all__ = ["sparse_optimizer"]


def sparse_optimizer(name: Optimizer) -> optim.Optimizer:
    """Our optimizer of that name, with the learning rate that all sides use."""
    if name == "sgd":
        return optim.SGD(lr=LEARNING_RATE)
    if name == "adam":
        return optim.Adam(lr=LEARNING_RATE)
    return optim.Adagrad(lr=LEARNING_RATE, vectorwise_shared=name == "rowwise_adagrad")
