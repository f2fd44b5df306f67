"""Sends metrics, and spans of a sample of the batches, to an OpenTelemetry collector over OTLP/gRPC.

For sites whose tools speak OpenTelemetry rather than Prometheus. The metrics are those of `/metrics`. The
exporter's own variables (OTEL_EXPORTER_OTLP_HEADERS, ..._CERTIFICATE, ..._COMPRESSION,
OTEL_RESOURCE_ATTRIBUTES) hold as anywhere.

A batch is a trace, and no process asks another for IDs: they are hashes of what all know, the job, the batch
and the name of a phase. Phases nest by time within a process; the request handlers of servers hang under the
phase of the caller that waits for them.

The packages are optional: importing this module raises ConfigError where they are missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from prometheus_client import Metric
from prometheus_client.samples import Sample

from persia import env
from persia._native import __version__
from persia.errors import ConfigError
from persia.logger import get_default_logger
from persia.messaging.subjects import NN_WORKER
from persia.observability.trace import Span, Tracer

try:
    import opentelemetry.sdk.metrics.export as otel
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
# A process that was asked to export and cannot must say so when it starts.
except ImportError as error:
    raise ConfigError(
        "PERSIA_OTLP_ENDPOINT is set, and the OpenTelemetry packages are not installed: "
        f"pip install 'persia[otel]', or unset it ({error})"
    ) from error

_TIMEOUT_S = 5.0
_SCOPE = InstrumentationScope("persia")
# Numbers of batches repeat: each data set begins at 0, and so does each job of a name.
_EPOCH_NS = 600 * 10**9
_MAX_OPEN = 1000
_ROOT, _FIRST, _LAST = "batch", "client lookup", "client return gradients"
# The phase of the calling process that a handler works for. One process only has it of a batch.
_CALLERS = {
    "handle LookupReference": _FIRST,
    "handle LookupDirect": _FIRST,
    "handle ReturnGradients": _LAST,
    "handle LookupRows": "lookup rpc",
    "handle UpdateRows": "update rpc",
}
_SHARED = frozenset(_CALLERS.values())


class OtlpExporter:
    """Exports every `interval_s` seconds from creation to `close`.

    `trace_one_in`: spans of the batches whose number is a multiple of it; 0: of none. All processes choose
    the same batches. A collector that does not answer is reported once, and what it did not take is dropped:
    it never stops a job.
    """

    def __init__(
        self,
        endpoint: str,
        collect: Callable[[], Iterable[Metric]],
        tracer: Tracer,
        *,
        role: str,
        index: int,
        interval_s: float,
        trace_one_in: int,
    ) -> None:
        # Failures are told here, once; the exporter would tell each.
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").setLevel(logging.CRITICAL)
        job = env.get_job_name()
        resource = Resource.create(
            {
                "service.namespace": job,
                "service.name": role,
                "service.instance.id": f"{role}-{index}",
                "service.version": __version__,
                "host.name": socket.gethostname(),
                "process.pid": os.getpid(),
            }
        )
        self._endpoint, self._collect, self._tracer = endpoint, collect, tracer
        self._interval_s, self._trace_one_in = interval_s, trace_one_in
        self._metrics = MetricsTranslator(resource)
        self._spans = SpansTranslator(resource, job, role, index)
        self._metric_exporter = OTLPMetricExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._span_exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._has_failed = False
        self._stopped = threading.Event()
        if trace_one_in:
            tracer.start_sampling()
        self._thread = threading.Thread(target=self._run, name="persia-otlp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Exports what there is, and ends within seconds."""
        self._stopped.set()
        self._thread.join(3 * _TIMEOUT_S)
        self._metric_exporter.shutdown()
        self._span_exporter.shutdown()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._try_export()
        self._try_export()
        if self._trace_one_in:
            self._tracer.stop_sampling()

    def _try_export(self) -> None:
        try:
            self._export()
        except Exception:  # export is tried again, and must never stop the role
            if not self._has_failed:
                get_default_logger().exception("metrics and spans were not exported")
            self._has_failed = True

    def _export(self) -> None:
        metrics = self._metrics.translate(self._collect(), time.time_ns())
        taken = self._metric_exporter.export(metrics) is otel.MetricExportResult.SUCCESS
        if self._trace_one_in:
            spans = self._spans.translate(self._tracer.sample(self._trace_one_in))
            if spans and taken:  # else it is away: another time-out would tell nothing new
                taken = self._span_exporter.export(spans) is SpanExportResult.SUCCESS
        if not taken and not self._has_failed:
            get_default_logger().warning(
                "the OpenTelemetry collector at %s (PERSIA_OTLP_ENDPOINT) does not take metrics or spans; "
                "trying on. It must speak OTLP over gRPC, usually on port 4317",
                self._endpoint,
            )
        # Reset by success, so that the next loss is reported again.
        self._has_failed = not taken


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
        # Cumulative, as Prometheus counts: an export that is lost loses nothing.
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
        points = []
        for labels, samples in groupby(family.samples, _labels_without_bound):
            # In the order of `Families.histogram`.
            *buckets, _count, total = samples
            # Prometheus buckets count the smaller ones, too; OpenTelemetry's do not.
            cumulated = [int(bucket.value) for bucket in buckets]
            points.append(
                otel.HistogramDataPoint(
                    attributes=labels,
                    start_time_unix_nano=self._start_ns,
                    time_unix_nano=now_ns,
                    count=cumulated[-1],
                    sum=total.value,
                    bucket_counts=[b - a for a, b in zip([0, *cumulated], cumulated, strict=False)],
                    explicit_bounds=[float(bucket.labels["le"]) for bucket in buckets[:-1]],  # then +Inf
                    min=0.0,  # not known; neither is sent on
                    max=0.0,
                )
            )
        return points


