"""The life of a server process: its options, stop signals, and the connection to the job."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from persia import env
from persia.config import GlobalConfig
from persia.errors import ConfigError
from persia.logger import get_default_logger
from persia.messaging.discovery import Advertiser, ServiceInfo
from persia.messaging.interface import Registration, Session
from persia.messaging.payloads import MovedShards
from persia.messaging.session import NatsSession
from persia.observability.process import ObservabilitySettings, ProcessObserver
from persia.observability.sources import Source

# How long a stopping server answers earlier requests. Process managers kill seconds after SIGTERM.
DRAIN_S = 1.5
_SIGNAL_STEP_S = 0.2


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
    # A parameter server of a change of their number (persia.roles.elastic): how often it was changed, this
    # time included, and from how many servers it gathers its rows.
    generation: int = 0
    sources: int = 0
    moved_shards: MovedShards = ()  # of one that has restarted: the placement of its generation
    standby: bool = False  # a parameter server: replaces the server of this index when that dies
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


class _StopRequested(BaseException):
    """Raised in the main thread by a stop signal. Not an Exception: nothing may handle it as a failure."""


@contextlib.contextmanager
def stopped_by_signals(name: str) -> Iterator[None]:
    """SIGTERM and SIGINT end the block wherever it is, also while it waits for others, without an error.

    Only the first one counts, so that an impatient second Ctrl-C does not interrupt the orderly end.
    """
    # Restored afterwards: a script that runs a role as a function keeps its own handlers.
    previous = {number: signal.signal(number, _request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except _StopRequested:
        get_default_logger().info("%s stopped", name)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait_for_stop() -> None:
    """Sleeps until a stop signal ends the block."""
    # In steps: Python runs the handler on the main thread, but a signal that another thread receives, or that
    # arrives just before the main thread begins to wait, does not end that wait.
    while True:
        time.sleep(_SIGNAL_STEP_S)


def _request_stop(_number: int, _frame: object) -> None:
    # Before the exception: from here on the orderly end runs, which a second exception would cut short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise _StopRequested


def address_of(options: ServerOptions, port: int) -> str:
    """Where other processes of the job reach a server that listens on `port`."""
    return f"{env.get_advertise_host(options.host)}:{port}"


@contextlib.contextmanager
def connected(nats_url: str, name: str, role: str) -> Iterator[NatsSession]:
    """A session with the broker as `role` of persia.security, waiting for the broker to be there."""
    with NatsSession(nats_url, env.get_job_name(), name=name, role=role) as session:
        session.connect(env.get_deadline_s())
        yield session


@contextlib.contextmanager
def advertised(
    session: NatsSession,
    role: str,
    options: ServerOptions,
    *,
    incarnation: int,
    port: int,
    schema: str,
    observer: ProcessObserver,
    subscribe: Callable[[], Registration],
    slot_modes: tuple[str, ...] = (),
    has_rows: bool = False,
    term: int = 0,
    replaces: int = 0,
    is_serving: Callable[[], bool] = lambda: True,
) -> Iterator[Advertiser]:
    """Makes the server known for the time of the block. Enter it when the server is ready for requests.

    `subscribe` is called once the server is admitted to the job: a refused one that answered requests would
    hand out references and reports of a process that is about to end.
    """
    # Discovery tells others everything that they need to connect, so no address is configured anywhere.
    info = ServiceInfo(
        role=role,
        index=options.replica_index,
        replicas=options.replica_size,
        incarnation=incarnation,
        address=address_of(options, port),
        schema=schema,
        pid=os.getpid(),
        status_address=observer.address,
        slot_modes=slot_modes,
        has_rows=has_rows,
        term=term,
        generation=options.generation,
        moved_shards=options.moved_shards,
    )
    advertiser = Advertiser(session, info, replaces=replaces, is_serving=is_serving)
    with contextlib.ExitStack() as requests:  # closed last: clients send until they get the LEFT event

        def admitted() -> None:
            requests.callback(subscribe().close)

        advertiser.start(admitted, is_silent=options.sources > 0)
        observer.serving = True
        try:
            # One with sources answers later (persia.roles.elastic).
            get_default_logger().info("%s %s", info, "gathers its rows" if options.sources else "is ready")
            yield advertiser
        finally:
            # Readiness first: a balancer must not send requests to a server that is leaving.
            observer.serving = False
            advertiser.stop()


def observed(
    source: Source, session: Session | None, options: ServerOptions, config: GlobalConfig
) -> ProcessObserver:
    """Metrics, status and health of a server; a context manager."""
    # The command line has the ports from the same variables, and may have others.
    settings = ObservabilitySettings.from_environment(config, host=options.host)
    settings = replace(settings, port=options.metrics_port, health_port=options.health_port)
    return ProcessObserver(source, session, settings)
