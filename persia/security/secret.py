"""The job's secret: where a process finds it, how the first one creates it, and the keys derived from it.

In: environment variables and a file that only its owner can read. Out: a `Credential`: the whole secret,
or that of one role. No text here shows a secret but `Credential.text`. Derivation: ADR 26.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from persia import env
from persia.errors import ConfigError, PermissionDeniedError

JOB = "job"  # who holds the whole secret, and may act as any role
TRAINER, LOADER, WORKER, SERVER = "trainer", "loader", "worker", "server"
INFERENCE, MONITOR, ADMIN = "inference", "monitor", "admin"
ROLES = (TRAINER, LOADER, WORKER, SERVER, INFERENCE, MONITOR, ADMIN)
# Of planes that jobs share: a broker and a scraper serve all jobs of one secret. No job has this name.
ALL_JOBS = "*"

_KEY_BYTES = 32
_TEXT = re.compile(rf"persia1\.({'|'.join((JOB, *ROLES))})\.([0-9a-f]+)")
_VALUE, _FILE = "PERSIA_JOB_SECRET", "PERSIA_JOB_SECRET_FILE"
_LONGEST_FILE = 1024
_REMEDY = "`persia-launcher secret show`, on a host of the job, prints what belongs there"


@dataclass(frozen=True)
class Credential:
    """The job's secret (role `JOB`), or the secret of one role. `source` says where it was found."""

    role: str
    secret: bytes = field(repr=False)
    source: str
    # SHA-256 of the monitor's HTTP token: a role can check the token, and cannot make it.
    token_digest: bytes = field(repr=False)

    @classmethod
    def of_job(cls, secret: bytes, source: str) -> Credential:
        """The whole secret."""
        token = _derive(_role_secret(secret, MONITOR), "http", ALL_JOBS, MONITOR)
        return cls(JOB, secret, source, hashlib.sha256(token.hex().encode()).digest())

    def limited_to(self, role: str) -> Credential:
        """The credential of `role` alone. Raises `PermissionDeniedError` if this one does not contain it."""
        if role == self.role:
            return self
        if self.role != JOB:
            raise PermissionDeniedError(
                f"{self.source} has the credential of role {self.role!r}, and {role!r} is needed: set "
                f"{_VALUE} or {_FILE} to what `persia-launcher secret show --role {role}` prints on "
                "a host of the job"
            )
        return Credential(role, _role_secret(self.secret, role), self.source, self.token_digest)

    def key(self, plane: str, job: str, role: str) -> bytes:
        """The key of `role` on a plane ("rpc", "nats", "http" or "serve") of the job `job`."""
        own = self.limited_to(role)
        secret = _role_secret(own.secret, role) if role == JOB else own.secret
        return _derive(secret, plane, job, role)

    @property
    def text(self) -> str:
        """The form in variables and files: persia1.job.HEX, or persia1.ROLE.HEX."""
        rest = b"" if self.role == JOB else self.token_digest
        return f"persia1.{self.role}.{(self.secret + rest).hex()}"


def parse(text: str, source: str) -> Credential:
    """Reads `Credential.text`. ConfigError: it is something else; the message does not quote it."""
    match = _TEXT.fullmatch(text.strip())
    size = 0 if match is None else len(match[2])
    if match is None or size != 2 * _KEY_BYTES * (1 if match[1] == JOB else 2):
        raise ConfigError(f"{source} has {len(text.strip())} characters that are no credential: {_REMEDY}")
    raw = bytes.fromhex(match[2])
    if match[1] == JOB:
        return Credential.of_job(raw, source)
    return Credential(match[1], raw[:_KEY_BYTES], source, raw[_KEY_BYTES:])


def find() -> Credential:
    """The credential of this process: PERSIA_JOB_SECRET, the file PERSIA_JOB_SECRET_FILE, or the user's file.

    The first process creates a missing file. Raises ConfigError for what is no credential, and for a file
    that others can read.
    """
    if text := env.get_job_secret():
        return parse(text, f"environment variable {_VALUE}")
    path = secret_file()
    try:
        return _read(path)
    except FileNotFoundError:
        _create(path)
    except OSError as error:
        raise _unusable(path, error) from error
    return _read(path)


def secret_file() -> Path:
    """PERSIA_JOB_SECRET_FILE, else persia/job_secret in the user's folder for configuration."""
    if given := env.get_job_secret_file():
        return Path(given)
    try:
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError as error:
        raise ConfigError(
            f"there is no home directory for the job's secret: set {_VALUE} or {_FILE}"
        ) from error
    return Path(folder) / "persia" / "job_secret"


def replace() -> Path:
    """Writes a new secret over the file's. Processes that run keep the old one until they end.

    Raises ConfigError if PERSIA_JOB_SECRET is set, because no process would use the new secret.
    """
    if env.get_job_secret():
        raise ConfigError(
            f"{_VALUE} is set, and processes use it instead of a file: unset it to replace the file's secret"
        )
    path = secret_file()
    os.replace(_write_new(path), path)
    return path


def _role_secret(secret: bytes, role: str) -> bytes:
    return hmac.digest(secret, f"persia/1/role/{role}".encode(), "sha256")


def _derive(secret: bytes, plane: str, job: str, role: str) -> bytes:
    return hmac.digest(secret, f"persia/1/{plane}/{job}/{role}".encode(), "sha256")


def _read(path: Path) -> Credential:
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        # Kubernetes grants a mounted file by its group. The user's own file needs no group.
        if mode & (0o037 if env.get_job_secret_file() else 0o077):
            raise ConfigError(
                f"{path} has mode {mode:04o}, so that others can read or replace the job's secret: "
                f"chmod 600 {path}, and make a new secret if others may have read it "
                "(`persia-launcher secret create --replace`)"
            )
        return parse(file.read(_LONGEST_FILE).decode("ascii", "replace"), str(path))


def _create(path: Path) -> None:
    written = _write_new(path)
    try:
        # A link and no rename: of two processes that start together the first wins, and both read its secret.
        os.link(written, path)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(path, error) from error
    finally:
        written.unlink()


def _write_new(path: Path) -> Path:
    """A new secret in a file beside `path`."""
    written = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error
    with os.fdopen(descriptor, "w") as file:
        file.write(Credential.of_job(secrets.token_bytes(_KEY_BYTES), str(path)).text + "\n")
        file.flush()
        os.fsync(file.fileno())
    return written


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the job's secret cannot be kept in {path} ({error.strerror}): set {_FILE} to a file that this user "
        f"can write, or {_VALUE} to the secret itself"
    )
