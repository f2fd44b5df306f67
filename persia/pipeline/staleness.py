"""How far lookups may run ahead of updates: a mode for the job, and for each slot that has one of its own.

A batch is looked up in stages, one for the slots of each bound; every stage waits for a permit of its own
gate (docs/adr/0015). The synchronous stage is looked up inside the batch's own training step.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
import threading
from collections.abc import Callable, Sequence

from persia.config.slots_config import DENSE_MODE
from persia.errors import InvalidArgumentError
from persia.pipeline.counters import Counters
from persia.pipeline.queues import QueueClosed

# Of `LookAhead`: the batches that it measures beyond its bound, and the lookups beyond what it measured, for
# times that vary and processes that share a processor.
_STEPS, _SPARE = 32, 2

ALL_SLOTS = 0  # a lookup of all slots; otherwise a bit for each of the backend's `slot_modes`


class Consistency(enum.Enum):
    """How lookups of embeddings wait for updates. Ranks average dense gradients at every step."""

    HYBRID = "hybrid"  # lookups run ahead of updates, by as many batches as embedding_staleness says
    SYNCHRONOUS = "synchronous"  # a step begins when the updates of all ranks' last step are applied
    EXACT = "exact"  # like HYBRID in speed; one rank replays its updates, and each lookup sees all of them
    ASYNCHRONOUS = "asynchronous"  # lookups never wait for updates; the buffers are the only bound

    @classmethod
    def of(cls, value: Consistency | str) -> Consistency:
        """Raises InvalidArgumentError naming the choices."""
        try:
            return cls(value)
        except ValueError:
            choices = ", ".join(repr(mode.value) for mode in cls)
            raise InvalidArgumentError(f"consistency is {value!r}: choose one of {choices}") from None


@dataclasses.dataclass(frozen=True)
class Mode:
    """A consistency with its bound: batches between lookup and acknowledged update; None: any number."""

    consistency: Consistency
    bound: int | None = None

    @property
    def synchronous(self) -> bool:
        return self.consistency is Consistency.SYNCHRONOUS

    @property
    def _looseness(self) -> float:
        # Below every bound, which is at least 1: the synchronous stage is the last.
        if self.synchronous:
            return 0
        return math.inf if self.bound is None else self.bound

    @classmethod
    def of(cls, consistency: Consistency, embedding_staleness: int | None = None) -> Mode:
        """Raises InvalidArgumentError for a contradiction."""
        if consistency in (Consistency.HYBRID, Consistency.EXACT):
            return cls(consistency, embedding_staleness)
        if embedding_staleness not in (None, 1) and consistency is Consistency.SYNCHRONOUS:
            raise InvalidArgumentError(
                f"embedding_staleness={embedding_staleness} with consistency='synchronous': leave it out, or "
                "choose 'hybrid'"
            )
        # `reproducible=True` sets 1 by itself, so the message names it.
        if embedding_staleness is not None and consistency is Consistency.ASYNCHRONOUS:
            raise InvalidArgumentError(
                f"embedding_staleness={embedding_staleness} (1 with reproducible=True) bounds what "
                "consistency='asynchronous' leaves unbounded: leave it out, or choose 'hybrid'"
            )
        return cls(consistency, 1 if consistency is Consistency.SYNCHRONOUS else None)

    @classmethod
    def parse(cls, text: str) -> Mode:
        """The mode of a slot, as `persia.config.SlotConfig.mode` writes it."""
        consistency, _, bound = text.partition(" ")
        return cls.of(Consistency.of(consistency), int(bound) if bound else None)


@dataclasses.dataclass(frozen=True)
class LookupStage:
    """Slots that are looked up together, because they share a bound. `slots`: a bit for each slot mode."""

    mode: Mode
    slots: int = ALL_SLOTS


def lookup_stages(job: Mode, slot_modes: Sequence[str]) -> list[LookupStage]:
    """The stages of a batch's lookup, the loosest first, a synchronous one last.

    `slot_modes`: the modes in use, "" for slots without a mode of their own.
    """
    # Modes of one bound make one stage: they wait for the same updates, and one call is cheaper than two.
    slots: dict[float, int] = {}
    modes: dict[float, Mode] = {}
    for position, text in enumerate(slot_modes):
        if text == DENSE_MODE:
            continue
        mode = Mode.parse(text) if text else job
        slots[mode._looseness] = slots.get(mode._looseness, 0) | 1 << position
        modes.setdefault(mode._looseness, mode)
    # Without a mask of slots, the request is that of a job without modes.
    if len(slots) <= 1:
        mode = next(iter(modes.values()), job)
        return [LookupStage(mode, served_slots(slot_modes))]
    return [LookupStage(modes[key], slots[key]) for key in sorted(slots, reverse=True)]


def served_slots(slot_modes: Sequence[str]) -> int:
    """The slots of a lookup of all that are on parameter servers."""
    if DENSE_MODE not in slot_modes:
        return ALL_SLOTS
    mask = sum(1 << position for position, text in enumerate(slot_modes) if text != DENSE_MODE)
    return mask or 1 << len(slot_modes)  # a mode that no slot has: 0 would be all


def mode_names(job: Consistency, slot_modes: Sequence[str], slots: int) -> list[str]:
    """The names under which the staleness of a lookup of `slots` is shown.

    Several, where slots share a bound and so a lookup: one of their own with the job's, for example.
    """
    texts = [t for position, t in enumerate(slot_modes) if slots >> position & 1 and t != DENSE_MODE]
    return list(dict.fromkeys(text or job.value for text in texts)) or [job.value]


class StalenessGate:
    """Hands out at most `limit` permits at a time; without a limit it only counts. Thread-safe.

    `counters`: where batches in flight are counted, by the gate of the first stage.
    `on_demand`: a permit is also not handed out before the loop asks for a batch, so that nothing is looked
    up before the preceding step is done.
    """

    def __init__(self, limit: int | None, counters: Counters | None, *, on_demand: bool = False) -> None:
        self.limit = limit
        self._on_demand = on_demand
        self._demanded = False
        self._counters = counters
        self._in_flight = 0
        self._closed = False
        self._changed = threading.Condition()

    def acquire(self) -> Callable[[], None]:
        """Waits for a permit; returns what gives it back. Raises QueueClosed when the gate is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room())
            if self._closed:
                raise QueueClosed
            # One permit for each demand: the next batch is looked up after the loop has asked for it.
            self._demanded = False
            self._count(+1)
        return self._give_back

    def demand(self) -> None:
        """The loop asks for its next batch."""
        if self._on_demand:
            with self._changed:
                self._demanded = True
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting; permits handed out stay valid."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        in_turn = self._demanded or not self._on_demand
        return in_turn and (self.limit is None or self._in_flight < self.limit)

    def _give_back(self) -> None:
        with self._changed:
            self._count(-1)
            self._changed.notify_all()

    def _count(self, change: int) -> None:
        self._in_flight += change
        if self._counters is not None:
            self._counters.flight(change)


