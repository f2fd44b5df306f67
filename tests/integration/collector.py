"""An OpenTelemetry collector for tests: the real gRPC services of OTLP, which keep what they are sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """`spans` and `metrics`: (resource attributes, message), in the order of arrival."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._lock = threading.Lock()
        self._spans: list[tuple[dict[str, Any], Any]] = []
        self._metrics: list[tuple[dict[str, Any], Any]] = []

    @property
    def spans(self) -> list[tuple[dict[str, Any], Any]]:
        with self._lock:
            return list(self._spans)

    @property
    def metrics(self) -> list[tuple[dict[str, Any], Any]]:
        with self._lock:
            return list(self._metrics)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802, OTLP's name
        del context
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            with self._lock:
                for process in request.resource_spans:
                    of_process = values(process.resource.attributes)
                    self._spans += [(of_process, s) for scope in process.scope_spans for s in scope.spans]
            return trace_service_pb2.ExportTraceServiceResponse()
        with self._lock:
            for process in request.resource_metrics:
                of_process = values(process.resource.attributes)
                self._metrics += [(of_process, m) for scope in process.scope_metrics for m in scope.metrics]
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(1).wait(60)
