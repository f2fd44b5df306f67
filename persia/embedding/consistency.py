"""How far lookups may run ahead of updates: a mode for the job, and for each slot that has one of its own.

A batch is looked up in as many parts as there are modes among its slots, each part when its mode allows it
(docs/adr/0015).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

from persia.errors import InvalidArgumentError

__all__ = ["ALL_PARTS", "Consistency", "Mode", "Stage", "mode_names", "stages"]

ALL_PARTS = 0  # a lookup of all slots; otherwise a bit for each part


class Consistency(enum.Enum):
    """Embeddings; the dense part of several ranks is averaged at every step in all three."""

    HYBRID = "hybrid"  # lookups run ahead of updates, by as many batches as embedding_staleness says
    SYNCHRONOUS = "synchronous"  # a step begins when the updates of all ranks' last step are applied
    ASYNCHRONOUS = "asynchronous"  # lookups never wait for updates; the buffers are the only bound

    @classmethod
    def of(cls, value: Consistency | str) -> Consistency:
        """Raises InvalidArgumentError naming the choices."""
        try:
            return cls(value)
        except ValueError:
            choices = ", ".join(repr(mode.value) for mode in cls)
            raise InvalidArgumentError(f"consistency is {value!r}: choose one of {choices}") from None

    def bound(self, embedding_staleness: int | None) -> int | None:
        """How many batches may be in flight; None: any. Raises InvalidArgumentError for a contradiction."""
        if self is Consistency.HYBRID:
            return embedding_staleness
        if embedding_staleness not in (None, 1) and self is Consistency.SYNCHRONOUS:
            raise InvalidArgumentError(
                f"embedding_staleness={embedding_staleness} with consistency='synchronous': leave it out, or "
                "choose 'hybrid'"
            )
        if embedding_staleness is not None and self is Consistency.ASYNCHRONOUS:
            raise InvalidArgumentError(
                f"embedding_staleness={embedding_staleness} (1 with reproducible=True) bounds what "
                "consistency='asynchronous' leaves unbounded: leave it out, or choose 'hybrid'"
            )
        return 1 if self is Consistency.SYNCHRONOUS else None


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
        if self.synchronous:
            return 0
        return math.inf if self.bound is None else self.bound

    @classmethod
    def of(cls, consistency: Consistency, embedding_staleness: int | None = None) -> Mode:
        """Raises InvalidArgumentError for a contradiction."""
        return cls(consistency, consistency.bound(embedding_staleness))

    @classmethod
    def parse(cls, text: str) -> Mode:
        """What a slot says of itself, as `persia.config.SlotConfig.mode` writes it."""
        consistency, _, bound = text.partition(" ")
        return cls.of(Consistency.of(consistency), int(bound) if bound else None)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Slots that are looked up together: a bit for each part of the slots."""

    mode: Mode
    parts: int = ALL_PARTS


def stages(job: Mode, slot_modes: Sequence[str]) -> list[Stage]:
    """The lookups of a batch, the loosest first, a synchronous one last.

    `slot_modes`: by part, "" for slots without one of their own.
    """
    parts: dict[float, int] = {}
    modes: dict[float, Mode] = {}
    for part, text in enumerate(slot_modes):
        mode = Mode.parse(text) if text else job
        parts[mode._looseness] = parts.get(mode._looseness, 0) | 1 << part
        modes.setdefault(mode._looseness, mode)
    if len(parts) == 1:
        return [Stage(mode) for mode in modes.values()]
    return [Stage(modes[key], parts[key]) for key in sorted(parts, reverse=True)]


def mode_names(job: Consistency, slot_modes: Sequence[str], parts: int) -> list[str]:
    """What the modes of a lookup's slots are called where staleness is shown.

    Several, where slots share a bound and so a lookup: one of their own with the job's, for one.
    """
    texts = [text for part, text in enumerate(slot_modes) if parts >> part & 1]
    return list(dict.fromkeys(text or job.value for text in texts)) or [job.value]
