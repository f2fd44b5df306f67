"""Who a process is in its job: the secret, and what each role proves with it (docs/security.md)."""

from persia.security.identity import (
    HttpCheck,
    NatsLogin,
    http_check,
    http_token,
    install,
    nats_login,
    serve_check,
    serve_token,
)

__all__ = [
    "HttpCheck",
    "NatsLogin",
    "http_check",
    "http_token",
    "install",
    "nats_login",
    "serve_check",
    "serve_token",
]
