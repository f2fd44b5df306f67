"""NVIDIA's learning-rate schedule of DLRM: a linear warm-up, then a polynomial decay."""

from __future__ import annotations

from dataclasses import dataclass

from persia.embedding.checks import at_least, checked_number
from persia.errors import InvalidArgumentError


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
