"""Who may ask a server for predictions: a bearer token and certificates, of gRPC and of HTTP.

Whether the server lives and is ready, everybody may ask who can connect, as probes do.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

from persia.errors import ConfigError, PersiaError
from persia.logger import get_default_logger
from persia.security import HttpCheck, audit, serve_check
from persia.security.tls import TlsFiles, job_tls
from persia.serving.protocol import SERVICE
from persia.serving.statistics import ServingStatistics

# Not Health/Watch: its streams have no end, and strangers could hold all concurrent calls with them.
_OPEN_CALLS = ("/grpc.health.v1.Health/Check", f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady")
_OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
_SHOWN = 100  # characters of a path that a stranger has sent
_REFUSAL = (
    "this server answers who has its token: send `authorization: Bearer TOKEN`, the TOKEN of "
    "`persia-launcher secret token --for serve`"
)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Access:
    """`check` None: no token is needed. `tls` None: nothing is encrypted."""

    check: HttpCheck | None
    tls: TlsFiles | None

    @classmethod
    def of(cls, require_token: bool, certificate: Path | None, key: Path | None, ca: Path | None) -> Access:
        """By the options; without a certificate among them, by PERSIA_TLS_DIR.

        ConfigError: a file cannot be used, or only one of certificate and key is given.
        """
        if (certificate is None) != (key is None) or (certificate is None and ca is not None):
            raise ConfigError("--tls-cert and --tls-key need each other, and --tls-client-ca needs both")
        tls = job_tls() if certificate is None or key is None else TlsFiles(certificate, key, ca)
        return cls(serve_check() if require_token else None, tls)

    @property
    def is_open(self) -> bool:
        """Whether everybody is answered."""
        return self.check is None and (self.tls is None or self.tls.ca is None)

    def admits(self, authorization: str | None) -> bool:
        return self.check is None or self.check.accepts(authorization)


EVERYBODY = Access(check=None, tls=None)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the token before their message is read."""

    def __init__(self, access: Access, statistics: ServingStatistics) -> None:
        self._access, self._statistics = access, statistics

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method)
        if method in _OPEN_CALLS:
            return await continuation(details)
        values = [value for name, value in details.invocation_metadata or () if name == "authorization"]
        if self._access.admits(values[0] if len(values) == 1 and isinstance(values[0], str) else None):
            return await continuation(details)

        async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            _record(self._statistics, context.peer(), method)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)

        # Of a stream, whatever the method is: another kind would read the message first.
        return grpc.stream_stream_rpc_method_handler(refuse)


def token_middleware(access: Access, statistics: ServingStatistics) -> Any:
    """For aiohttp: the body of a refused request is not read."""

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path in _OPEN_PATHS or access.admits(request.headers.get("Authorization")):
            return await handler(request)
        _record(statistics, str(request.remote), f"{request.method} {request.path[:_SHOWN]}")
        headers = {"WWW-Authenticate": 'Bearer realm="persia serve"', "Connection": "close"}
        return web.json_response({"error": _REFUSAL}, status=401, headers=headers)

    return check


def _record(statistics: ServingStatistics, peer: str, method: str) -> None:
    statistics.add_request(time.monotonic_ns(), "UNAUTHENTICATED")
    audit.record(peer=peer, role=None, method=method, outcome="refused", reason="no token of `serve`")


def grpc_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """They follow the files: each handshake asks whether there are new ones. ConfigError: no such file."""
    used = warned = tls.stamp()

    def renewed() -> Any:
        nonlocal used, warned
        if (stamp := tls.stamp()) == used:
            return None
        try:
            # The pair must match: gRPC would refuse clients with one that does not.
            TlsFiles(tls.certificate, tls.key, tls.ca)
            configuration = _configuration(tls)
        except (PersiaError, OSError) as error:
            if stamp != warned:  # anybody who can connect begins handshakes
                get_default_logger().warning("%s; the certificate read before is used", error)
            warned = stamp
            return None
        if tls.stamp() != stamp:  # they change right now
            return None
        used = stamp
        return configuration

    try:
        first = _configuration(tls)
    except OSError as error:  # the files have changed since `tls` was made
        raise ConfigError(f"TLS: {error}: start the server again when its files are complete") from error
    return grpc.dynamic_ssl_server_credentials(
        first, renewed, require_client_authentication=tls.ca is not None
    )


def _configuration(tls: TlsFiles) -> Any:
    pair = tls.key.read_bytes(), tls.certificate.read_bytes()
    return grpc.ssl_server_certificate_configuration([pair], None if tls.ca is None else tls.ca.read_bytes())
