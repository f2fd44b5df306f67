"""Sparse optimizers: settings here, arithmetic on the parameter servers.

Each rule is that of `torch.optim` applied to the rows a batch touches; rows a batch does not touch do not
decay, and what a rule counts in steps it counts for each row. FTRL is that of McMahan et al. (2013), Lion
that of Chen et al. (2023). Every argument is honoured or refused on construction, by name: InvalidTypeError
for what is no number, InvalidArgumentError for one out of its range.

Attributes are what the optimizer was made with; `set_lr` is the way to change the learning rate, and
`LRSchedule` has a scheduler of `torch.optim.lr_scheduler` do it.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from persia import _native
from persia.current import current_context
from persia.embedding import EmbeddingConfig
from persia.embedding.checks import checked_number
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError

__all__ = [
    "FTRL",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Optimizer",
    "RMSprop",
]


class Optimizer(ABC):
    """A sparse optimizer's settings."""

    lr: float

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """The optimizer's name and all its hyper-parameters, as the engine calls them."""

    def _finish(self) -> None:
        """Ends every constructor. The engine knows the ranges; asking it here refuses a setting in the line
        that gives it."""
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InvalidArgumentError(f"lr={self.lr!r} must be a finite number above 0")
        self._first_lr = self.lr
        # Weak: an optimizer does not keep the object of a listener alive.
        self._listeners: list[weakref.WeakMethod[Callable[[Optimizer], None]]] = []
        self._check()

    def _check(self) -> None:
        _native.TrainConfig(**self._settings())

    def settings(self) -> dict[str, Any]:
        """As a slot of `embedding_config.yml` has it: `name` and hyper-parameters."""
        settings = self._settings()
        return {"name": settings.pop("optimizer"), **settings}

    def train_config(self, embedding_config: EmbeddingConfig) -> _native.TrainConfig:
        """What the servers are told: this optimizer and `embedding_config`."""
        return _native.TrainConfig(
            **self._settings(),
            initializer=embedding_config.initializer.settings(),
            seed=embedding_config.effective_seed,
            admit_probability=embedding_config.admit_probability,
            admit_after=embedding_config.admit_after,
            weight_bound=embedding_config.weight_bound,
            time_to_live_sec=embedding_config.time_to_live_sec or 0.0,
            min_norm=embedding_config.min_norm,
            lr_factor=self.lr / self._first_lr,
        )

    def set_lr(self, lr: float) -> None:
        """Changes the learning rate, also wherever the optimizer is in use. Rows and their state stay.

        The rates of slots with an optimizer of their own change in proportion. In a job of several ranks the
        rate of rank 0 counts. Batches whose gradients are under way may be applied with either rate.

        Args:
            lr: >= 0; at 0 rows stay as they are, but for what momentum and moments go on collecting.
        """
        before, self.lr = self.lr, checked_number("lr", lr)
        try:
            self._check()
        except InvalidArgumentError:
            self.lr = before
            raise
        if self.lr == before:
            return
        for reference in self._listeners:
            if (listener := reference()) is not None:
                listener(self)

    def subscribe(self, listener: Callable[[Optimizer], None]) -> None:
        """Calls `listener`, the method of an object, after each change of the learning rate."""
        self.unsubscribe(listener)
        self._listeners = [*self._listeners, weakref.WeakMethod(listener)]

    def unsubscribe(self, listener: Callable[[Optimizer], None]) -> None:
        """Undoes `subscribe`."""
        self._listeners = [left for left in self._listeners if left() not in (None, listener)]

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
    """`torch.optim.SGD`, weight decay as L2.

    Args:
        lr: learning rate, > 0.
        momentum: in [0, 1); not 0 keeps one more float per element.
        weight_decay: >= 0.
        dampening: in [0, 1), for the momentum; a row's first step is not dampened.
        nesterov: Nesterov's momentum; needs a momentum and no dampening.
    """

    def __init__(
        self,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.lr = checked_number("lr", lr)
        self.momentum = checked_number("momentum", momentum)
        self.weight_decay = checked_number("weight_decay", weight_decay)
        self.dampening = checked_number("dampening", dampening)
        self.nesterov = _checked_flag("nesterov", nesterov)
        self._finish()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": "sgd",
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "dampening": self.dampening,
            "nesterov": self.nesterov,
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
        self._finish()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": "rowwise_adagrad" if self.vectorwise_shared else "adagrad",
            "lr": self.lr,
            "initial_accumulator_value": self.initial_accumulator_value,
            "weight_decay": self.weight_decay,
            "g_square_momentum": self.g_square_momentum,
            "eps": self.eps,
        }


class _AdamFamily(Optimizer):
    """Two moments with decays `betas`, and steps counted for each row."""

    _name: str

    def __init__(self, lr: float, betas: tuple[float, float], weight_decay: float, eps: float) -> None:
        self.lr = checked_number("lr", lr)
        self.betas = _checked_betas(betas)
        self.weight_decay = checked_number("weight_decay", weight_decay)
        self.eps = checked_number("eps", eps)
        self._finish()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": self._name,
            "lr": self.lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "weight_decay": self.weight_decay,
            "eps": self.eps,
        }


