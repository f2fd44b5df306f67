"""Recording of the phases of this process: for `persia-launcher trace`, and for samples of the batches."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from persia._native import enable_durations, start_trace, stop_trace
from persia.errors import InvalidArgumentError

_DEFAULT_SPANS = 100_000
_SAMPLED_SPANS = 50_000  # of which a sample is taken, between two looks
# Ends a recording that is never fetched: it holds its memory.
_LONGEST_S = 120.0


class Span(NamedTuple):
    """One phase; times are nanoseconds of the monotonic clock."""

    name: str
    begin_ns: int
    end_ns: int
    reference: int  # the embedding worker's number of the batch; 0: unknown
    batch_id: int | None
    thread: int


class Tracer:
    """At most one recording at a time; a new one replaces that under way. Sampling continues between
    recordings, and gets nothing during one. Thread-safe.
    """

    def __init__(self, *, measured: bool) -> None:
        self._measured = measured  # whether durations are measured without a trace, too
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._sampling = False

    def start(self, spans: str | None) -> dict[str, Any]:
        try:
            capacity = _DEFAULT_SPANS if spans is None else int(spans)
        except ValueError:
            raise InvalidArgumentError(f"spans={spans!r} is not a number") from None
        with self._lock:
            self._cancel_timer()
            start_trace(capacity)
            enable_durations(True)
            self._timer = threading.Timer(_LONGEST_S, self.stop)
            self._timer.daemon = True
            self._timer.start()
        return {"spans": capacity, "longest_s": _LONGEST_S}

    def stop(self) -> dict[str, Any]:
        """The recording, and what is needed to compare its clock with those of other hosts."""
        spans: list[Any] = []
        num_dropped = 0
        with self._lock:
            if self._timer is not None:
                self._cancel_timer()
                spans, num_dropped = stop_trace()
                enable_durations(self._measured)
                if self._sampling:
                    start_trace(_SAMPLED_SPANS)
        return {
            "spans": spans,
            "num_dropped": num_dropped,
            "boot_id": _boot_id(),
            "monotonic_ns": time.monotonic_ns(),
            "unix_ns": time.time_ns(),
        }

    def start_sampling(self) -> None:
        with self._lock:
            self._sampling = True
            if self._timer is None:
                start_trace(_SAMPLED_SPANS)

    def sample(self, one_in: int) -> list[Span]:
        """The spans since the last call of batches whose number is a multiple of `one_in`."""
        with self._lock:
            # One buffer for both: a recording that was asked for wins.
            if not self._sampling or self._timer is not None:
                return []
            # Stopped and started again at once; the phases that end in between are lost, which a sample can
            # bear.
            spans, _ = stop_trace(one_in)
            start_trace(_SAMPLED_SPANS)
        return [Span(*span) for span in spans]

    def stop_sampling(self) -> None:
        with self._lock:
            self._sampling = False
            if self._timer is None:
                stop_trace()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _boot_id() -> str:
    """Equal for processes that share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
