"""Sends metrics, and spans of a sample of the batches, to an OpenTelemetry collector over OTLP/gRPC.

For sites whose tools speak OpenTelemetry rather than Prometheus; `pip install 'persia[otel]'`. The metrics
are those of `/metrics`. The exporter's own variables (OTEL_EXPORTER_OTLP_HEADERS, ..._CERTIFICATE,
..._COMPRESSION, OTEL_RESOURCE_ATTRIBUTES) hold as anywhere.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import Metric

from persia import env
from persia._native import __version__
from persia.errors import ConfigError
from persia.logger import get_default_logger
from persia.observability.trace import Tracer

_TIMEOUT_S = 5.0
_MISSING = (
    "PERSIA_OTLP_ENDPOINT is set, and the OpenTelemetry packages are not installed: "
    "pip install 'persia[otel]', or unset it"
)


class OtlpExporter:
    """Exports every `interval_s` seconds from creation to `close`.

    `trace_one_in`: spans of the batches whose number is a multiple of it; 0: of none. All processes choose
    the same batches. A collector that does not answer is reported once, and what it did not take is dropped:
    it never stops a job. Raises ConfigError when the packages are missing.
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
        try:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource

            from persia.observability.otlp_metrics import MetricsTranslator
            from persia.observability.otlp_spans import SpansTranslator
        # The packages are optional: a process that was asked to export and cannot must say so at its start.
        except ImportError as error:
            raise ConfigError(f"{_MISSING} ({error})") from error
        # Failures are told here, once; the exporter would tell each.
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").setLevel(logging.CRITICAL)
        job = env.get_job_name()
        attributes: dict[str, Any] = {
            "service.namespace": job,
            "service.name": role,
            "service.instance.id": f"{role}-{index}",
            "service.version": __version__,
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        }
        resource = Resource.create(attributes)
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
        from opentelemetry.sdk.metrics.export import MetricExportResult
        from opentelemetry.sdk.trace.export import SpanExportResult

        metrics = self._metrics.translate(self._collect(), time.time_ns())
        taken = self._metric_exporter.export(metrics) is MetricExportResult.SUCCESS
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
