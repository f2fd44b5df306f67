"""Sparse optimizers: settings here, arithmetic on the parameter servers.

Each rule is that of `torch.optim` applied to the rows a batch touches; rows a batch does not touch do not
decay. Every argument is honoured or refused on construction, by name: InvalidTypeError for what is no number,
InvalidArgumentError for one out of its range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from persia import _native
from persia.embedding import EmbeddingConfig
from persia.embedding.checks import checked_number
from persia.embedding.current import current_context
from persia.errors import FailedPreconditionError, InvalidArgumentError

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer"]


class Optimizer(ABC):
    """A sparse optimizer's settings."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """The optimizer's part of `_native.TrainConfig`'s arguments."""

    def _check(self) -> None:
        """The engine knows the ranges; asking it here refuses a setting in the line that gives it."""
        _native.TrainConfig(**self._settings())

    def train_config(self, embedding_config: EmbeddingConfig) -> _native.TrainConfig:
        """What the servers are told: this optimizer and `embedding_config`."""
        lower, upper = embedding_config.emb_initialization
        return _native.TrainConfig(
            **self._settings(),
            lower=lower,
            upper=upper,
            seed=embedding_config.effective_seed,
            admit_probability=embedding_config.admit_probability,
            weight_bound=embedding_config.weight_bound,
        )

    def apply(self) -> None:
        """Makes the current `TrainCtx` use this optimizer. `TrainCtx` does so on entering.

        Raises:
            FailedPreconditionError: no `TrainCtx` is entered.
        """
        context = current_context()
        register = getattr(context, "register_embedding_optimizer", None)
        if register is None:
            raise FailedPreconditionError(
                f"{type(self).__name__}.apply() needs an entered TrainCtx: call it inside `with TrainCtx()`"
            )
        register(self)


class SGD(Optimizer):
    """`torch.optim.SGD`: momentum without dampening or Nesterov, weight decay as L2.

    Args:
        lr: learning rate, > 0.
        momentum: in [0, 1); not 0 keeps one more float per element.
        weight_decay: >= 0.
    """

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.lr = checked_number("lr", lr)
        self.momentum = checked_number("momentum", momentum)
        self.weight_decay = checked_number("weight_decay", weight_decay)
        self._check()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": "sgd",
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        }


class Adagrad(Optimizer):
    """`torch.optim.Adagrad` (Duchi et al., 2011): the accumulator grows first, eps stands outside the
    square root.

    Args:
        lr: learning rate, > 0.
        initial_accumulator_value: >= 0.
        weight_decay: L2, >= 0.
        g_square_momentum: the accumulator is multiplied by it before each step; 1 is Adagrad, below 1
            forgets.
        eps: > 0.
        vectorwise_shared: one accumulator a row, fed with the mean of the squared gradient (row-wise
            Adagrad).
    """

    def __init__(
        self,
        lr: float = 1e-2,
        initial_accumulator_value: float = 1e-2,
        weight_decay: float = 0.0,
        g_square_momentum: float = 1.0,
        eps: float = 1e-10,
        vectorwise_shared: bool = False,
    ) -> None:
        self.lr = checked_number("lr", lr)
        self.initial_accumulator_value = checked_number(
            "initial_accumulator_value", initial_accumulator_value
        )
        self.weight_decay = checked_number("weight_decay", weight_decay)
        self.g_square_momentum = checked_number("g_square_momentum", g_square_momentum)
        self.eps = checked_number("eps", eps)
        self.vectorwise_shared = vectorwise_shared
        self._check()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": "rowwise_adagrad" if self.vectorwise_shared else "adagrad",
            "lr": self.lr,
            "initial_accumulator_value": self.initial_accumulator_value,
            "weight_decay": self.weight_decay,
            "g_square_momentum": self.g_square_momentum,
            "eps": self.eps,
        }


class Adam(Optimizer):
    """`torch.optim.Adam` (Kingma and Ba, 2015), lazily: a row's moments move, and its bias correction
    counts, only when the row is touched.

    Args:
        lr: learning rate, > 0.
        betas: decay of the two moments, each in [0, 1).
        weight_decay: L2, >= 0.
        eps: > 0.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise InvalidArgumentError(f"betas={betas!r} must be two numbers (beta1, beta2)")
        self.lr = checked_number("lr", lr)
        self.betas = (checked_number("beta1", betas[0]), checked_number("beta2", betas[1]))
        self.weight_decay = checked_number("weight_decay", weight_decay)
        self.eps = checked_number("eps", eps)
        self._check()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": "adam",
            "lr": self.lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "weight_decay": self.weight_decay,
            "eps": self.eps,
        }
