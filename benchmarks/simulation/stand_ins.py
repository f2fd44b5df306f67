"""What stands in the product's modules for threads, clocks, sockets and pools of threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from benchmarks.simulation import native
from benchmarks.simulation.kernel import Kernel, Killed, Thread, patched
from benchmarks.simulation.locks import Clock, Threading
from persia import waiting
from persia.checkpoint import checkpoints, coordinator, operation, server_job, service
from persia.logger import get_default_logger
from persia.messaging import discovery
from persia.messaging.payloads import JsonMessage
from persia.pipeline import failover, loader_watch, queues, receive, send, workers
from persia.roles import embedding_worker, replica, standby

DEADLINE_S = 120.0
_MESSAGES = 1000  # that are kept decoded and encoded


class _Sockets:
    """In place of the module socket: whether a port is open."""

    class _Connection:
        def close(self) -> None: ...

        def __enter__(self) -> _Sockets._Connection:
            return self

        def __exit__(self, *_exc_info: object) -> None: ...

    @classmethod
    def create_connection(cls, address: tuple[str, int], timeout: float) -> _Sockets._Connection:
        kernel = Kernel.current
        kernel.sleep(kernel.random.uniform(0.0001, 0.003))
        host = int(address[0].removeprefix("host"))
        if kernel.is_cut(kernel.process.host, host):
            kernel.sleep(timeout)
            raise TimeoutError
        if not kernel.library.listens(f"{address[0]}:{address[1]}".encode()):
            raise ConnectionRefusedError
        return cls._Connection()


class _Exit:
    """In place of the module os."""

    @staticmethod
    def _exit(code: int) -> None:
        Kernel.current.log("ends with exit code %d", code)
        Kernel.current.process.kill()
        raise Killed


class _Pool:
    """In place of DaemonPool."""

    def __init__(self, _num_threads: int, _name: str) -> None: ...

    class _Future:
        def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            self._answer: Any = None
            self._error: Exception | None = None

            def run() -> None:
                try:
                    self._answer = function(*arguments)
                except Exception as error:
                    self._error = error

            self._thread = Thread(target=run)
            self._thread.start()

        def done(self) -> bool:
            return not self._thread.is_alive()

        def result(self) -> Any:
            self._thread.join()
            if self._error is not None:
                raise self._error
            return self._answer

    def submit(self, function: Callable[..., Any], *arguments: Any) -> _Pool._Future:
        return self._Future(function, arguments)

    def close(self) -> None: ...


class _Json:
    """`encode` and `decode` of JsonMessage. Polls and their answers are most messages: they are kept."""

    _KEPT = (discovery.ServiceInfo, discovery.ServiceEvent, replica.Message)  # immutable
    _encode, _decode = JsonMessage.encode, vars(JsonMessage)["decode"].__func__
    _encoded: Any = lru_cache(_MESSAGES)(_encode)
    _decoded: Any = lru_cache(_MESSAGES)(_decode)

    def encode(self: Any) -> bytes:
        function = _Json._encoded if isinstance(self, _Json._KEPT) else _Json._encode
        return function(self)

    @classmethod
    def decode(cls, payload: bytes) -> Any:
        function = _Json._decoded if cls in _Json._KEPT else _Json._decode  # type: ignore[comparison-overlap]
        return function(cls, bytes(payload))


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        Kernel.current.log("  %s", record.getMessage())


@contextmanager
def simulated(kernel: Kernel) -> Iterator[None]:
    """The product's modules use threads, clocks and sockets of the simulation in the block."""
    both: dict[str, object] = {"threading": Threading, "time": Clock}
    pooled: dict[str, object] = {"time": Clock, "DaemonPool": _Pool}
    modules: dict[Any, dict[str, object]] = {
        checkpoints: pooled,
        coordinator: both,
        operation: pooled,
        server_job: {**both, **pooled},
        service: {"threading": Threading},
        discovery: both,
        waiting: {"time": Clock},
        queues: both,
        failover: {"threading": Threading},
        JsonMessage: {name: vars(_Json)[name] for name in ("encode", "decode")},
        workers: {**both, "socket": _Sockets, "DaemonPool": _Pool, "RemoteClient": native.RemoteClient},
        loader_watch: {"time": Clock},
        receive: both,
        send: {"time": Clock, "random": kernel.random},
        embedding_worker: {"threading": Threading},
        replica: {**both, "socket": _Sockets},
        standby: {
            **both,
            "os": _Exit,
            "Presence": lambda session: replica.Presence(session, Clock.monotonic),
        },
    }
    environment = {"PERSIA_DEADLINE_SEC": str(DEADLINE_S), "PERSIA_LOADER_SILENCE_SEC": "60"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    logger = get_default_logger()
    handlers, logger.handlers = logger.handlers, [_Handler()] if kernel.trace else []
    disabled, logger.disabled = logger.disabled, not kernel.trace
    try:
        with patched(modules):
            yield
    finally:
        logger.handlers, logger.disabled = handlers, disabled
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
