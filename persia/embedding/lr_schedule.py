"""Learning-rate schedules of torch for sparse optimizers.

torch's schedulers steer objects of `torch.optim.Optimizer`, which a sparse optimizer is not: it has no
parameters here. `LRSchedule` gives the scheduler a stand-in and passes the rates on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from persia.embedding.checks import type_name
from persia.embedding.optim import Optimizer
from persia.errors import InvalidTypeError

__all__ = ["LRSchedule"]


class LRSchedule:
    """A scheduler of `torch.optim.lr_scheduler` that steers an optimizer of `persia.embedding.optim`.

    Make it before training or inside the context, and call `step()` where torch's scheduler would be called:
    after each `backward`, or after each epoch. Rows and their state are not touched. Each change of the rate
    is one call to the servers; `step()` makes none where the rate stays the same.

    Args:
        optimizer: whose rate follows; its rate now is the scheduler's base rate.
        make: makes the scheduler for the `torch.optim.Optimizer` that it is given.

    Examples:
        >>> schedule = LRSchedule(optimizer, lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=1000))
        >>> for batch in loader:
        ...     ctx.backward(loss_fn(*ctx.forward(batch)))
        ...     schedule.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: Callable[[torch.optim.Optimizer], LRScheduler],
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InvalidTypeError(
                f"optimizer is {type_name(optimizer)}, must be one of persia.embedding.optim; give "
                "those of torch.optim to the scheduler itself"
            )
        self.optimizer = optimizer
        # torch refuses an optimizer without parameters. This one has no gradient, so `step` changes nothing.
        self._stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=optimizer.lr)
        self.scheduler = make(self._stand_in)
        if not isinstance(self.scheduler, LRScheduler):
            raise InvalidTypeError(
                f"make() returned a {type(self.scheduler).__name__}, must be an LRScheduler"
            )
        self._pass_on()

    def step(self, metrics: float | None = None) -> None:
        """Moves on by one step; `metrics` is for `ReduceLROnPlateau`."""
        # torch warns of schedulers that step before their optimizer has.
        self._stand_in.step()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if metrics is None:
                raise InvalidTypeError(
                    "metrics is missing: ReduceLROnPlateau needs the metric that it watches"
                )
            self.scheduler.step(metrics)
        else:
            self.scheduler.step()
        self._pass_on()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state and the present rate."""
        return {"scheduler": self.scheduler.state_dict(), "lr": self._lr()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self.scheduler.load_state_dict(state["scheduler"])
        # The state of a torch scheduler lacks the present rate: torch keeps that with the optimizer.
        self._stand_in.param_groups[0]["lr"] = state["lr"]
        self._pass_on()

    def _lr(self) -> float:
        return float(self._stand_in.param_groups[0]["lr"])

    def _pass_on(self) -> None:
        self.optimizer.set_lr(self._lr())
