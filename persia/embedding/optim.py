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
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

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


@dataclass(eq=False)  # known by its identity: contexts and schedules share one object
class Optimizer:
    """A sparse optimizer's settings. A subclass names the engine's optimizer and declares its settings."""

    name: ClassVar[str]

    lr: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "betas":
                self.betas = _checked_betas(value)
            elif field.type == "bool":
                if not isinstance(value, bool):
                    found = type(value).__name__
                    raise InvalidTypeError(f"{field.name}={value!r} is a {found}: pass True or False")
            else:
                setattr(self, field.name, checked_number(field.name, value))
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InvalidArgumentError(f"lr={self.lr!r} must be a finite number above 0")
        self._first_lr = self.lr
        # Weak: an optimizer does not keep the object of a listener alive.
        self._listeners: list[weakref.WeakMethod[Callable[[Optimizer], None]]] = []
        self._check()

    def _check(self) -> None:
        # The engine knows the ranges. Asked here, it refuses a setting in the line that gives it.
        _native.TrainConfig(**self._arguments())

    def settings(self) -> dict[str, Any]:
        """The optimizer as a slot of `embedding_config.yml` has it: `name` and all hyper-parameters."""
        # The engine's hyper-parameters are single numbers, and files have them by the same names.
        settings: dict[str, Any] = {"name": self.name}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "betas":
                settings["beta1"], settings["beta2"] = value
            else:
                settings[field.name] = value
        return settings

    def _arguments(self) -> dict[str, Any]:
        settings = self.settings()
        return {"optimizer": settings.pop("name"), **settings}

    def train_config(self, embedding_config: EmbeddingConfig) -> _native.TrainConfig:
        """What the servers are told: this optimizer and `embedding_config`."""
        return _native.TrainConfig(
            **self._arguments(),
            initializer=embedding_config.initializer.settings(),
            seed=embedding_config.effective_seed,
            admit_probability=embedding_config.admit_probability,
            admit_after=embedding_config.admit_after,
            weight_bound=embedding_config.weight_bound,
            time_to_live_sec=embedding_config.time_to_live_sec or 0.0,
            min_norm=embedding_config.min_norm,
            # Slots may have optimizers of their own, whose rates follow this one in proportion.
            lr_factor=self.lr / self._first_lr,
        )

    def set_lr(self, lr: float) -> None:
        """Changes the learning rate, also wherever the optimizer is in use. Rows and their state stay.

        The rates of slots with an optimizer of their own change in proportion. In a job of several ranks the
        rate of rank 0 counts. Batches whose gradients are under way may be applied with either rate.

        Args:
            lr: at least 0; at 0 only momentum and moments still change.
        """
        # Set first, as the engine checks all settings together; undone when it refuses.
        before, self.lr = self.lr, checked_number("lr", lr)
        try:
            self._check()
        except InvalidArgumentError:
            self.lr = before
            raise
        if self.lr == before:
            return
        # `subscribe` and `unsubscribe` make new lists, so a listener may replace itself in this loop.
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
        # By name and not by class: this layer is below contexts.
        context = current_context(object)
        register = getattr(context, "register_embedding_optimizer", None)
        if register is None:
            raise FailedPreconditionError(
                f"{type(self).__name__}.apply() needs an entered TrainCtx: call it inside `with TrainCtx()`"
            )
        register(self)


@dataclass(eq=False)
class SGD(Optimizer):
    """`torch.optim.SGD`, weight decay as L2.

    Args:
        lr: learning rate, > 0.
        momentum: in [0, 1); not 0 keeps one more float per element.
        weight_decay: at least 0.
        dampening: in [0, 1), for the momentum; a row's first step is not dampened.
        nesterov: Nesterov's momentum; needs a momentum and no dampening.
    """

    name = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False


