"""One operator at a time: the holder of a Lease works, the others wait for it to expire or to be released."""

from __future__ import annotations

import http.server
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from persia_k8s.cluster import Cluster, ClusterError

_DURATION_S = 15
_RENEW_S = 3.0
_GIVE_UP_S = 10.0  # before others may take the lease: two operators would answer the same failure twice
_CHECK_S = 0.5


class Leadership:
    """A Lease. `acquire` blocks; afterwards it is renewed until `release`, or the process ends."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster = cluster
        self._place = (namespace, name)
        self._identity = f"{socket.gethostname()}_{os.getpid()}"
        self._seen: tuple[Any, float] = (None, 0.0)  # the holder's last renewal, and when it was seen here
        self._renewed_at = 0.0  # begin of the last request that renewed it
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._guard = threading.Thread(target=self._end_when_lost, name="lease-guard", daemon=True)

    def acquire(self, liveness_port: int) -> None:
        """Waits for the lease; answers liveness probes meanwhile. SIGTERM ends the process with 0."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        # Else Kubernetes would restart an operator that only waits for its turn.
        standby = _answer_probes(liveness_port)
        logging.info("waiting for lease %s as %s", "/".join(self._place), self._identity)
        while not self._renew():
            time.sleep(_RENEW_S)
        logging.info("lease acquired")
        if standby is not None:
            standby.shutdown()
            standby.server_close()
        self._thread.start()
        self._guard.start()

    def release(self) -> None:
        """Lets another operator begin at once."""
        self._stop.set()
        # A renewal under way would take the lease again after it was given up.
        self._thread.join(_GIVE_UP_S)
        with suppress(ClusterError):
            lease = self._cluster.lease(*self._place)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                self._cluster.put_lease(lease)

    def _try(self) -> bool:
        """Takes or renews the lease, if no other process holds it. Returns whether this process has it."""
        try:
            lease = self._cluster.lease(*self._place)
            # False where another process has changed the lease since it was read: put_lease compares
            # versions, so two that find it free cannot both have it.
            return self._is_free(lease) and self._cluster.put_lease(self._renewed(lease))
        except ClusterError as error:
            logging.warning("lease %s: %s", "/".join(self._place), error)
            return False

    def _is_free(self, lease: dict[str, Any] | None) -> bool:
        if lease is None:
            return True
        spec = lease["spec"]
        if spec.get("holderIdentity") in (self._identity, "", None):
            return True
        # By the time since the last change seen here: the clocks of two nodes may differ.
        if self._seen[0] != spec.get("renewTime"):
            self._seen = (spec.get("renewTime"), time.monotonic())
        return time.monotonic() - self._seen[1] > float(spec.get("leaseDurationSeconds", _DURATION_S))

    def _renewed(self, lease: dict[str, Any] | None) -> dict[str, Any]:
        namespace, name = self._place
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._identity, "leaseDurationSeconds": _DURATION_S, "renewTime": now}
        if lease is None:
            metadata = {"namespace": namespace, "name": name}
            return {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": metadata,
                "spec": spec,
            }
        return {**lease, "spec": {**lease["spec"], **spec}}

    def _renew(self) -> bool:
        # Others count from the renewal that they see, which may be older than the answer to it.
        begun = time.monotonic()
        if not self._try():
            return False
        self._renewed_at = begun
        return True

    def _keep(self) -> None:
        while not self._stop.wait(_RENEW_S):
            self._renew()

    def _end_when_lost(self) -> None:
        # On a thread of its own: a request that renews may hang for longer than the lease lasts.
        while not self._stop.wait(_CHECK_S):
            if time.monotonic() - self._renewed_at > _GIVE_UP_S:
                logging.error("lease %s is lost: the operator ends, and another works", "/".join(self._place))
                # At once: passes may be interrupted at any moment, but must not continue beside another's.
                os._exit(1)


def _answer_probes(port: int) -> http.server.HTTPServer | None:
    if not port:
        return None

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"waiting for the lease")

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.HTTPServer(("", port), Handler)
    threading.Thread(target=server.serve_forever, name="liveness", daemon=True).start()
    return server
