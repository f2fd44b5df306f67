"""How many batches a second get through the stages of a job whose processes share the cores of a machine.

The sum of processor times bounds the rate, and so does each thread that takes one batch at a time. Neither
bound is reached where the thread of the training loop competes with other stages for cores, or where the
bound on batches in flight lets a stage run dry. So the way of the batches is simulated, without chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_BUFFERED = 10  # batches of each rank that wait for a permit: `StreamingDataset.buffer_size`
_COUNTED = 64  # batches of each rank, after those that fill the pipeline


@dataclass(frozen=True)
class Stage:
    """A step on the way of each batch."""

    cpu_s: float  # processor time, of all pieces
    threads: int | None = None  # batches at a time; None: any number
    pieces: int = 1  # processes that do a share of it, at the same time
    has_permit: bool = False  # its batches are in flight


def batches_per_s(stages: Sequence[Stage], cores: float, in_flight: int, num_ranks: int = 1) -> float:
    """Of all ranks together. Threads that are ready share the cores evenly.

    The last stages have a permit, at least one of them; each rank has `in_flight` permits.
    """
    # A stage without cost takes no time, and would be a step of zero seconds.
    pipeline = _Pipeline([stage for stage in stages if stage.cpu_s > 0], in_flight * num_ranks, num_ranks)
    warm_up = in_flight * num_ranks + _BUFFERED * num_ranks
    while pipeline.done < warm_up:
        pipeline.step(cores)
    # Counted once the pipeline is full: the first batches find every stage free, and would look too quick.
    began_s, began = pipeline.now_s, pipeline.done
    while pipeline.done < began + _COUNTED * num_ranks:
        pipeline.step(cores)
    return (pipeline.done - began) / (pipeline.now_s - began_s)


class _Pipeline:
    """The batches that wait for each stage, and those in it."""

    def __init__(self, stages: Sequence[Stage], permits: int, num_ranks: int) -> None:
        self.now_s, self.done = 0.0, 0
        self._stages, self._permits = stages, permits
        # The stage before which a batch waits for a permit.
        self._first = next(place for place, stage in enumerate(stages) if stage.has_permit)
        self._waiting = [0] * len(stages)
        self._left_s: list[list[float]] = [[] for _ in stages]  # of the batches in each stage
        self._waiting[0] = _BUFFERED * num_ranks
        self._start()

    def step(self, cores: float) -> None:
        """Until the next batch leaves a stage."""
        ready = sum(len(left) * stage.pieces for left, stage in zip(self._left_s, self._stages, strict=True))
        # A thread never runs faster than on one core of its own. With more threads than cores the scheduler
        # gives each an equal share, on average over a batch.
        share = min(1.0, cores / ready)
        both = list(zip(self._left_s, self._stages, strict=True))
        step_s = min(min(left) / stage.pieces for left, stage in both if left) / share
        self.now_s += step_s
        for place, (left, stage) in enumerate(both):
            rest = [seconds - step_s * share * stage.pieces for seconds in left]
            # Relative, as rounding leaves a rest of a few units of the last digit: with `> 0` a batch would
            # stay for steps that take no time.
            stays = [seconds for seconds in rest if seconds > 1e-9 * stage.cpu_s]
            self._left_s[place] = stays
            self._leave(place, len(left) - len(stays))
        self._start()

    def _leave(self, place: int, count: int) -> None:
        if place + 1 < len(self._stages):
            self._waiting[place + 1] += count
        else:
            self.done += count
            # The last stage gives the permit back, as the acknowledgement of gradients does in a job.
            self._permits += count

    def _start(self) -> None:
        """Begins all batches that may, those before others last: they make room for one another."""
        for place in reversed(range(len(self._stages))):
            stage, count = self._stages[place], self._waiting[place]
            if stage.threads is not None:
                count = min(count, stage.threads - len(self._left_s[place]))
            if place == self._first:
                count = min(count, self._permits)
                self._permits -= count
                self._waiting[0] += count  # there is room for as many new ones
            self._waiting[place] -= count
            self._left_s[place] += [stage.cpu_s] * count
