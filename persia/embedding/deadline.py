"""One deadline for several waits in a row, so that they cannot add up."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """A point in time, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return self.left_s() == 0.0
