"""What became of the batches of one context, counted where it happens.

The invariant that tests hold on to, once a context has ended:
`batches_received == batches_trained + batches_evaluated + batches_released + batches_failed`.
"""

from __future__ import annotations

import dataclasses
import threading

from persia._native import ReturnReport

__all__ = ["CounterValues", "Counters", "Staleness"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CounterValues:
    """A snapshot of the counts of one context, since it was created."""

    batches_received: int = 0  # announced by loaders and queued, or made by a local data set
    batches_trained: int = 0  # their gradients were applied
    batches_evaluated: int = 0  # looked up without expecting gradients
    batches_released: int = 0  # given up without gradients: skipped by the script, or left over at the end
    batches_failed: int = 0  # lookup or gradient return failed; the error was raised
    gradients_submitted: int = 0  # batches handed to gradient return by backward()
    nonfinite_slots: int = 0  # slots whose gradient had NaN or Inf, and was not applied
    skipped_slots: int = 0  # slots that the loss did not reach
    rows_updated: int = 0
    rows_missing: int = 0  # gradients of rows that were evicted or not admitted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staleness:
    """Updates that servers applied between a batch's lookup and its own update, over the batches trained."""

    max: int = 0
    mean: float = 0.0
    synchronous_max: int = 0  # of the synchronous slots alone, in a job of another mode
    synchronous_mean: float = 0.0
    in_flight: int = 0  # training batches looked up, or being looked up, and not settled


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys((field.name for field in dataclasses.fields(CounterValues)), 0)
        self._staleness_max = self._synchronous_max = 0
        self._staleness_sum = self._synchronous_sum = 0
        self._in_flight = 0

    def add(self, **counts: int) -> None:
        """Adds to counts by name."""
        with self._lock:
            for name, count in counts.items():
                self._values[name] += count

    def applied(self, report: ReturnReport) -> None:
        """A batch's gradients were applied."""
        with self._lock:
            self._values["batches_trained"] += 1
            self._values["nonfinite_slots"] += report.num_nonfinite_slots
            self._values["skipped_slots"] += report.num_skipped_slots
            self._values["rows_updated"] += report.num_updated
            self._values["rows_missing"] += report.num_missing
            self._staleness_max = max(self._staleness_max, report.staleness)
            self._staleness_sum += report.staleness
            self._synchronous_max = max(self._synchronous_max, report.in_step_staleness)
            self._synchronous_sum += report.in_step_staleness

    def flight(self, change: int) -> None:
        """A training batch enters (+1) or leaves (-1) the time between its permit and its acknowledgement."""
        with self._lock:
            self._in_flight += change

    def snapshot(self) -> CounterValues:
        with self._lock:
            return CounterValues(**self._values)

    def staleness(self) -> Staleness:
        with self._lock:
            num_trained = max(self._values["batches_trained"], 1)
            return Staleness(
                max=self._staleness_max,
                mean=self._staleness_sum / num_trained,
                synchronous_max=self._synchronous_max,
                synchronous_mean=self._synchronous_sum / num_trained,
                in_flight=self._in_flight,
            )
