"""Where this process shows itself: from the global config and the environment."""

from __future__ import annotations

from dataclasses import dataclass

from persia import env
from persia.config import GlobalConfig, load_global_config
from persia.config.global_config import MetricsConfig


@dataclass(frozen=True, kw_only=True)
class ObservabilitySettings:
    """`port` None: no HTTP port; 0: a free one. `health_port` None: no gRPC health service."""

    metrics: MetricsConfig
    host: str
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
