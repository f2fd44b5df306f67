"""How much training may get ahead of its own updates: a choice for the whole job.

A slot may be stricter than its job: `consistency: synchronous` in the embedding config. Such slots are looked
up when a step begins, the others of the same batch as the job says (docs/adr/0015).
"""

from __future__ import annotations

import enum

from persia.errors import InvalidArgumentError

__all__ = ["Consistency"]


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
