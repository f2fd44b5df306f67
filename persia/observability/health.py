"""The standard gRPC health service, for probes and load balancers that speak it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from persia.errors import StorageError

# Polled: a change of readiness has no event, and clients that watch must be told of it.
_INTERVAL_S = 1.0


class HealthService:
    """`grpc.health.v1` on `host:port`. `checks` tells of each service name whether it is serving; they are
    asked once a second, and when the service starts.
    """

    def __init__(self, host: str, port: int, checks: Mapping[str, Callable[[], bool]]) -> None:
        import grpc  # here: most processes have no health port, and need not load it
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc

        self._checks = checks
        self._serving: dict[str, bool] = {}
        self._status = health_pb2.HealthCheckResponse
        self._servicer = health.HealthServicer()
        self._server = grpc.server(
            ThreadPoolExecutor(4, "persia-health"),
            options=[("grpc.so_reuseport", 0)],  # else two processes could share a port unnoticed
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise StorageError(
                f"the health service cannot listen on {address} (PERSIA_HEALTH_PORT): {error}"
            ) from None
        # Before it starts: a probe that comes first would be told that the service is unknown.
        self._update()
        self._server.start()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persia-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says NOT_SERVING to those who watch, then ends."""
        self._stopped.set()
        self._thread.join(5.0)
        # NOT_SERVING first, so that balancers take the server out before its port is closed.
        self._servicer.enter_graceful_shutdown()
        self._server.stop(0.5).wait(2.0)

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self._update()

    def _update(self) -> None:
        for service, check in self._checks.items():
            serving = check()
            if serving is not self._serving.get(service):  # those who watch are told each time
                self._serving[service] = serving
                self._servicer.set(service, self._status.SERVING if serving else self._status.NOT_SERVING)
