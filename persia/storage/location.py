"""A directory on any file system that fsspec knows, and the guarantees that checkpoints rely on there.

fsspec opens, lists and copies. Here is what it does not promise: durability, a replacement in one step, tries
that are repeated, errors that name place and remedy.

Two promises make atomic checkpoints possible on all of them. A file written by `create` appears under its
name only once it is complete, and `replace` swaps a small file in one step: by a rename on a local disk, by
one PUT on an object store (HDFS takes two steps, which readers know of). Failures become `StorageError`,
naming the location and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from persia.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PersiaError,
    StorageError,
)
from persia.logger import get_default_logger

_T = TypeVar("_T")

# Object stores take at most 10,000 parts of a file: with 64 MiB each, files of up to 625 GiB.
_UPLOAD_BLOCK_BYTES = 64 << 20

_BE_WRITTEN = "be written"

# What a PUT writes appears at once and whole; other services get the file under this name first.
_WHOLE_WRITES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}
_NEXT = ".next"

# Between five tries. Longer ones would exceed the time that a coordinator waits for progress.
_PAUSES_S = (0.2, 0.4, 0.8, 1.6)
# Trying again does not help against these: full, forbidden, too large, read-only.
_FINAL = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EROFS, errno.ENAMETOOLONG}
_FINAL_ERRORS = (PermissionError, IsADirectoryError, NotADirectoryError)
# Clients of object stores raise these as well as OSError; by name, as they need not be installed.
_CLIENT_ERRORS = ("BotoCoreError", "ClientError", "HttpError", "FSTimeoutError", "TimeoutError")


@dataclass(frozen=True)
class Location:
    """A directory, which need not exist: `Location.of("s3://bucket/model")`, `/data/model`, `memory://m`.

    Credentials and endpoints are fsspec's business: environment variables of the storage's own client, or
    `FSSPEC_S3_ENDPOINT_URL` and the like.
    """

    file_system: Any  # fsspec.AbstractFileSystem, untyped there
    path: str  # without the protocol

    @classmethod
    def of(cls, url: str | os.PathLike[str] | Location) -> Location:
        """Local paths become absolute: servers run in other directories."""
        if isinstance(url, Location):
            return url
        text = os.fspath(url)
        if not text:
            raise InvalidArgumentError("the checkpoint's location is empty: give a directory or a URL")
        try:
            file_system, path = fsspec.core.url_to_fs(text)
        except ImportError as failure:
            raise FailedPreconditionError(f"{text}: {failure}") from failure
        except (ValueError, OSError) as failure:
            raise InvalidArgumentError(f"{text} is no location that fsspec can use: {failure}") from failure
        return cls(file_system, path.rstrip("/") or "/")

    def __str__(self) -> str:
        return self.path if self.is_local else str(self.file_system.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        return isinstance(self.file_system, LocalFileSystem)

    @property
    def is_of_this_process(self) -> bool:
        """No other process can see it."""
        return "memory" in _protocols(self.file_system)

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def parent(self) -> Location:
        return Location(self.file_system, posixpath.dirname(self.path))

    def __truediv__(self, name: str) -> Location:
        return Location(self.file_system, posixpath.join(self.path, name))

    # ---- reading

    def size(self) -> int:
        """Size of this file in bytes. NotFoundError: there is none."""
        self._forget_listings()
        return int(self._try("be found", lambda: self.file_system.info(self.path)["size"]))

    def exists(self) -> bool:
        self._forget_listings()
        return bool(self._try("be looked for", lambda: self.file_system.exists(self.path)))

    def read(self, *, max_bytes: int) -> bytes:
        """The whole file. StorageError: it has more than `max_bytes`."""
        # Before anything is read: a wrong file at this place may be larger than the memory.
        size = self.size()
        if size > max_bytes:
            raise StorageError(f"{self} has {size} bytes, more than the {max_bytes} expected of such a file")
        return self.read_range(0, size)

    def exists_replaced(self) -> bool:
        """Whether `read_replaced` finds a file."""
        return self.exists() or Location(self.file_system, self.path + _NEXT).exists()

    def read_replaced(self, *, max_bytes: int) -> bytes:
        """A file that `replace` writes, also after a crash between the two steps of a swap on HDFS."""
        try:
            return self.read(max_bytes=max_bytes)
        except NotFoundError:
            if self.is_local or _has_whole_writes(self.file_system):
                raise
            successor = Location(self.file_system, self.path + _NEXT)
            if not successor.exists():
                raise
            return successor.read(max_bytes=max_bytes)

    def read_range(self, start: int, length: int) -> bytes:
        """Up to `length` bytes from `start` on; fewer at the end of the file."""
        if length == 0:  # object stores have no word for it
            return b""
        return bytes(self._try("be read", lambda: self._read_range(start, length)))

    def children(self) -> list[Location]:
        """Files and directories directly below; empty when there is no such directory."""
        self._forget_listings()
        try:
            paths = self._try("be listed", lambda: self.file_system.ls(self.path, detail=False))
        except NotFoundError:
            return []
        return [Location(self.file_system, path.rstrip("/")) for path in sorted(paths)]

    # ---- writing

    def create_folder(self) -> None:
        """Creates this folder where storage has folders. StorageError if that fails."""
        if self.is_local:
            with _reported(self, _BE_WRITTEN):
                self.file_system.makedirs(self.path, exist_ok=True)

    @contextlib.contextmanager
    def create(self) -> Iterator[Any]:
        """A new file to `write` to. It exists once the block ends without an error: on disk, not in a cache.

        After an error nothing of it is left. Not for a name that exists: dumps have names of their own.
        """
        with _reported(self, _BE_WRITTEN):
            if self.is_local or not _has_whole_writes(self.file_system):
                self.file_system.makedirs(posixpath.dirname(self.path), exist_ok=True)
            file = self.file_system.open(self.path, "wb", block_size=_UPLOAD_BLOCK_BYTES)
        try:
            with _reported(self, _BE_WRITTEN):
                yield file
                # A manifest that is on disk must not name a file that a power failure has emptied.
                if self.is_local:
                    file.flush()
                    os.fsync(file.fileno())
                file.close()
        except BaseException:
            self._discard(file)
            raise

    def replace(self, content: bytes) -> None:
        """Writes the whole file in one step: readers see the old content or the new, never a part.

        StorageError: as far as can be seen the old one is there. A service that did not answer may still
        bring the new one.
        """
        try:
            if self.is_local:
                self._replace_locally(content)
            else:
                self._try(_BE_WRITTEN, lambda: self._replace_remotely(content))
        except StorageError as failure:
            if not self._holds(content):
                raise
            get_default_logger().warning("%s is there, although: %s", self, failure)  # an answer was lost

    def turn_into(self, target: Location, content: bytes) -> None:
        """Gives this file the content, and then the place of `target`, which it replaces in one step.

        NotFoundError: this file was removed, and `target` is unchanged. On a storage service,
        which has no such step, a removal goes unnoticed while `target` is being written.
        """
        if not self.is_local:
            if not self.exists():
                raise NotFoundError(f"{self} is gone, and so {target} is not written")
            target.replace(content)
            return
        try:
            with _reported(self, f"become {target}"):
                with open(self.path, "r+b") as file:  # never made anew
                    file.truncate()
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(self.path, target.path)
                _sync_directory(posixpath.dirname(target.path))
        except (NotFoundError, StorageError) as failure:
            # On a network file system the rename may succeed although its answer is lost.
            if not target._holds(content):
                raise
            get_default_logger().warning("%s is there, although: %s", target, failure)

    def link(self, other: Location) -> None:
        """Makes `other`, replacing it, a second name or a copy of this file, in one step."""
        if not self.is_local:
            self._try("be copied", lambda: self.file_system.cp_file(self.path, other.path))
            return
        # A link cannot replace a file, a rename can.
        temporary = f"{other.path}.{secrets.token_hex(4)}.tmp"
        with _reported(other, _BE_WRITTEN):
            try:
                os.link(self.path, temporary)
            except OSError:  # some file systems have no hard links
                self.file_system.cp_file(self.path, temporary)
            os.replace(temporary, other.path)

    def remove(self) -> None:
        """The file, or the directory with all in it; nothing when there is none."""
        self._forget_listings()
        with contextlib.suppress(NotFoundError):
            self._try("be removed", lambda: self.file_system.rm(self.path, recursive=True))

    def remove_quietly(self) -> None:
        """For cleaning up after an error, which is the one to show."""
        try:
            self.remove()
        except StorageError as failure:
            get_default_logger().warning("leftovers of a checkpoint stay behind: %s", failure)

    # ---- private

    def _read_range(self, start: int, length: int) -> bytes:
        if not isinstance(self.file_system, ArrowFSWrapper):  # HDFS; its `cat_file` reads no ranges
            return bytes(self.file_system.cat_file(self.path, start=start, end=start + length))
        with self.file_system.open(self.path, "rb", seekable=True) as file:
            file.seek(start)
            return bytes(file.read(length))

    def _replace_locally(self, content: bytes) -> None:
        # Beside this file: a rename is one step only within a file system.
        temporary = Location(self.file_system, f"{self.path}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.create() as file:
                file.write(content)
            with _reported(self, _BE_WRITTEN):
                os.replace(temporary.path, self.path)
                _sync_directory(posixpath.dirname(self.path))
        except BaseException:
            temporary.remove_quietly()
            raise

    def _holds(self, content: bytes) -> bool:
        try:
            return self.read_replaced(max_bytes=len(content)) == content
        except (NotFoundError, StorageError):
            return False

    def _replace_remotely(self, content: bytes) -> None:
        fs, path, successor = self.file_system, self.path, self.path + _NEXT
        if _has_whole_writes(fs):
            fs.pipe_file(path, content)
            return
        # HDFS and the like rename over no file: while there is none, `read_replaced` takes the successor.
        fs.makedirs(posixpath.dirname(path), exist_ok=True)
        fs.pipe_file(f"{successor}.tmp", content)
        if fs.exists(successor):  # another process crashed within its swap: finish it, or undo it
            if fs.exists(path):
                fs.rm_file(successor)
            else:
                fs.mv(successor, path)
        fs.mv(f"{successor}.tmp", successor)
        if fs.exists(path):
            fs.rm_file(path)
        fs.mv(successor, path)

    def _try(self, what: str, action: Callable[[], _T]) -> _T:
        """Repeats an action that may be repeated, with growing pauses, while that may help."""
        # Not by Attempts, where the time of a try is part of the pause: a service that is overloaded answers
        # late.
        for pause_s in (*_PAUSES_S, None):
            try:
                with _reported(self, what):
                    return action()
            except StorageError as failure:
                cause = failure.__cause__
                is_final = isinstance(cause, OSError) and cause.errno in _FINAL
                if pause_s is None or is_final or isinstance(cause, _FINAL_ERRORS):
                    raise
                get_default_logger().warning("%s; trying again in %.1f s", failure, pause_s)
            # Random: servers that failed at the same moment must not all try again at the same moment.
            time.sleep(pause_s * random.uniform(0.5, 1.5))
        raise AssertionError("the last try returns or raises")

    def _discard(self, file: Any) -> None:
        # A started upload is ended rather than completed: nothing must appear under the name.
        with contextlib.suppress(Exception):
            if hasattr(file, "discard") and not self.is_local:
                file.discard()
                file.closed = True
            else:
                file.close()
        self.remove_quietly()

    def _forget_listings(self) -> None:
        # Other processes write there, too.
        self.file_system.invalidate_cache()


def _protocols(file_system: Any) -> tuple[str, ...]:
    protocol = file_system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _has_whole_writes(file_system: Any) -> bool:
    return not _WHOLE_WRITES.isdisjoint(_protocols(file_system))


@contextlib.contextmanager
def _reported(location: Location, what: str) -> Iterator[None]:
    try:
        yield
    except PersiaError:  # of a block that writes a file; some are an OSError, too
        raise
    except Exception as failure:
        if isinstance(failure, FileNotFoundError) and what != _BE_WRITTEN:
            raise NotFoundError(f"{location} does not exist: check the checkpoint's location") from failure
        is_client_error = any(kind.__name__ in _CLIENT_ERRORS for kind in type(failure).__mro__)
        if not isinstance(failure, OSError) and not is_client_error:
            raise
        raise StorageError(f"{location} could not {what}: {_advice(failure)}") from failure


def _advice(failure: Exception) -> str:
    text = f"{failure or type(failure).__name__}"
    if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{text}; make room, or dump to another place"
    if isinstance(failure, FileNotFoundError):
        return f"{text}; is there such a directory or bucket?"
    return text


def _sync_directory(path: str) -> None:
    """A rename survives a power failure only when its directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
