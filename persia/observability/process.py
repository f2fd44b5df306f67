"""Makes one process of a job observable: HTTP port, pushes, OpenTelemetry, gRPC health."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric
from typing_extensions import Self

from persia import env
from persia._native import __version__, enable_durations
from persia.config import GlobalConfig, load_global_config
from persia.config.global_config import MetricsConfig
from persia.messaging.interface import Session
from persia.observability import finite_reported, reported
from persia.observability.exposition import Families, text
from persia.observability.health import HealthService
from persia.observability.http import Answer, HttpPort, Query, json_answer
from persia.observability.push import Pusher
from persia.observability.sources import Source
from persia.observability.trace import Tracer


@dataclass(frozen=True, kw_only=True)
class ObservabilitySettings:
    """`port` None: no HTTP port; 0: a free one. `health_port` None: no gRPC health service."""

    metrics: MetricsConfig
    host: str
    # Ports are free ones by default: processes of a host must not compete for a number.
    port: int | None = 0
    health_port: int | None = None
    gateway: str | None = None  # host:port of a Pushgateway
    otlp_endpoint: str | None = None  # URL of an OpenTelemetry collector
    otlp_trace_one_in: int = 0

    @classmethod
    def from_environment(
        cls, config: GlobalConfig | None = None, *, host: str | None = None, port_offset: int = 0
    ) -> ObservabilitySettings:
        """`config` None: that of PERSIA_GLOBAL_CONFIG, else the defaults.

        `port_offset` tells processes of a machine apart that share one environment, such as ranks.
        """
        if config is None:
            path = env.global_config_path()
            config = load_global_config(path) if path else GlobalConfig()
        return cls(
            metrics=config.common_config.metrics_config,
            host=host or env.get_bind_host(),
            port=_shifted(env.get_metrics_port(), port_offset),
            health_port=_shifted(env.get_health_port(), port_offset),
            gateway=env.get_metrics_gateway(),
            otlp_endpoint=env.get_otlp_endpoint(),
            otlp_trace_one_in=env.get_otlp_trace_one_in(),
        )


def _shifted(port: int | None, offset: int) -> int | None:
    # 0 asks for a free port, and None for no port: neither is shifted.
    return port + offset if port else port


class ProcessObserver:
    """Shows `source` from creation to `close`. Not ready until `serving` is set.

    `session`: the process is not ready while its connection is lost; None: the process needs no broker.
    `address` is "host:port" of the HTTP port, as others reach it; empty without one. Raises StorageError when
    a port that was asked for is not free.
    """

    def __init__(self, source: Source, session: Session | None, settings: ObservabilitySettings) -> None:
        self.serving = False
        self.address = ""
        self.health_port: int | None = None
        self._http: HttpPort | None = None
        self._source, self._session, self._settings = source, session, settings
        self._started = time.monotonic()
        self._resources = ExitStack()
        self._registry = CollectorRegistry(auto_describe=False)
        # Timing costs two clock reads a phase in native code: off where nothing shows it.
        enable_durations(settings.metrics.enable_metrics)
        self._tracer = Tracer(measured=settings.metrics.enable_metrics)
        self._registry.register(self)
        # A port that is taken must not leave those opened before it behind.
        with ExitStack() as on_error:
            on_error.callback(self._resources.close)
            self._open_http()
            self._start_pushing()
            self._start_otlp()
            self._start_health()
            on_error.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self.serving = False
        self._resources.close()

    def collect(self) -> Iterable[Metric]:
        """For the registry: called at each scrape or push."""
        source = self._source
        families = Families(persia_job=env.get_job_name(), role=source.role, replica=str(source.index))
        families.gauge(
            "persia_process_info",
            "1; the labels tell which process this is.",
            1,
            version=__version__,
            host=socket.gethostname(),
            pid=str(os.getpid()),
        )
        can_do = "1: it can do its part, which is to answer requests, or to stand by."
        families.gauge("persia_ready", can_do, self.not_ready() is None)
        families.gauge("persia_configured", "1: the optimizer is known.", source.configured())
        families.counter(
            "persia_http_refused_requests",
            "Requests for metrics, status or traces without the job's token.",
            0 if self._http is None else self._http.num_refused,
        )
        families.gauge("persia_uptime_seconds", "Seconds since the start.", self._uptime_s())
        restarts = "Times that the supervisor has started this process again."
        families.gauge("persia_restarts", restarts, env.get_restarts())
        families.gauge("persia_resident_bytes", "Memory of the process.", resident_bytes())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = usage.ru_utime + usage.ru_stime
        families.counter("persia_cpu_seconds", "Processor time of the process.", cpu_s)
        for name, value in reported().items():
            families.gauge("persia_reported", "What the script reports.", value, name=name)
        source.add_metrics(families)
        return families.collect()

    def not_ready(self) -> str | None:
        """Why this process cannot do its part now; None when it can."""
        # In the order in which a start goes: the first thing missing is the most useful answer.
        if not self.serving:
            return "it has not joined the job yet, or is ending"
        if self._session is not None and not self._session.is_connected:
            return "there is no connection to the NATS server"
        return self._source.not_ready()

    # ---- what runs beside

    def _open_http(self) -> None:
        settings = self._settings
        if settings.port is None:
            return
        routes = {
            ("GET", "/metrics"): self._metrics,
            ("GET", "/status"): self._status,
            ("GET", "/healthz"): lambda _query: (200, "text/plain", b"ok\n"),
            ("GET", "/readyz"): lambda _query: (
                (200, "text/plain", f"ok{self._source.remark()}\n".encode())
                if (reason := self.not_ready()) is None
                else (503, "text/plain", f"{reason}\n".encode())
            ),
            ("POST", "/trace/start"): lambda query: json_answer(self._tracer.start(query.get("spans"))),
            ("POST", "/trace/stop"): lambda _query: json_answer(self._tracer.stop()),
        }
        self._http = port = HttpPort(settings.host, settings.port, routes)
        self._resources.callback(port.close)
        self.address = f"{env.get_advertise_host(settings.host)}:{port.port}"

    def _start_pushing(self) -> None:
        metrics = self._settings.metrics
        if not metrics.enable_metrics or self._settings.gateway is None:
            return
        pusher = Pusher(
            self._settings.gateway,
            self._registry,
            job=metrics.job_name,
            # Never equal for two processes that live at the same time: of jobs with the same names, too.
            grouping={
                "instance": f"{socket.gethostname()}:{os.getpid()}",
                "role": self._source.role,
                "replica": str(self._source.index),
            },
            interval_s=metrics.push_interval_seconds,
        )
        self._resources.callback(pusher.close)

    def _start_otlp(self) -> None:
        settings = self._settings
        if not settings.metrics.enable_metrics or settings.otlp_endpoint is None:
            return
        from persia.observability.otlp import OtlpExporter  # its packages are optional

        exporter = OtlpExporter(
            settings.otlp_endpoint,
            self.collect,
            self._tracer,
            role=self._source.role,
            index=self._source.index,
            interval_s=settings.metrics.push_interval_seconds,
            trace_one_in=settings.otlp_trace_one_in,
        )
        self._resources.callback(exporter.close)

    def _start_health(self) -> None:
        if self._settings.health_port is None:
            return
        checks = {
            "": lambda: self.not_ready() is None,
            "configured": lambda: self.not_ready() is None and self._source.configured(),
        }
        health = HealthService(self._settings.host, self._settings.health_port, checks)
        self.health_port = health.port
        self._resources.callback(health.close)

    # ---- answers

    def _metrics(self, _query: Query) -> Answer:
        if not self._settings.metrics.enable_metrics:
            # A 404 with a reason: an empty page would look like a process without metrics.
            reason = b"off: common_config.metrics_config.enable_metrics is false in the global config\n"
            return 404, "text/plain", reason
        return 200, CONTENT_TYPE_LATEST, text(self._registry)

    def _status(self, _query: Query) -> Answer:
        source, reason = self._source, self.not_ready()
        status: dict[str, Any] = {
            "role": source.role,
            "index": source.index,
            "replicas": source.replicas,
            "job_name": env.get_job_name(),
            "version": __version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ready": reason is None,
            "reason": reason,
            "configured": source.configured(),
            "monotonic_s": time.monotonic(),  # rates are differences by this
            "uptime_s": self._uptime_s(),
            "restarts": env.get_restarts(),
            "resident_bytes": resident_bytes(),
            "reported": finite_reported(),
            "stats": source.status(),
        }
        return json_answer(status)

    def _uptime_s(self) -> float:
        return time.monotonic() - self._started


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