class Adam(_AdamFamily):
    """`torch.optim.Adam` (Kingma and Ba, 2015), lazily: a row's moments move, and its bias correction
    counts, only when the row is touched.

    Args:
        lr: learning rate, > 0.
        betas: decay of the two moments, each in [0, 1).
        weight_decay: L2, >= 0.
        eps: > 0.
    """

    _name = "adam"

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(lr, betas, weight_decay, eps)


class AdamW(_AdamFamily):
    """`torch.optim.AdamW` (Loshchilov and Hutter, 2019), lazily as `Adam`: weights are multiplied by
    1 - lr * weight_decay in each step of their row.

    Args:
        lr: learning rate, > 0.
        betas: decay of the two moments, each in [0, 1).
        weight_decay: decoupled, >= 0.
        eps: > 0.
    """

    _name = "adamw"

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(lr, betas, weight_decay, eps)


class Adamax(_AdamFamily):
    """`torch.optim.Adamax` (Kingma and Ba, 2015), lazily as `Adam`.

    Args:
        lr: learning rate, > 0.
        betas: decay of the first moment and of the largest gradient, each in [0, 1).
        weight_decay: L2, >= 0.
        eps: > 0.
    """

    _name = "adamax"

    def __init__(
        self,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(lr, betas, weight_decay, eps)


class RMSprop(Optimizer):
    """`torch.optim.RMSprop` (Graves, 2013, where centered).

    Args:
        lr: learning rate, > 0.
        alpha: decay of the mean of squared gradients, in [0, 1).
        eps: > 0, outside the square root.
        weight_decay: L2, >= 0.
        momentum: in [0, 1); not 0 keeps one more float per element.
        centered: divides by an estimate of the standard deviation instead; one more float per element.
    """

    def __init__(
        self,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
    ) -> None:
        self.lr = checked_number("lr", lr)
        self.alpha = checked_number("alpha", alpha)
        self.eps = checked_number("eps", eps)
        self.weight_decay = checked_number("weight_decay", weight_decay)
        self.momentum = checked_number("momentum", momentum)
        self.centered = _checked_flag("centered", centered)
        self._finish()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": "rmsprop",
            "lr": self.lr,
            "alpha": self.alpha,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "centered": self.centered,
        }


class Adadelta(Optimizer):
    """`torch.optim.Adadelta` (Zeiler, 2012).

    Args:
        lr: learning rate, > 0; the paper's is 1.
        rho: decay of the means of squared gradients and steps, in [0, 1).
        eps: > 0, inside the square roots.
        weight_decay: L2, >= 0.
    """

    def __init__(
        self, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0
    ) -> None:
        self.lr = checked_number("lr", lr)
        self.rho = checked_number("rho", rho)
        self.eps = checked_number("eps", eps)
        self.weight_decay = checked_number("weight_decay", weight_decay)
        self._finish()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": "adadelta",
            "lr": self.lr,
            "rho": self.rho,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }


class FTRL(Optimizer):
    """FTRL-Proximal for each coordinate (McMahan et al., 2013, algorithm 1); torch has none.

    A weight is a function of the gradients seen, not a change of the weight before: of a row's initial values
    only what the learning rate of its first step leaves remains, and with `l1` weights become exactly 0. A
    change of the learning rate rescales weights at their next step.

    Args:
        lr: the paper's alpha, > 0.
        l1: >= 0.
        l2: >= 0.
        beta: the paper's beta, >= 0.
        initial_accumulator_value: of the sum of squared gradients, >= 0; not 0 together with beta.
    """

    def __init__(
        self,
        lr: float = 1e-2,
        l1: float = 0.0,
        l2: float = 0.0,
        beta: float = 0.0,
        initial_accumulator_value: float = 0.1,
    ) -> None:
        self.lr = checked_number("lr", lr)
        self.l1 = checked_number("l1", l1)
        self.l2 = checked_number("l2", l2)
        self.beta = checked_number("beta", beta)
        self.initial_accumulator_value = checked_number(
            "initial_accumulator_value", initial_accumulator_value
        )
        self._finish()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": "ftrl",
            "lr": self.lr,
            "l1": self.l1,
            "l2": self.l2,
            "beta": self.beta,
            "initial_accumulator_value": self.initial_accumulator_value,
        }


class Lion(Optimizer):
    """Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms"); torch has none.

    Each weight of a row moves by `lr` in the direction of the sign of beta1 * m + (1 - beta1) * g; then the
    momentum becomes beta2 * m + (1 - beta2) * g. It keeps one float per element, half of what `Adam` keeps.
    Steps do not shrink with the gradient: the paper suggests a third to a tenth of AdamW's learning rate.

    Args:
        lr: learning rate, > 0.
        betas: of the direction and of the momentum, each in [0, 1).
        weight_decay: decoupled, as `AdamW`'s, >= 0.
    """

    def __init__(
        self, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        self.lr = checked_number("lr", lr)
        self.betas = _checked_betas(betas)
        self.weight_decay = checked_number("weight_decay", weight_decay)
        self._finish()

    def _settings(self) -> dict[str, Any]:
        return {
            "optimizer": "lion",
            "lr": self.lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "weight_decay": self.weight_decay,
        }


def _checked_betas(betas: object) -> tuple[float, float]:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgumentError(f"betas={betas!r} must be two numbers (beta1, beta2)")
    return checked_number("beta1", betas[0]), checked_number("beta2", betas[1])


def _checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name}={value!r} is a {type(value).__name__}: pass True or False")
    return value
