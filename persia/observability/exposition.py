"""Metric families in Prometheus' text format, built from snapshots at each scrape or push."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest

from persia._native import DURATION_BOUNDS_S

Snapshot = tuple[list[int], float, float]  # of DurationStats: count of each bucket, sum [s], last [s]

Row = tuple[str, str, str]  # name, key of its value, documentation

_BOUNDS = [*(f"{bound:.9g}" for bound in DURATION_BOUNDS_S), "+Inf"]

# Counters of the published system, which have no "_total" at the end, as theirs had none.
_PUBLISHED_COUNTERS = (
    "index_miss_count",
    "gradient_id_miss_count",
    "nan_count",
    "nan_grad_skipped",
    "forward_error",
)


class Families:
    """Collects samples, each with the labels of its process, into families by name."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self._families: dict[str, Metric] = {}

    def labelled(self, **labels: str) -> Families:
        """Adds to the same families, with more labels."""
        more = Families(**{**self._labels, **labels})
        more._families = self._families
        return more

    def gauge(self, name: str, documentation: str, value: float, /, **labels: str) -> None:
        self._add(name, documentation, "gauge", name, value, labels)

    def counter(self, name: str, documentation: str, value: float, /, **labels: str) -> None:
        """`name` without "_total", which is added unless the name is a published one."""
        sample = name if name in _PUBLISHED_COUNTERS else f"{name}_total"
        self._add(name, documentation, "counter", sample, value, labels)

    def histogram(
        self,
        name: str,
        documentation: str,
        snapshot: Snapshot,
        bounds: Sequence[str] = _BOUNDS,
        /,
        **labels: str,
    ) -> None:
        """`bounds`: upper ends of the snapshot's buckets; seconds of `DurationStats` by default."""
        counts, total_s, _ = snapshot
        # Prometheus wants each bucket to count the smaller ones, too.
        cumulated = 0
        for bound, count in zip(bounds, counts, strict=True):
            cumulated += count
            self._add(name, documentation, "histogram", f"{name}_bucket", cumulated, {**labels, "le": bound})
        self._add(name, documentation, "histogram", f"{name}_count", cumulated, labels)
        self._add(name, documentation, "histogram", f"{name}_sum", total_s, labels)

    def counters(self, rows: Iterable[Row], values: Mapping[str, Any], /, **labels: str) -> None:
        for name, key, documentation in rows:
            self.counter(name, documentation, values[key], **labels)

    def gauges(self, rows: Iterable[Row], values: Mapping[str, Any], /, **labels: str) -> None:
        """A value that is None has no sample."""
        for name, key, documentation in rows:
            if values[key] is not None:
                self.gauge(name, documentation, values[key], **labels)

    def collect(self) -> Iterable[Metric]:
        return self._families.values()

    def _add(
        self, name: str, documentation: str, kind: str, sample: str, value: float, labels: dict[str, str]
    ) -> None:
        # A family has one header, under which the samples of all labels are listed.
        if name not in self._families:
            self._families[name] = Metric(name, documentation, kind)
        self._families[name].add_sample(sample, {**self._labels, **labels}, value)


def text(registry: CollectorRegistry) -> bytes:
    """What a scrape or a push carries. The client adds "_total" to the header of every counter: undone where
    the sample has none."""
    page: bytes = generate_latest(registry)
    for name in _PUBLISHED_COUNTERS:
        for keyword in ("HELP", "TYPE"):
            page = page.replace(f"# {keyword} {name}_total ".encode(), f"# {keyword} {name} ".encode())
    return page
