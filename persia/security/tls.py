"""TLS 1.3 of Python's ports: contexts that follow their files, so that new certificates need no restart.

Both ends show a certificate of the job's CA. Names in certificates are not compared: peers are known by
addresses, and the CA signs for one job alone. RPC ports do the same in the native module.
"""

from __future__ import annotations

import functools
import os
import ssl
import threading
from pathlib import Path

from persia import env
from persia.errors import ConfigError
from persia.logger import get_default_logger

# The names that Kubernetes gives them in a Secret of type kubernetes.io/tls.
CERTIFICATE, KEY, CA = "tls.crt", "tls.key", "ca.crt"

_Stamp = tuple[tuple[int, int] | None, ...]


class TlsFiles:
    """A certificate, its private key, and the CA that must have signed those of peers. Thread-safe."""

    def __init__(self, certificate: Path, key: Path, ca: Path | None) -> None:
        """`ca` None: a server that asks its clients for no certificate. ConfigError: an unusable file."""
        self.certificate, self.key, self.ca = certificate, key, ca
        self._lock = threading.Lock()
        self._stamp = self._warned = self.stamp()
        try:
            self._contexts = self._read()
        except OSError as error:
            raise ConfigError(
                f"TLS: {certificate}, {key} or {ca} cannot be used ({error}): give PEM files that this "
                "process may read, such as `persia-launcher certificates create` writes"
            ) from error

    @classmethod
    def of_folder(cls, folder: str | os.PathLike[str]) -> TlsFiles:
        """Those of a folder like PERSIA_TLS_DIR."""
        return cls(*(Path(folder, name) for name in (CERTIFICATE, KEY, CA)))

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.ca) if path is not None]

    def stamp(self) -> _Stamp:
        """Changes with the files."""
        return tuple(_stamp_of(path) for path in self.paths)

    def client_context(self) -> ssl.SSLContext:
        """For one new connection."""
        return self._current()[0]

    def server_context(self) -> ssl.SSLContext:
        """For all connections of a listener: each begins with the files as they are then."""
        # Not read anew: files that are just being replaced must not stop a process that starts.
        context = self._current()[1]

        def choose(connection: ssl.SSLObject, _name: str | None, _old: ssl.SSLContext) -> None:
            connection.context = self._current()[1]

        context.sni_callback = choose  # called for each handshake, also if the client names no server
        return context

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        with self._lock:
            stamp = self.stamp()
            if stamp != self._stamp:
                try:
                    self._contexts, self._stamp = self._read(), stamp
                except OSError as error:
                    # Certificate and key are two files: between their changes they do not match.
                    if stamp != self._warned:
                        get_default_logger().warning(
                            "TLS: %s: %s; the certificate read before is used", self.certificate, error
                        )
                    self._warned = stamp
            return self._contexts

    def _read(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """For a client, and for a server. OSError, of which ssl.SSLError is one: a file cannot be used."""
        client, server = (
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        )
        client.check_hostname = False
        for context in (client, server):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
                context.verify_mode = ssl.CERT_REQUIRED
        server.num_tickets = 0  # a resumed session would show no certificate
        return client, server


def _no_password() -> str:
    """Instead of a question at the terminal."""
    raise OSError("the key is encrypted: store it without a passphrase, readable for its owner alone")


def _stamp_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def job_tls() -> TlsFiles | None:
    """Those of PERSIA_TLS_DIR; None: this process does not use TLS. ConfigError: an unusable file."""
    folder = env.get_tls_dir()
    return None if folder is None else _of_folder(folder)


_of_folder = functools.lru_cache(maxsize=8)(TlsFiles.of_folder)