class LookAhead:
    """How many batches the prefetcher looks up ahead of the loop: as few as keep the loop from waiting.

    A lookup that begins earlier than it must misses the updates of the batches in between, for no gain in
    speed. The bound is the time of a slow lookup, the ninth of ten, divided by the median time that the loop
    takes for a batch, and some more. Where lookups wait for each other rather than for the network, it is
    `most` (docs/adr/0069). Pure; not thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lookups_s, self._steps_s = list[float](), list[float]()
        self.bound = most  # too fresh rows would cost time, which nothing gives back

    def took(self, lookup_s: float, step_s: float) -> int:
        """The loop takes a batch; returns the new bound.

        Args:
            lookup_s: what its lookup has taken.
            step_s: what the loop has done with the batch before, without the wait for this one.
        """
        self._lookups_s.append(lookup_s)
        self._steps_s.append(step_s)
        # A bound of N shows its effect after N batches.
        if len(self._steps_s) == self.bound + _STEPS:
            lookup_s = sorted(self._lookups_s)[len(self._lookups_s) * 9 // 10]
            step_s = max(statistics.median(self._steps_s), 1e-6)
            self.bound = min(self._most, math.ceil(lookup_s / step_s) + _SPARE)
            self._lookups_s, self._steps_s = [], []
        return self.bound
