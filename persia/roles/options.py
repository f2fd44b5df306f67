"""Options of a server process, of either role."""

from __future__ import annotations

from dataclasses import dataclass

from persia.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server process. Paths may be None where the role has defaults."""

    port: int  # 0: a free one
    host: str = "127.0.0.1"
    embedding_config: str | None = None
    global_config: str | None = None
    replica_index: int = 0
    replica_size: int = 1
    metrics_port: int | None = 0  # of metrics and status; None: not shown
    health_port: int | None = None  # of the gRPC health service; None: there is none
    # Of an inference job; they win over the global config's `infer_config`.
    checkpoint: str | None = None  # a parameter server: what it loads
    pmem: str | None = None  # of a parameter server of a training job: the directory of the tier files
    parameter_servers: tuple[str, ...] = ()  # an embedding worker: "host:port" of them, by replica index

    def __post_init__(self) -> None:
        # Checked here rather than by click: scripts make these options, too.
        if not 0 <= self.replica_index < self.replica_size:
            raise ConfigError(
                f"--replica-index {self.replica_index} is not below --replica-size {self.replica_size} "
                "(replicas are numbered from 0)"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not a port number; 0 takes a free one")
