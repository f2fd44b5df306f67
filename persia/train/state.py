"""Where a trainer's job is, besides the position of its data: stored in each of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from persia.checkpoint.checkpoints import Source
from persia.ctx.checkpoints import read_extra
from persia.errors import FailedPreconditionError
from persia.storage.location import Location

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

    def check(self, num_batches: int, num_schedulers: int, remedy: str) -> None:
        """FailedPreconditionError: it is of another job."""
        if self.batches != num_batches:
            raise FailedPreconditionError(
                f"the checkpoint is of {self.batches} batches an epoch, train has {num_batches} batches: "
                f"use the same files and batch_size, another directory, or {remedy}"
            )
        if len(self.schedulers) != num_schedulers:
            raise FailedPreconditionError(
                f"the checkpoint has the states of {len(self.schedulers)} schedulers, "
                f"schedulers= has {num_schedulers}: pass the same, or {remedy}"
            )

    def take_best(self, directory: Location, num_batches: int, num_schedulers: int, remedy: str) -> None:
        """The best evaluation becomes that of the checkpoint `best`.

        It may be newer than that of the checkpoint to resume from, or the directory may be another one.
        FailedPreconditionError: `best` is of another job.
        """
        best = JobState()
        if (place := newest(directory, NAMES[:1])) is not None:
            best = read_state(place, remedy)
            best.check(num_batches, num_schedulers, remedy)
        if best.best_step != self.best_step:
            self.best_step, self.best, self.since_best = best.best_step, best.best, 0


def newest(directory: Location, names: Sequence[str] = NAMES) -> Location | None:
    """The checkpoint of the latest step among `names`; None: there is none.

    One that does not say which batches are trained is only taken if there is no other.
    """
    places = [directory / name for name in names]
    found = [
        ((manifest.trained is not None, manifest.step), place)
        for place in places
        if (manifest := Source(place).manifest).step is not None
    ]
    return max(found, key=itemgetter(0))[1] if found else None


def read_state(place: Location, remedy: str) -> JobState:
    """The state of a checkpoint. FailedPreconditionError: no trainer of this version wrote it."""
    source = Source(place)
    extra = read_extra(source)
    if not isinstance(extra, dict) or extra.keys() != vars(JobState()).keys():
        raise FailedPreconditionError(
            f"{place} is a checkpoint of step {source.manifest.step} that no Trainer of this version wrote "
            "(earlier ones kept their progress in trainer.json): finish the job with the version that began "
            f"it, use another directory, or {remedy}; ctx.load_checkpoint() loads the model and its rows"
        )
    return JobState(**extra)


def check_position(place: Location, remedy: str) -> None:
    """FailedPreconditionError: the checkpoint does not say which batches are trained."""
    manifest = Source(place).manifest
    if manifest.trained is None:
        raise FailedPreconditionError(
            f"{place} does not say which batches its {manifest.step} steps have trained, as a rank did not "
            f"answer when it was written: use another directory, or {remedy}, to train all data again; "
            "ctx.load_checkpoint() loads the model and its rows"
        )
