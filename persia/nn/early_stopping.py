"""The best evaluation of a training job, and when to stop because no better one follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from persia import env
from persia.embedding.checks import at_least, checked_number
from persia.errors import InvalidArgumentError
from persia.logger import get_default_logger
from persia.nn.metrics import ClickQuality

_SIGNS = {"auc": 1, "log_loss": -1, "normalized_entropy": -1}  # -1: less is better


class EarlyStopping:
    """Compares the evaluations of a job: which one is the best, and whether training should stop.

    A `Trainer` has one. In a loop of your own each rank has one, and all take the same decision if their
    evaluations are equal, as those of `persia.ctx.evaluate` are. A job that is started again continues with
    its best evaluation if `Recovery(state={"stopping": stopping})` names it.

    Args:
        metric: "auc", "log_loss" or "normalized_entropy": decides which evaluation is the best.
        patience: evaluations without a new best after which training stops; None: it does not.
        target: value of `metric` at which training stops, such as an AUC of 0.8025; None: it does not.

    Raises:
        InvalidArgumentError: an unknown metric, or a `patience` below 1.
        InvalidTypeError: a `target` that is no number.

    Examples:
        >>> stopping = EarlyStopping(patience=3)
        >>> for batch in loader:
        ...     ctx.backward(loss_fn(*ctx.forward(batch)))
        ...     if ctx.step % 1000 == 0 and stopping.update(ctx.step, evaluate(ctx, valid)):
        ...         ctx.dump_checkpoint("s3://models/best")
        ...     if stopping.reason:
        ...         break
    """

    def __init__(
        self, metric: str = "auc", *, patience: int | None = None, target: float | None = None
    ) -> None:
        if metric not in _SIGNS:
            raise InvalidArgumentError(f"metric={metric!r} must be one of {', '.join(_SIGNS)}")
        self.metric = metric
        self.patience = None if patience is None else at_least(1, "patience", patience)
        self.target = None if target is None else checked_number("target", target)
        self.reset()

    def reset(self) -> None:
        """Forgets all evaluations."""
        self.best_step: int | None = None  # of the best evaluation; None: there is none
        self.best: dict[str, float] = {}  # its metrics
        self.since_best = 0  # evaluations after it

    def update(self, step: int, quality: ClickQuality) -> bool:
        """Takes the evaluation after `step`; True: it is the best so far. One that is NaN is not counted."""
        values = quality.values()
        if self._score(values) > self._score(self.best):
            self.best_step, self.best, self.since_best = step, values, 0
            return True
        if math.isnan(values[self.metric]):
            if not env.get_rank():  # all ranks have the same
                get_default_logger().warning(
                    f"step {step}: {self.metric} is NaN: valid needs samples of both labels, and the model "
                    "finite outputs; patience does not count this evaluation"
                )
        # After a restart, steps up to the best one may be trained once more: patience counts later ones.
        elif step > (self.best_step or 0):
            self.since_best += 1
        return False

    @property
    def reason(self) -> str | None:
        """Why training should stop; None: it should not."""
        if self.target is not None and self._score(self.best) >= self._score({self.metric: self.target}):
            return f"{self.metric} is that of target={self.target} or better"
        if self.patience is not None and self.since_best >= self.patience:
            return f"{self.metric} was best at step {self.best_step} (patience={self.patience})"
        return None

    def state_dict(self) -> dict[str, Any]:
        """The best evaluation, and how many came after it; not the arguments."""
        return {"best_step": self.best_step, "best": self.best, "since_best": self.since_best}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues after the evaluations of `state_dict`."""
        self.best_step, self.best = state_dict["best_step"], dict(state_dict["best"])
        self.since_best = state_dict["since_best"]

    def take_best(self, state_dict: Mapping[str, Any]) -> None:
        """The best evaluation becomes that of `state_dict`, of the best checkpoint; {}: there is none.

        It may be newer than the checkpoint to resume from, or the directory may be another one.
        """
        if state_dict.get("best_step") != self.best_step:
            self.reset()
            self.best_step, self.best = state_dict.get("best_step"), dict(state_dict.get("best", {}))

    def _score(self, values: Mapping[str, float]) -> float:
        """The metric, or its negative, so that more is better; without an evaluation less than any."""
        sign = _SIGNS[self.metric]
        return sign * values.get(self.metric, -sign * math.inf)
