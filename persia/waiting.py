"""One way to wait for something that only polling tells: with a deadline, growing pauses and a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from persia.logger import get_default_logger

_FIRST_REPORT_S = 1.0
_REPORT_INTERVAL_S = 5.0
_GROWTH = 1.5


class Attempts:
    """Iterate over it to poll until `timeout_s` have passed; code behind the loop says what is missing.

    The first attempt is always made. An item is the time in seconds that the attempt may take: what it leaves
    of that is slept. It grows from `pause_s` to `longest_pause_s`. `waiting_for`: says what is missing, for a
    line in the log after a second and then at intervals. Not thread-safe.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        pause_s: float = 0.05,
        longest_pause_s: float = 0.0,
        waiting_for: Callable[[], str] | None = None,
    ) -> None:
        self.has_reported = False
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._waiting_for = waiting_for

    @property
    def left_s(self) -> float:
        """Seconds until the timeout, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def progressed(self, at: float | None = None) -> None:
        """Counts the timeout from `at`, a `time.monotonic()`, on; None: from now."""
        self._end = (time.monotonic() if at is None else at) + self._timeout_s

    def __iter__(self) -> Iterator[float]:
        now = time.monotonic()
        next_report = now + _FIRST_REPORT_S
        while True:
            if self._waiting_for is not None and now >= next_report:
                get_default_logger().info("waiting for %s", self._waiting_for())
                self.has_reported, next_report = True, now + _REPORT_INTERVAL_S
            pause_s = max(0.0, min(self._pause_s, self._end - now))
            yield pause_s
            # The attempt's own time counts: a slow peer is asked as often as a quick one.
            time.sleep(max(0.0, now + pause_s - time.monotonic()))
            # Never shorter than it began: without growth `longest_pause_s` is 0.
            self._pause_s = max(self._pause_s, min(_GROWTH * self._pause_s, self._longest_pause_s))
            now = time.monotonic()
            if now >= self._end:
                return
