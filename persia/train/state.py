"""Where a trainer's job is, besides the position of its data: stored in each of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from persia.checkpoint.checkpoints import Source
from persia.ctx.checkpoints import read_extra
from persia.errors import FailedPreconditionError
from persia.storage.location import Location

__all__ = ["NAMES", "JobState", "newest", "read_state"]

NAMES = ("best", "last")  # of checkpoints in the directory of a trainer


@dataclass
class JobState:
    """What a trainer has evaluated. Equal on all ranks at every evaluation."""

    step: int = 0  # of the last evaluation
    batches: int = 0  # of one epoch
    best_step: int | None = None
    best: dict[str, float] = field(default_factory=dict)
    since_best: int = 0  # evaluations
    schedulers: list[dict[str, Any]] = field(default_factory=list)  # their states

    def check(self, num_batches: int, num_schedulers: int) -> None:
        """FailedPreconditionError: it is of another job."""
        if self.batches != num_batches:
            raise FailedPreconditionError(
                f"the checkpoint is of {self.batches} batches an epoch, train has {num_batches} batches: "
                "use the same files and batch_size, another directory, or resume=False"
            )
        if len(self.schedulers) != num_schedulers:
            raise FailedPreconditionError(
                f"the checkpoint has the states of {len(self.schedulers)} schedulers, "
                f"schedulers= has {num_schedulers}: pass the same, or resume=False"
            )

    def take_best(self, directory: Location) -> None:
        """The best evaluation becomes that of the checkpoint `best`.

        It may be newer than that of a recovery's checkpoint, or the directory may be another one.
        """
        places = NAMES[:1]
        best = JobState() if (place := newest(directory, places)) is None else read_state(place)
        if best.best_step != self.best_step:
            self.best_step, self.best, self.since_best = best.best_step, best.best, 0


def newest(directory: Location, names: Sequence[str] = NAMES) -> Location | None:
    """The checkpoint of the latest step among `names`; None: there is none."""
    places = [directory / name for name in names]
    found = {step: place for place in places if (step := Source(place).manifest.step) is not None}
    return found[max(found)] if found else None


def read_state(place: Location) -> JobState:
    """The state of a checkpoint. FailedPreconditionError: no trainer of this version wrote it."""
    source = Source(place)
    extra = read_extra(source)
    if not isinstance(extra, dict) or extra.keys() != vars(JobState()).keys() or not source.manifest.trained:
        raise FailedPreconditionError(
            f"{place} is a checkpoint of step {source.manifest.step} that no Trainer of this version wrote "
            "(earlier ones kept their progress in trainer.json): finish the job with the version that began "
            "it, use another directory, or resume=False; ctx.load_checkpoint() loads the model and its rows"
        )
    return JobState(**extra)
