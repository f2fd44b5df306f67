"""Learning-rate schedules: those of torch for sparse optimizers, and NVIDIA's of DLRM for both kinds.

torch's schedulers steer objects of `torch.optim.Optimizer`, which a sparse optimizer is not: it has no
parameters here. `LRSchedule` gives the scheduler a stand-in and passes the rates on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from persia.embedding.checks import at_least, checked_number, type_name
from persia.embedding.optim import Optimizer
from persia.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["LRSchedule", "WarmupPolynomialDecay"]


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


@dataclass(frozen=True)
class WarmupPolynomialDecay:
    """The factor of a learning rate at a step, for `torch.optim.lr_scheduler.LambdaLR`.

    At training step s, from 1: 1 - (W - s) / (W * 2 ** warmup_factor) while s <= W = `warmup_steps`; then 1;
    then max(((D + N - s) / N) ** decay_power, end) for D < s <= D + N, with D = `decay_start_step` and N =
    `decay_steps`; then end. Use the same for dense and sparse rates.

    Args:
        warmup_steps: 0: no warm-up.
        warmup_factor: 0 begins near zero, larger values begin nearer to the full rate.
        decay_start_step: None: right after the warm-up.
        decay_steps: 0: no decay.
        decay_power: of the polynomial.
        end: the smallest factor of the decay: `decay_end_lr` of the published flags divided by `lr`.

    Raises:
        InvalidArgumentError: a number out of range, or a decay that begins before the warm-up ends.

    Examples:
        >>> schedule = WarmupPolynomialDecay(8000, decay_start_step=48000, decay_steps=24000)
        >>> schedulers = [
        ...     torch.optim.lr_scheduler.LambdaLR(dense_optimizer, schedule),
        ...     LRSchedule(sparse_optimizer, lambda o: torch.optim.lr_scheduler.LambdaLR(o, schedule)),
        ... ]
    """

    warmup_steps: int = 8000
    warmup_factor: float = 0
    decay_start_step: int | None = 48000
    decay_steps: int = 24000
    decay_power: float = 2
    end: float = 0

    def __post_init__(self) -> None:
        at_least(0, "warmup_steps", self.warmup_steps)
        at_least(0, "decay_steps", self.decay_steps)
        for name in ("warmup_factor", "decay_power", "end"):
            if checked_number(name, getattr(self, name)) < 0:
                raise InvalidArgumentError(f"{name}={getattr(self, name)} must be at least 0")
        if self.decay_start_step is not None and self.decay_start_step < self.warmup_steps:
            raise InvalidArgumentError(
                f"decay_start_step={self.decay_start_step} is before the end of the warm-up, step "
                f"{self.warmup_steps}: make it larger"
            )

    def __call__(self, trained: int) -> float:
        """The factor for the step after `trained` ones, as `LambdaLR` counts."""
        step = trained + 1
        if step <= self.warmup_steps:
            return 1 - (self.warmup_steps - step) / (self.warmup_steps * 2**self.warmup_factor)
        start = self.warmup_steps if self.decay_start_step is None else self.decay_start_step
        if not self.decay_steps or step <= start:
            return 1.0
        if step > start + self.decay_steps:
            return float(self.end)
        return float(
            max(((start + self.decay_steps - step) / self.decay_steps) ** self.decay_power, self.end)
        )


def check_steps_alone(schedulers: Iterable[object]) -> None:
    """InvalidTypeError: one of them needs a metric at each step."""
    for scheduler in schedulers:
        if isinstance(getattr(scheduler, "scheduler", scheduler), ReduceLROnPlateau):
            raise InvalidTypeError(
                "schedulers has a ReduceLROnPlateau, which needs a metric: use a schedule of the step"
            )
