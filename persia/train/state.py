"""Where a trainer's job is: what it has trained, and its best evaluation, stored beside its checkpoints."""

from __future__ import annotations

import io
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from persia.checkpoint.checkpoints import Source
from persia.errors import FailedPreconditionError, NotFoundError
from persia.storage.location import Location

_NAME, _MAX_BYTES = "trainer.json", 1 << 28


@dataclass
class JobState:
    """Where a job is. Equal on all ranks at every evaluation, and stored with each checkpoint."""

    step: int = 0
    batches: int = 0  # of one epoch
    next: int = 0  # all batches below this number are trained
    done: list[int] = field(default_factory=list)  # trained batches above it
    best_step: int | None = None
    best: dict[str, float] = field(default_factory=dict)
    since_best: int = 0  # evaluations
    schedulers: str = ""  # base64 of `torch.save`, as keys of their states may be numbers; of none: empty
    run: str = ""  # identity of the run that stored this, and the step at which that run began
    began_at: int = 0

    def add(self, numbers: set[int]) -> None:
        """Marks batches as trained."""
        above = numbers.union(self.done)
        while self.next in above:
            above.remove(self.next)
            self.next += 1
        self.done = sorted(above)

    def take_schedulers(self, schedulers: Iterable[Any]) -> None:
        """Keeps what the schedulers of a script have counted."""
        content = io.BytesIO()
        torch.save([scheduler.state_dict() for scheduler in schedulers], content)
        self.schedulers = b64encode(content.getvalue()).decode()

    def give_schedulers(self, schedulers: Sequence[Any]) -> None:
        """Gives them to the same schedulers of a resumed script. FailedPreconditionError: another number."""
        content = io.BytesIO(b64decode(self.schedulers))
        states = torch.load(content, map_location="cpu", weights_only=True) if self.schedulers else []
        if len(states) != len(schedulers):
            raise FailedPreconditionError(
                f"the checkpoint of step {self.step} has the states of {len(states)} schedulers, schedulers= "
                f"has {len(schedulers)}: pass the same, or resume=False"
            )
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)


class StateFile:
    """The states of a job's checkpoints, `best` and `last` in `directory`: each under its step."""

    def __init__(self, directory: Location) -> None:
        self._directory = directory

    def newest(self, num_batches: int, run: str = "") -> tuple[JobState, Location | None]:
        """The state of the newest checkpoint and its place; a new state if there is none.

        That at which `run` began, if this has stored any: its batches are numbered from there.
        FailedPreconditionError for a checkpoint of other data than epochs of `num_batches`.
        """
        states = self._read()
        for stored in states.values():
            if run and stored.get("run") == run:
                return JobState(**states.get(str(stored["began_at"]), {})), None
        places = [self._directory / name for name in ("best", "last")]
        found = {step: place for place in places if (step := Source(place).manifest.step) is not None}
        if not found:
            return JobState(), None
        step = max(found)
        state = states.get(str(step))
        if state is None or state["batches"] != num_batches:
            known = "no trainer wrote" if state is None else f"of {state['batches']} batches"
            raise FailedPreconditionError(
                f"{found[step]} is a checkpoint of step {step} {known}, train has {num_batches} batches: "
                "use the same files and batch_size, another directory, or resume=False"
            )
        return JobState(**state), found[step]

    def add(self, state: JobState) -> None:
        """Stores one more. It keeps the others: a dump that fails leaves the checkpoint of any of them."""
        states = {step: old for step, old in self._read().items() if int(step) < state.step}
        states[str(state.step)] = asdict(state)
        (self._directory / _NAME).replace(json.dumps(states).encode())

    def clear(self) -> None:
        """Removes the checkpoints of another job, and their states."""
        for name in ("best", "last", _NAME):
            (self._directory / name).remove()

    def _read(self) -> dict[str, Any]:
        try:
            content = (self._directory / _NAME).read_replaced(max_bytes=_MAX_BYTES)
        except NotFoundError:
            return {}
        states: dict[str, Any] = json.loads(content)
        return states
