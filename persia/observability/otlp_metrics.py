"""Families of Prometheus as OpenTelemetry's data. Imports OpenTelemetry, which is optional."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import opentelemetry.sdk.metrics.export as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric

_SCOPE = InstrumentationScope("persia")
_Labels = tuple[tuple[str, str], ...]


@dataclass
class _Histogram:
    """One series of a family, put together from its samples."""

    cumulated: list[int] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    sum: float = 0.0


class MetricsTranslator:
    """Counters are cumulative since the process began to be observed. Names are those of `/metrics`, without
    the "_total" of counters, which collectors add where they write for Prometheus."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._start_ns = time.time_ns()

    def translate(self, families: Iterable[Metric], now_ns: int) -> otel.MetricsData:
        metrics = [self._metric(family, now_ns) for family in families]
        scope = otel.ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
        of_process = otel.ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")
        return otel.MetricsData(resource_metrics=[of_process])

    def _metric(self, family: Metric, now_ns: int) -> otel.Metric:
        data: Any
        cumulative = otel.AggregationTemporality.CUMULATIVE
        if family.type == "histogram":
            data = otel.Histogram(self._histograms(family, now_ns), aggregation_temporality=cumulative)
        elif family.type == "counter":
            points = self._numbers(family, now_ns)
            data = otel.Sum(points, aggregation_temporality=cumulative, is_monotonic=True)
        else:
            data = otel.Gauge(self._numbers(family, now_ns))
        unit = "s" if family.name.endswith(("_seconds", "_sec")) else ""
        return otel.Metric(name=family.name, description=family.documentation, unit=unit, data=data)

    def _numbers(self, family: Metric, now_ns: int) -> list[otel.NumberDataPoint]:
        return [
            otel.NumberDataPoint(
                attributes=dict(sample.labels),
                start_time_unix_nano=self._start_ns,
                time_unix_nano=now_ns,
                value=float(sample.value),
            )
            for sample in family.samples
        ]

    def _histograms(self, family: Metric, now_ns: int) -> list[otel.HistogramDataPoint]:
        return [
            otel.HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=self._start_ns,
                time_unix_nano=now_ns,
                count=series.cumulated[-1],
                sum=series.sum,
                bucket_counts=[b - a for a, b in zip([0, *series.cumulated], series.cumulated, strict=False)],
                explicit_bounds=series.bounds,
                min=0.0,  # not known; neither is sent on
                max=0.0,
            )
            for labels, series in _series(family).items()
        ]


def _series(family: Metric) -> Mapping[_Labels, _Histogram]:
    """By the labels without "le". Buckets come in the order of their bounds."""
    found: dict[_Labels, _Histogram] = {}
    for sample in family.samples:
        labels = tuple((key, value) for key, value in sample.labels.items() if key != "le")
        series = found.setdefault(labels, _Histogram())
        if sample.name.endswith("_bucket"):
            # Prometheus buckets count the smaller ones, too; `_histograms` takes the differences.
            series.cumulated.append(int(sample.value))
            if sample.labels["le"] != "+Inf":
                series.bounds.append(float(sample.labels["le"]))
        elif sample.name.endswith("_sum"):
            series.sum = sample.value
    return found
