"""Counts what happens to the batches of one context, where it happens.

In: calls of every stage. Out: snapshots, for `ctx.counters`, `ctx.staleness` and the metrics.

The invariant that tests hold on to, once a context has ended:
`batches_received == batches_trained + batches_evaluated + batches_released + batches_failed`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping

from persia._native import ReturnReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class CounterValues:
    """A snapshot of the counts of one context, since it was created."""

    batches_received: int = 0  # submitted by loaders and queued, or made by a local data set
    batches_trained: int = 0  # their gradients were applied
    batches_evaluated: int = 0  # looked up without expecting gradients
    # Given up without gradients: skipped by the script, left over at the end, or after the copy to the device
    # or a later lookup, of slots of another mode, has failed; the error was raised.
    batches_released: int = 0
    batches_failed: int = 0  # the first lookup or the gradient return failed; the error was raised
    gradients_submitted: int = 0  # batches handed to gradient return by backward()
    nonfinite_slots: int = 0  # slots whose gradient had NaN or Inf, and was not applied
    nonfinite_steps: int = 0  # steps of the dense optimizer left out, as their gradients had NaN or Inf
    dumps_failed: int = 0  # with on_error="log": logged, and left to the next dump
    skipped_slots: int = 0  # slots that the loss did not reach
    rows_updated: int = 0
    rows_missing: int = 0  # gradients of rows that were evicted or not admitted


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModeStaleness:
    """The part of `Staleness` that is also told for the slots of each mode."""

    max: int = 0
    mean: float = 0.0


class _Measured:
    def __init__(self) -> None:
        self.max = self.sum = self.count = 0

    def add(self, staleness: int) -> None:
        self.max = max(self.max, staleness)
        self.sum += staleness
        self.count += 1

    def join(self, other: _Measured) -> None:
        self.max = max(self.max, other.max)
        self.sum += other.sum
        self.count += other.count

    @property
    def mean(self) -> float:
        return self.sum / max(self.count, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staleness(ModeStaleness):
    """Updates that servers applied between a batch's lookup and its own update, over the batches trained."""

    in_flight: int = 0  # training batches looked up, or being looked up, whose lease is not released
    # Of the slots of each mode: the job's, and such as "synchronous" or "hybrid 4" of slots of their own.
    by_mode: Mapping[str, ModeStaleness] = dataclasses.field(default_factory=dict)


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A dict and not a `CounterValues`: the snapshot must be immutable, and one lock covers all counts, so
        # that their sum holds in every snapshot.
        self._values = dict.fromkeys((field.name for field in dataclasses.fields(CounterValues)), 0)
        self._staleness = _Measured()
        self._staleness_by_slots: dict[int, _Measured] = {}
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
            # The staleness of a batch is the largest of its lookups; by mode each lookup counts for itself.
            self._staleness.add(report.staleness)
            for slots, staleness in report.lookups:
                self._staleness_by_slots.setdefault(slots, _Measured()).add(staleness)

    def flight(self, change: int) -> None:
        """A training batch enters (+1) or leaves (-1) the time between its permit and its acknowledgement."""
        with self._lock:
            self._in_flight += change

    def snapshot(self) -> CounterValues:
        with self._lock:
            return CounterValues(**self._values)

    def staleness(self, names_of: Callable[[int], Iterable[str]] = lambda slots: (str(slots),)) -> Staleness:
        """`names_of`: the names of the modes of slots that were looked up together."""
        with self._lock:
            by_mode: dict[str, _Measured] = {}
            for slots, measured in self._staleness_by_slots.items():
                # Computed when asked for: the modes of a job are known to the pipeline, and names are not
                # needed per batch.
                for name in names_of(slots):
                    by_mode.setdefault(name, _Measured()).join(measured)
            return Staleness(
                max=self._staleness.max,
                mean=self._staleness.mean,
                in_flight=self._in_flight,
                by_mode={name: ModeStaleness(max=m.max, mean=m.mean) for name, m in by_mode.items()},
            )
