"""Translation for OpenTelemetry; tests/integration/test_opentelemetry.py sends it to a collector."""

from __future__ import annotations

import time

import pytest

from persia.observability.exposition import Families

pytest.importorskip("opentelemetry.exporter.otlp", reason="needs pip install 'persia[otel]'")


def test_histograms_have_the_bounds_of_their_own_buckets() -> None:
    from opentelemetry.sdk.resources import Resource

    from persia.observability.otlp import MetricsTranslator

    families = Families()
    families.histogram("sizes", "Of batches.", ([1, 2, 4], 40.0, 0.0), ("1", "2", "+Inf"))
    translated = MetricsTranslator(Resource({})).translate(families.collect(), time.time_ns())
    ((metric,),) = [scope.metrics for scope in translated.resource_metrics[0].scope_metrics]
    (point,) = metric.data.data_points
    assert (list(point.explicit_bounds), list(point.bucket_counts)) == ([1.0, 2.0], [1, 2, 4])
