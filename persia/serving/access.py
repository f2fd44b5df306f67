"""Who may ask a server for predictions: a bearer token and certificates, of gRPC and of HTTP.

Whether the server lives and is ready, everybody may ask who can connect, as probes do.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from persia.errors import ConfigError
from persia.security import HttpCheck, audit, serve_check
from persia.security.tls import TlsFiles, job_tls
from persia.serving.protocol import SERVICE
from persia.serving.statistics import ServingStatistics

# Not Health/Watch: its streams have no end, and strangers could hold all concurrent calls with them.
_OPEN_CALLS = ("/grpc.health.v1.Health/Check", f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady")
_OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
# Strangers choose what is logged here, so its length is bounded.
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


def refusal_of(
    access: Access, statistics: ServingStatistics, method: str, authorization: str | None, peer: str
) -> str:
    """Why a call of gRPC is refused, by its header fields; empty: it is not."""
    if method in _OPEN_CALLS or access.admits(authorization):
        return ""
    _record(statistics, peer, method[:_SHOWN])
    return _REFUSAL


def token_middleware(access: Access, statistics: ServingStatistics) -> Any:
    """For aiohttp: the body of a refused request is not read."""

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path in _OPEN_PATHS or access.admits(request.headers.get("Authorization")):
            return await handler(request)
        _record(statistics, str(request.remote), f"{request.method} {request.path[:_SHOWN]}")
        # Closed, since the body was not read: what is left of it would be taken for the next request.
        headers = {"WWW-Authenticate": 'Bearer realm="persia serve"', "Connection": "close"}
        return web.json_response({"error": _REFUSAL}, status=401, headers=headers)

    return check


def _record(statistics: ServingStatistics, peer: str, method: str) -> None:
    statistics.add_request(time.monotonic_ns(), "UNAUTHENTICATED")
    audit.record(peer=peer, role=None, method=method, outcome="refused", reason="no token of `serve`")