@dataclass(eq=False)
class Adagrad(Optimizer):
    """`torch.optim.Adagrad` (Duchi et al., 2011): the accumulator grows first, eps stands outside the
    square root.

    Args:
        lr: learning rate, > 0.
        initial_accumulator_value: at least 0.
        weight_decay: L2, >= 0.
        g_square_momentum: the accumulator is multiplied by it before each step; 1 is Adagrad, below 1
            forgets.
        eps: above 0.
        vectorwise_shared: one accumulator a row, fed with the mean of the squared gradient (row-wise
            Adagrad).
    """

    name = "adagrad"
    lr: float = 1e-2
    initial_accumulator_value: float = 1e-2
    weight_decay: float = 0.0
    g_square_momentum: float = 1.0
    eps: float = 1e-10
    vectorwise_shared: bool = False

    def __post_init__(self) -> None:
        self.vectorwise_shared = bool(self.vectorwise_shared)  # scripts of the published system pass 0 or 1
        super().__post_init__()

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        if settings.pop("vectorwise_shared"):  # to the engine it is another optimizer
            settings["name"] = "rowwise_adagrad"
        return settings


@dataclass(eq=False)
class Adam(Optimizer):
    """`torch.optim.Adam` (Kingma and Ba, 2015), lazily: a row's moments move, and its bias correction
    counts, only when the row is touched.

    Args:
        lr: learning rate, > 0.
        betas: decay of the two moments, each in [0, 1).
        weight_decay: L2, >= 0.
        eps: above 0.
    """

    name = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    eps: float = 1e-8


@dataclass(eq=False)
class AdamW(Adam):
    """`torch.optim.AdamW` (Loshchilov and Hutter, 2019), lazily as `Adam`: weights are multiplied by
    1 - lr * weight_decay in each step of their row.

    Args:
        lr: learning rate, > 0.
        betas: decay of the two moments, each in [0, 1).
        weight_decay: decoupled, >= 0.
        eps: above 0.
    """

    name = "adamw"
    weight_decay: float = 1e-2


@dataclass(eq=False)
class Adamax(Adam):
    """`torch.optim.Adamax` (Kingma and Ba, 2015), lazily as `Adam`.

    Args:
        lr: learning rate, > 0.
        betas: decay of the first moment and of the largest gradient, each in [0, 1).
        weight_decay: L2, >= 0.
        eps: above 0.
    """

    name = "adamax"
    lr: float = 2e-3


@dataclass(eq=False)
class RMSprop(Optimizer):
    """`torch.optim.RMSprop` (Graves, 2013, where centered).

    Args:
        lr: learning rate, > 0.
        alpha: decay of the mean of squared gradients, in [0, 1).
        eps: above 0, outside the square root.
        weight_decay: L2, >= 0.
        momentum: in [0, 1); not 0 keeps one more float per element.
        centered: divides by an estimate of the standard deviation instead; one more float per element.
    """

    name = "rmsprop"
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False


@dataclass(eq=False)
class Adadelta(Optimizer):
    """`torch.optim.Adadelta` (Zeiler, 2012).

    Args:
        lr: learning rate, > 0; the paper's is 1.
        rho: decay of the means of squared gradients and steps, in [0, 1).
        eps: above 0, inside the square roots.
        weight_decay: L2, >= 0.
    """

    name = "adadelta"
    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0


@dataclass(eq=False)
class FTRL(Optimizer):
    """FTRL-Proximal for each coordinate (McMahan et al., 2013, algorithm 1); torch has none.

    A weight is a function of the gradients seen, not a change of the weight before: of a row's initial values
    only what the learning rate of its first step leaves remains, and with `l1` weights become exactly 0. A
    change of the learning rate rescales weights at their next step.

    Args:
        lr: the paper's alpha, > 0.
        l1: at least 0.
        l2: at least 0.
        beta: the paper's beta, >= 0.
        initial_accumulator_value: of the sum of squared gradients, >= 0; not 0 together with beta.
    """

    name = "ftrl"
    lr: float = 1e-2
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1


@dataclass(eq=False)
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

    name = "lion"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0


def _checked_betas(betas: object) -> tuple[float, float]:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgumentError(f"betas={betas!r} must be two numbers (beta1, beta2)")
    return checked_number("beta1", betas[0]), checked_number("beta2", betas[1])
