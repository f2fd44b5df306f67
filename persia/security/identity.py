"""What a process proves to the others of its job, and asks of them, on each plane."""

from __future__ import annotations

import hashlib
import hmac
import threading
from dataclasses import dataclass, field
from pathlib import Path

from persia import _native, env
from persia.security import audit, secret
from persia.security.secret import (
    ALL_JOBS,
    INFERENCE,
    JOB,
    LOADER,
    MONITOR,
    ROLES,
    SERVER,
    WORKER,
    Credential,
)

_lock = threading.Lock()
_installed: str | None = None  # the role that this process has on the RPC plane
# A loader or an InferCtx beside a training must not take the trainer's rights away. Each of these may do less
# than the next, and all other roles more.
_LESSER = (LOADER, INFERENCE)


def install(role: str, job: str | None = None) -> None:
    """Makes this process prove `role` of `job` on its RPC connections from now on, and demand as much of its
    callers. `job` is by default the environment's.

    Call it before the first server or channel of the process. A process that has a role of more rights keeps
    it. Raises ConfigError or PermissionDeniedError if the process has no credential for `role`,
    InvalidArgumentError for unusable files of `PERSIA_TLS_DIR`.
    """
    global _installed
    with _lock:
        if _installed is not None and _rank(role) < _rank(_installed):
            return
        credential = secret.find()
        job = job or env.get_job_name()
        key = _rpc_key(credential, job, role)
        # Every role, not those of this one's servers: a notebook may run servers beside its training.
        accepted = {one: _rpc_key(credential, job, one) for one in ROLES} if credential.role == JOB else {}
        _native.set_identity(role, key, accepted)
        if folder := env.get_tls_dir():
            # The names that Kubernetes gives them in a Secret of type kubernetes.io/tls.
            _native.set_tls(*(str(Path(folder, name)) for name in ("tls.crt", "tls.key", "ca.crt")))
        _installed = role
    if role in (SERVER, WORKER):  # which others call
        audit.start()


def _rpc_key(credential: Credential, job: str, role: str) -> bytes:
    # A client of predictions knows addresses of embedding workers, and no job's name. It only reads.
    return credential.key("rpc", ALL_JOBS if role == INFERENCE else job, role)


def _rank(role: str) -> int:
    return _LESSER.index(role) if role in _LESSER else len(_LESSER)


@dataclass(frozen=True)
class NatsLogin:
    """User, password and the prefix of reply subjects that the job's broker reserves for a role."""

    user: str
    password: str = field(repr=False)

    @property
    def inbox_prefix(self) -> str:
        return f"_INBOX_{self.user}"


def nats_login(role: str) -> NatsLogin:
    """How `role`, or `JOB`, logs in to a broker of this secret."""
    return NatsLogin(role, secret.find().key("nats", ALL_JOBS, role).hex())


def http_token() -> str:
    """The bearer token of metrics, status and traces."""
    return secret.find().key("http", ALL_JOBS, MONITOR).hex()


def serve_token() -> str:
    """The bearer token of predictions. PermissionDeniedError: this process has another role's credential."""
    return secret.find().key("serve", ALL_JOBS, INFERENCE).hex()


@dataclass(frozen=True)
class HttpCheck:
    """Decides about the Authorization header of a request."""

    token_digest: bytes = field(repr=False)

    def accepts(self, authorization: str | None) -> bool:
        scheme, _, token = (authorization or "").partition(" ")
        given = hashlib.sha256(token.strip().encode()).digest()
        return scheme.lower() == "bearer" and hmac.compare_digest(given, self.token_digest)


def http_check() -> HttpCheck:
    """For the HTTP port of a process, whatever its role."""
    return HttpCheck(secret.find().token_digest)


def serve_check() -> HttpCheck:
    """For a server of predictions, which can make the token as well."""
    return HttpCheck(hashlib.sha256(serve_token().encode()).digest())
