"""Who may call the REST service, how often, and over which connections."""

from __future__ import annotations

import asyncio
import hmac
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from persia_k8s.errors import PersiaK8sError

_MIN_TOKEN_LENGTH = 16
_RELOAD_S = 10.0
OPEN_PATHS = ("/healthz", "/openapi.json")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Requests that are worked on at once, and a second on average. Further ones get status 429."""

    concurrent: int = 32
    per_second: float = 50.0


def read_token(path: Path, option: str = "--token-file") -> str:
    """The token in the file, without the space around it. Raises PersiaK8sError."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PersiaK8sError(f"{option} {path} cannot be read: {error}") from error
    # An empty file, as of a Secret that was not filled, would authenticate every caller.
    if len(token) < _MIN_TOKEN_LENGTH:
        raise PersiaK8sError(
            f"{option} {path} holds a token of {len(token)} characters: "
            f"take at least {_MIN_TOKEN_LENGTH} random ones"
        )
    return token


def failure(status: int, message: str) -> web.Response:
    """An answer that says why there is no other."""
    results = {"success": False, "err_msg": message}
    return web.json_response({**results, "execution_results": results}, status=status)


def authentication(token: str, read_token: str | None) -> Any:
    """A middleware. Callers with `read_token` may only read."""
    may_change, may_read = _header(token), None if read_token is None else _header(read_token)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        # Compared in constant time: the time of an ordinary comparison tells how much of a token is right.
        if request.path in OPEN_PATHS or hmac.compare_digest(sent, may_change):
            return await handler(request)
        if may_read is not None and hmac.compare_digest(sent, may_read):
            if request.method in ("GET", "HEAD"):
                return await handler(request)
            return failure(
                403, f"{request.method} {request.path} needs the full token: this one may read only"
            )
        answer = failure(401, "send the service's token: Authorization: Bearer TOKEN")
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    return check


def _header(token: str) -> bytes:
    return f"Bearer {token}".encode()


def limited(limits: Limits) -> Any:
    """A middleware. Probes are never refused: a busy service is not to be restarted."""
    running = 0
    allowance, counted = limits.per_second, time.monotonic()

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal running, allowance, counted
        if request.path == "/healthz":
            return await handler(request)
        now = time.monotonic()
        allowance = min(limits.per_second, allowance + (now - counted) * limits.per_second)
        counted = now
        if running >= limits.concurrent or allowance < 1:
            answer = failure(429, "too many requests: repeat this one after a second")
            answer.headers["Retry-After"] = "1"
            return answer
        allowance -= 1
        running += 1
        try:
            return await handler(request)
        finally:
            running -= 1

    return limit


def tls_context(folder: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer, with `tls.crt` and `tls.key` of a Secret. Raises PersiaK8sError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise PersiaK8sError(
            f"--tls-dir {folder} needs tls.crt and tls.key, which belong together: {error}"
        ) from error
    return context


def _no_password() -> str:
    """Instead of a question at the terminal."""
    raise OSError("the key is encrypted: store it without a passphrase")


def reloading(context: ssl.SSLContext, folder: Path) -> Callable[[web.Application], AsyncIterator[None]]:
    """A cleanup context: new connections use a certificate soon after it is replaced."""
    current = context

    def choose(connection: ssl.SSLObject, _name: str | None, _listener: ssl.SSLContext) -> None:
        connection.context = current

    # Each handshake calls it. A load into the listener's own context would, if the key does not match the
    # certificate, leave the new certificate in it without a key.
    context.sni_callback = choose

    async def reload() -> None:
        nonlocal current
        seen = _stamp(folder)
        while True:
            await asyncio.sleep(_RELOAD_S)
            if (stamp := _stamp(folder)) != seen:
                try:
                    current = tls_context(folder)
                except PersiaK8sError as error:  # half written: the old one stays until the next look
                    print(error, flush=True)
                else:
                    seen = stamp

    async def running(_app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(reload())
        yield
        task.cancel()

    return running


def _stamp(folder: Path) -> tuple[int, ...]:
    try:
        return tuple((folder / name).stat().st_mtime_ns for name in ("tls.crt", "tls.key"))
    except OSError:
        return ()
