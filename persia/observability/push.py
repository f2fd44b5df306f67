"""Pushes metrics to a Pushgateway, for jobs that Prometheus cannot reach."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from prometheus_client import CollectorRegistry, delete_from_gateway, push_to_gateway
from prometheus_client.exposition import default_handler

from persia.logger import get_default_logger
from persia.observability.exposition import text

_TIMEOUT_S = 5.0


class Pusher:
    """Replaces this process' group on the gateway every `interval_s` seconds, and removes it at the end.

    A gateway that does not answer, or metrics that cannot be read, are reported once, and tried again at
    every interval: metrics never stop a job. `grouping` must differ between all processes that push under
    one job name.
    """

    def __init__(
        self,
        gateway: str,
        registry: CollectorRegistry,
        *,
        job: str,
        grouping: dict[str, str],
        interval_s: float,
    ) -> None:
        self._gateway, self._registry = gateway, registry
        self._job, self._grouping, self._interval_s = job, grouping, interval_s
        self._stopped = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="persia-metrics-push", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Removes the group, so that the gateway does not show a process that has ended as if it ran."""
        # The thread first: it could push once more after the group is deleted.
        self._stopped.set()
        self._thread.join(2 * _TIMEOUT_S)
        try:
            delete_from_gateway(
                self._gateway, self._job, self._grouping, timeout=_TIMEOUT_S, handler=default_handler
            )
        except (OSError, ValueError, HTTPException) as error:
            get_default_logger().debug("metrics stay at %s: %s", self._gateway, error)

    def _run(self) -> None:
        while True:
            try:
                push_to_gateway(
                    self._gateway,
                    self._job,
                    self._registry,
                    self._grouping,
                    timeout=_TIMEOUT_S,
                    handler=self._handler,
                )
                self._has_failed = False
            except Exception as error:  # of the gateway, or of what collects: the thread must outlive both
                log = get_default_logger().debug if self._has_failed else get_default_logger().warning
                log(
                    "metrics could not be pushed to %s (PERSIA_METRICS_GATEWAY_ADDR): %s; trying on",
                    self._gateway,
                    error,
                )
                self._has_failed = True
            # At the end of the loop: the first push comes at once, so that short jobs are seen.
            if self._stopped.wait(self._interval_s):
                return

    def _handler(
        self, url: str, method: str, timeout: float | None, headers: list[tuple[str, str]], data: bytes
    ) -> Callable[[], Any]:
        del data  # the same, but for what `text` puts right
        send: Callable[[], Any] = default_handler(url, method, timeout, headers, text(self._registry))
        return send
