"""The errors users meet, one class per status code of the native code, so that a caller can act by class.

Every one is a `PersiaError`, which is a `RuntimeError`: scripts written for the published system, which
raised `RuntimeError` for everything, keep working. Each also derives from the built-in that a Python
programmer would expect (`ValueError`, `TimeoutError`, ...). Messages name the field or peer, the value, and
the remedy.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CorruptionError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "NotFoundError",
    "PermissionDeniedError",
    "PersiaError",
    "ResourceExhaustedError",
    "RowsLostError",
    "StorageError",
    "StreamClosedError",
    "UnavailableError",
    "UntrustedError",
]


class PersiaError(RuntimeError):
    """Base of all errors raised by persia."""


class InvalidArgumentError(PersiaError, ValueError):
    """A value, shape, range or name that the caller must change."""


class InvalidTypeError(PersiaError, TypeError):
    """An argument of the wrong class or dtype."""


class ConfigError(InvalidArgumentError):
    """A configuration file or environment variable: names file, key, value and the nearest valid key."""


class NotFoundError(PersiaError, LookupError):
    """The thing asked for does not exist, such as a reference to a batch that has expired."""


class CorruptionError(PersiaError, ValueError):
    """Bytes from the network or the disk that do not decode."""


class UntrustedError(CorruptionError):
    """A checkpoint or packet without the signature of a trusted key, or the code of another user."""


class UnavailableError(PersiaError, ConnectionError):
    """A peer could not be reached until the deadline; the message names it and its last address."""

    # The broker has answered that no one listens on the subject of the request. A mark and no class: a
    # receiver that passes the error on sends the name of its class.
    has_no_listener = False
    # The reply was lost with a connection to the broker: it says nothing about the peer.
    is_lost = False


class DeadlineExceededError(PersiaError, TimeoutError):
    """The time given ran out."""


class ResourceExhaustedError(PersiaError):
    """A bounded buffer is full; retry later."""


class PermissionDeniedError(PersiaError, PermissionError):
    """The peer did not accept this process's credentials, or its role may not do what it asked for."""


class StorageError(PersiaError, OSError):
    """The operating system or a storage service refused."""


class InternalError(PersiaError):
    """A bug in persia: please report it."""


class FailedPreconditionError(PersiaError):
    """Called in the wrong state: not configured yet, or configured differently."""


class RowsLostError(FailedPreconditionError):
    """A parameter server has restarted without its rows: load the last checkpoint."""


class StreamClosedError(FailedPreconditionError):
    """The NN workers have left their training loops: they take no more batches from the loaders."""
