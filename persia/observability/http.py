"""The HTTP port of a process: `/metrics`, `/status`, `/healthz`, `/readyz`, `/trace`.

GET, but for `/trace/start` and `/trace/stop`. Whether the process lives and is ready, everybody may ask, as
probes do, and without TLS. All else needs the bearer token of the job's monitors, also from this machine:
others may use it. With PERSIA_TLS_DIR it needs TLS and a certificate of the job's CA as well.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, MSG_PEEK, socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

from persia.errors import InvalidArgumentError, PersiaError, StorageError
from persia.logger import get_default_logger
from persia.security import HttpCheck, audit, http_check
from persia.security.tls import job_tls

# A scraper that hangs must not take threads without bound from a server that answers lookups.
_MAX_CONNECTIONS = 32
_IO_TIMEOUT_S = 10.0
_SHOWN = 100  # characters of a path that a stranger has sent

Query = Mapping[str, str]
Answer = tuple[int, str, bytes]  # status code, content type, body
_OPEN = ("/healthz", "/readyz")
_TLS_BEGIN = b"\x16"  # the type of a record with a handshake, and the first byte of no HTTP request
Routes = Mapping[tuple[str, str], Callable[[Query], Answer]]


def json_answer(value: object, code: int = 200) -> Answer:
    return code, "application/json", json.dumps(value).encode()


class HttpPort(ThreadingHTTPServer):
    """Answers by `routes`, (method, path) to a function of the query, from now on. `port` is the real one."""

    # A client that reads slowly must not keep the process from ending.
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        self.routes = routes
        self.num_refused = 0
        self._check = _check_of_this_process()
        tls = job_tls()
        self._tls = None if tls is None else tls.server_context()
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        # http.server binds IPv4 only unless it is told otherwise.
        self.address_family = AF_INET6 if ":" in host else AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise StorageError(
                f"metrics and status cannot be shown on {host}:{port}: {error.strerror}; set "
                "PERSIA_METRICS_PORT to another port, or to 0 for a free one"
            ) from error
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="persia-http", daemon=True
        )
        self._thread.start()

    def refusal(self, path: str, connection: socket, authorization: str | None) -> str | None:
        """What a request lacks; None: it may be answered."""
        if path in _OPEN:
            return None
        if self._tls is not None and not isinstance(connection, ssl.SSLSocket):
            return "use https, with a certificate of the job's CA (PERSIA_TLS_DIR)"
        if self._check is None or not self._check.accepts(authorization):
            return "send `Authorization: Bearer TOKEN`, the TOKEN of `persia-launcher secret token`"
        return None

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(5.0)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)  # as many as are served are waiting already
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            # Here and not where connections are accepted: a client that is slow must not hold up others.
            if (secured := self._secured(request, client_address)) is not None:
                super().process_request_thread(secured, client_address)
        finally:
            self._free.release()

    def _secured(self, request: socket, client_address: Any) -> socket | None:
        """The connection with TLS if the client has begun it; None if its certificate was refused."""
        try:
            request.settimeout(_IO_TIMEOUT_S)
            if self._tls is None or request.recv(1, MSG_PEEK) != _TLS_BEGIN:
                return request
            return self._tls.wrap_socket(request, server_side=True)
        except OSError as error:
            self.shutdown_request(request)
            self.count_refused(client_address, "TLS", str(error))
            return None

    def count_refused(self, client_address: Any, method: str, reason: str) -> None:
        self.num_refused += 1
        host, port = client_address[:2]
        audit.record(peer=f"{host}:{port}", role=None, method=method, outcome="refused", reason=reason)

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        get_default_logger().debug("a request for metrics or status failed", exc_info=True)


def _check_of_this_process() -> HttpCheck | None:
    try:
        return http_check()
    except PersiaError as error:
        # An embedded job needs no secret for anything else, and must not fail for its metrics.
        get_default_logger().warning("metrics and status are refused to everybody: %s", error)
        return None


class _Handler(BaseHTTPRequestHandler):
    server: HttpPort
    timeout = _IO_TIMEOUT_S
    server_version = "persia"
    sys_version = ""

    def do_GET(self) -> None:
        code, kind, body = self._answer()
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", 'Bearer realm="persia"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - the name that http.server looks for; routes go by `self.command`

    def _answer(self) -> Answer:
        parts, routes = urlsplit(self.path), self.server.routes
        authorization = self.headers.get("Authorization")
        if (remedy := self.server.refusal(parts.path, self.connection, authorization)) is not None:
            self.server.count_refused(
                self.client_address, f"{self.command} {parts.path[:_SHOWN]}", "no token or no certificate"
            )
            return json_answer({"error": f"this is for the job's monitors: {remedy}"}, 401)
        route = routes.get((self.command, parts.path))
        if route is None:
            if allowed := [known for known, path in routes if path == parts.path]:
                return json_answer({"error": f"{parts.path} is for {allowed[0]}"}, 405)
            known = " ".join(sorted({path for _, path in routes}))
            return json_answer({"error": f"nothing at {parts.path}; there are {known}"}, 404)
        try:
            return route({name: values[-1] for name, values in parse_qs(parts.query).items()})
        # A wrong request and a process that cannot answer now: callers repeat only the second.
        except InvalidArgumentError as error:
            return json_answer({"error": str(error)}, 400)
        except PersiaError as error:
            return json_answer({"error": str(error)}, 503)

    def log_message(self, format: str, *args: Any) -> None:
        get_default_logger().debug("http: %s", format % args)
