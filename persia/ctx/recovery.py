"""Periodic checkpoints of a training context, and the return to the newest one after a restart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from persia.checkpoint.checkpoints import Source
from persia.ctx.ranks import Stateful, extremes
from persia.embedding.checks import at_least
from persia.errors import FailedPreconditionError, InvalidArgumentError
from persia.logger import get_default_logger
from persia.storage.location import Location
from persia.storage.manifest import MANIFEST_NAME
from persia.storage.versions import LATEST_NAME, resolve

if TYPE_CHECKING:
    from persia.ctx.train import TrainCtx


@dataclass(frozen=True)
class Recovery:
    """`TrainCtx(recovery=Recovery("s3://bucket/job"))`: a job that is started again continues.

    On entering, the context loads the newest checkpoint of `directory`. If there is none, it dumps one of
    step 0, so that a directory that cannot be written is an error at once.

    The data continues only if it comes from data loaders that call `DataCtx.resume`. Any other data starts
    over unless the script seeks in it, and a warning says so. Name a `Trainer` in `state`:
    `Recovery(..., state={"trainer": trainer})`.

    Args:
        directory: path or URL that all ranks and parameter servers can reach, for this job alone.
        every_steps: steps between two checkpoints.
        keep_last: checkpoints that are kept. An older one is deleted once a newer one is committed.
        state: objects of the script with `state_dict()` and `load_state_dict()`, by name, such as schedulers
            of the learning rate. They are stored with each checkpoint, and restored on entering. Of tensors,
            numbers, strings, bytes, None, and lists, tuples and dicts of them.

    Raises:
        InvalidArgumentError: a number below 1.
    """

    directory: str | os.PathLike[str]
    every_steps: int = 1000
    keep_last: int = 2
    state: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(1, "every_steps", self.every_steps)
        at_least(1, "keep_last", self.keep_last)


class PeriodicCheckpoints:
    """The checkpoints of one context, which calls it."""

    def __init__(self, ctx: TrainCtx, recovery: Recovery) -> None:
        self._ctx, self._recovery = ctx, recovery
        self._last_step = 0  # of the last dump that was begun, or loaded
        self._is_due = False
        self._must_check_data = False  # at the first step after a checkpoint was loaded

    def begin(self) -> None:
        """Loads the newest checkpoint, or dumps the first one. All ranks must call it.

        FailedPreconditionError: ranks find different checkpoints, or one without the state of the script or
        the position of the data.
        """
        recovery, ctx = self._recovery, self._ctx
        newest = _newest(Location.of(recovery.directory))
        step = -1 if newest is None else newest.manifest.step or 0
        smallest, largest = extremes(step, ctx.world_size, ctx.device)
        if largest != smallest:
            raise FailedPreconditionError(
                f"the newest checkpoint of {recovery.directory} is of step {smallest} for one rank and "
                f"{largest} for another (-1: there is none): all ranks must see one directory"
            )
        if newest is None:
            self._dump(blocking=True)
            return
        newest.check_position(
            "pass Recovery another directory, and where ctx.step == 0 call ctx.load_checkpoint() with an "
            "older checkpoint, or with this one to train all data again"
        )
        place = newest.location
        extra = ctx.load_checkpoint(str(place)) or {}
        for name, holder in recovery.state.items():
            if name not in extra:
                raise FailedPreconditionError(
                    f"{place} has no state of {name!r}: pass the same Recovery(state=...) as before, or "
                    "another directory"
                )
            holder.load_state_dict(extra[name])
        self._last_step = ctx.step
        self._must_check_data = ctx.step > 0
        get_default_logger().info("continues after step %d, with %s", ctx.step, place)

    def stepped(self, *, data_resumes: bool) -> None:
        """The dense optimizer has stepped: a checkpoint may be taken before the next batch."""
        if self._must_check_data and not data_resumes:
            self._warn_of_repeated_data()
        self._must_check_data = False
        if self._ctx.step - self._last_step >= self._recovery.every_steps:
            self._is_due = True

    def before_batch(self) -> None:
        """Takes the checkpoint that is due.

        Not in `stepped`: what the script does after `backward` is part of the step, such as to step a
        scheduler.
        """
        if self._is_due:
            self._is_due = False
            self._dump(blocking=False)

    def _warn_of_repeated_data(self) -> None:
        # Not an error: a data set may seek by `ctx.step`, or by a state in `Recovery(state=...)`.
        get_default_logger().warning(
            "training continues after step %d, but its data is not from data loaders that call "
            "DataCtx.resume(): unless the script seeks in its data, it starts over, and batches are trained "
            "again. Call resume() in each data loader",
            self._last_step,
        )

    def _dump(self, *, blocking: bool) -> None:
        recovery, ctx = self._recovery, self._ctx
        self._last_step = ctx.step
        extra = {name: holder.state_dict() for name, holder in recovery.state.items()}
        ctx.dump_checkpoint(
            recovery.directory,
            blocking=blocking,
            keep_last=recovery.keep_last,
            extra=extra or None,
            # The first one tells whether the directory can be written.
            on_error="raise" if blocking else "log",
        )


def _newest(directory: Location) -> Source | None:
    """The newest committed checkpoint. NotFoundError: `latest` names one that does not exist."""
    if (directory / MANIFEST_NAME).exists_replaced():
        raise InvalidArgumentError(
            f"Recovery: {directory} is a checkpoint itself: give the directory that has it, or a new one"
        )
    return Source(resolve(directory)) if (directory / LATEST_NAME).exists_replaced() else None