def _labels_without_bound(sample: Sample) -> dict[str, str]:
    return {name: value for name, value in sample.labels.items() if name != "le"}


class SpansTranslator:
    """For one process; spans of a batch may come in several turns. A rank also makes the span of the batch in
    all, from lookup to gradient return."""

    def __init__(self, resource: Resource, job: str, role: str, index: int) -> None:
        self._resource, self._job, self._role, self._index = resource, job, role, index
        # Spans are on the monotonic clock, and OpenTelemetry wants wall time. Taken once: steps of the wall
        # clock must not reorder spans.
        self._to_unix_ns = time.time_ns() - time.monotonic_ns()
        self._begins: dict[int, int] = {}  # of batches whose gradients have not returned, by number

    def translate(self, spans: Sequence[Span]) -> list[ReadableSpan]:
        by_batch: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            if span.batch_id is not None:
                by_batch[span.batch_id & 0xFFFFFFFF].append(span)  # as servers know it
        return [done for batch, own in by_batch.items() for done in self._of_batch(batch, own)]

    def _of_batch(self, batch: int, spans: list[Span]) -> list[ReadableSpan]:
        spans = sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns))
        found: list[ReadableSpan] = []
        open_spans: list[tuple[Span, str]] = []  # that contain the one at hand, with their names for IDs
        for number, span in enumerate(spans):
            # Sorted by begin, so the open spans form a stack: those that end before this one are no parents
            # of it.
            while open_spans and open_spans[-1][0].end_ns < span.end_ns:
                open_spans.pop()
            # Equal for all processes, or only this one's.
            unique = f"{self._role} {self._index} {span.begin_ns} {number}"
            key = span.name if span.name in _SHARED else f"{span.name} of {unique}"
            parent = open_spans[-1][1] if open_spans else _CALLERS.get(span.name, _ROOT)
            open_spans.append((span, key))
            found.append(self._span(span.name, batch, span.begin_ns, span.end_ns, key, parent, span.thread))
        return found + (self._root(batch, spans) if self._role == NN_WORKER else [])

    def _root(self, batch: int, spans: list[Span]) -> list[ReadableSpan]:
        for span in spans:
            if span.name == _FIRST:
                self._begins[batch] = span.begin_ns
        if len(self._begins) > _MAX_OPEN:  # batches that were given up return no gradients
            self._begins.pop(next(iter(self._begins)))
        last = [span for span in spans if span.name == _LAST]
        if not last:
            return []
        begin_ns = self._begins.pop(batch, spans[0].begin_ns)
        return [self._span(_ROOT, batch, begin_ns, last[-1].end_ns, _ROOT, None, last[-1].thread)]

    def _span(
        self, name: str, batch: int, begin_ns: int, end_ns: int, key: str, parent: str | None, thread: int
    ) -> ReadableSpan:
        # All processes compute the same key, so that their spans meet in one trace.
        trace_key = f"{self._job} {batch} {(begin_ns + self._to_unix_ns) // _EPOCH_NS}"
        kind = SpanKind.CLIENT if name.startswith("rpc to ") else SpanKind.INTERNAL
        return ReadableSpan(
            name=name,
            context=_context(trace_key, key),
            parent=None if parent is None else _context(trace_key, parent),
            resource=self._resource,
            attributes={"batch_id": batch, "thread.id": thread},
            kind=SpanKind.SERVER if name.startswith("handle ") else kind,
            start_time=begin_ns + self._to_unix_ns,
            end_time=end_ns + self._to_unix_ns,
            instrumentation_scope=_SCOPE,
        )


def _context(trace_key: str, key: str) -> SpanContext:
    trace_id = int.from_bytes(hashlib.blake2b(trace_key.encode(), digest_size=16).digest(), "big")
    span_id = int.from_bytes(hashlib.blake2b(f"{trace_key} {key}".encode(), digest_size=8).digest(), "big")
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
