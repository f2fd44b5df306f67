"""The pool of one server on its device: whose it is, and which checkpoints of the job its rows are of.

The rows of a job lie in as many pools as it has servers. Each pool is committed by itself, and yet all have
to go back to one checkpoint. So servers only *prepare* a checkpoint; it counts from the moment on at which
its manifest, replaced in one step, names it (or `latest` that manifest, of several); and then every server
commits. A server that has ended in between does what these say when it starts again; before it gives a
checkpoint up, it sees to it that it cannot count later. docs/adr/0018 has the reasons.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import AfterValidator, StrictBool

from persia._version import __version__
from persia.checkpoint.document import decode_document, encode_document
from persia.checkpoint.manifest import Manifest
from persia.checkpoint.schema import RowSchema
from persia.checkpoint.storage import Location
from persia.checkpoint.versions import is_latest
from persia.config import StorageConfig
from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    NotFoundError,
    PersiaError,
    StorageError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.validation import Count, complaint, read_document, to_json

if TYPE_CHECKING:
    from persia._native import TierOptions

__all__ = ["IN_PLACE_NAME", "PoolCheckpoint", "ServerPool", "TierStore"]

# In a dump's folder, from its beginning on. Servers see by it that their directory is the coordinator's, and
# the file that makes the dump count is made of it: who removes it keeps the dump from counting.
IN_PLACE_NAME = "in_place"

_STATE_NAME = "server.json"
_FORMAT = "pool of a persia server"
_MAX_STATE_BYTES = 16 << 20
_PREPARED_KEYS = ("batch", "num_rows", "pool_id", "sequence")


class TierStore(Protocol):
    """What is needed of the native module: a ParameterServer or EmbeddedClient with a tier."""

    def tier_stats(self) -> dict[str, int] | None: ...

    def request_checkpoint(self) -> int: ...

    def prepared_checkpoint(self, number: int) -> dict[str, int] | None: ...

    def commit_checkpoint(self, number: int) -> None: ...

    def drop_checkpoint(self, number: int) -> None: ...


def _check_prepared(prepared: Mapping[str, int]) -> Mapping[str, int]:
    if missing := [key for key in _PREPARED_KEYS if key not in prepared]:
        raise complaint(f"must have {', '.join(missing)}")
    return prepared


@dataclass(frozen=True, kw_only=True)
class PoolCheckpoint:
    """A checkpoint of the job, in this server's pool."""

    operation: str  # the dump that made it; the manifest's name for the rows
    directory: str  # of the manifest
    step: Count | None = None  # of the training loop
    prepared: Annotated[
        Mapping[str, Count], AfterValidator(_check_prepared)
    ]  # of the pool: its number ("batch"), its rows
    needs_latest: StrictBool = False  # its manifest counts once `latest`, beside its directory, names that

    @property
    def number(self) -> int:
        return self.prepared["batch"]

    @property
    def num_rows(self) -> int:
        return self.prepared["num_rows"]

    def decide(self) -> bool:
        """Whether it counts. If not, it never will: without the file that the last step is made of, its
        coordinator cannot take that any more. StorageError: what tells cannot be read, or that file not be
        removed.
        """
        if self._is_named():
            return True
        (Location.of(self.directory) / self.operation / IN_PLACE_NAME).remove()
        return self._is_named()  # by a coordinator that was faster

    def _is_named(self) -> bool:
        """By its manifest, and that by `latest` where it has to be."""
        place = Location.of(self.directory)
        try:
            section = Manifest.read(place)[0].embeddings
        except NotFoundError as failure:
            if place.is_local and not os.path.isdir(place.path):
                raise StorageError(
                    f"{place} is no directory of this machine, and says whether {self.operation} counts: "
                    "mount it; an empty directory of that name says that it does not"
                ) from failure
            return False
        except CorruptionError:
            return False  # nobody can load it
        if section is None or not section.in_place or section.dump_id != self.operation:
            return False
        return is_latest(place) or not self.needs_latest


@dataclass(frozen=True, kw_only=True)
class _State:
    """What stands in the file beside the pool."""

    index: Count
    replicas: Count
    schema: RowSchema | None = None  # None: the server was never started with an embedding config
    committed: PoolCheckpoint | None = None
    prepared: PoolCheckpoint | None = None  # of which this server does not know whether it counts
    created_by: str = f"persia {__version__}"

    def encode(self) -> bytes:
        return encode_document(_FORMAT, to_json(self))

    @classmethod
    def decode(cls, content: bytes, what: str) -> _State:
        return read_document(cls, decode_document(content, what, form=_FORMAT), what)


class ServerPool:
    """A server's folder below `storage.path`, which no other process uses meanwhile. Not thread-safe."""

    def __init__(
        self,
        storage: StorageConfig,
        *,
        index: int,
        replicas: int,
        schema: RowSchema | None,
        num_threads: int,
    ) -> None:
        """Makes the folder where there is none; the store makes the pool. To be closed.

        NotFoundError: `storage.path` is no directory; UnavailableError: another process has the folder;
        FailedPreconditionError: its rows are those of another server, or of other slots; StorageError:
        whether its last checkpoint counts cannot be read.
        """
        self._storage, self._num_threads = storage, num_threads
        self._store: TierStore | None = None
        self.folder = _folder(storage, index)
        self._lock = _locked(self.folder)
        try:
            self._file = Location.of(self.folder / _STATE_NAME)
            self._state = self._read(_State(index=index, replicas=replicas, schema=schema))
            self._settle_closed()
            self._write(self._state)
        except BaseException:
            self.close()
            raise

    @property
    def tier_options(self) -> TierOptions:
        """For the store of this server."""
        from persia._native import TierOptions

        storage = self._storage
        return TierOptions(
            directory=str(self.folder),
            kind=storage.kind,
            # A pool that was made, or grown, larger than the configuration says stays so.
            size_bytes=max(storage.size_bytes, _size_of(self.folder) if self._has_rows else 0),
            cache_rows=storage.num_cache_rows,
            cache_bytes=storage.cache_bytes or 0,
            syncs=storage.syncs,
            num_threads=self._num_threads,
        )

    def attach(self, store: TierStore) -> None:
        """The store that was opened with `tier_options`."""
        self._store = store
        stats, checkpoint = self.stats(), self.checkpoint()
        if checkpoint is None:
            get_default_logger().info("rows are in %s; it has no checkpoint yet", self.folder)
            return
        get_default_logger().info(
            "%d rows recovered from %s: step %s, %s in %s",
            stats["num_rows"],
            self.folder,
            "unknown" if checkpoint.step is None else checkpoint.step,
            checkpoint.operation,
            checkpoint.directory,
        )

    @property
    def _has_rows(self) -> bool:
        return (self.folder / "rows.pool").exists()

    @property
    def store(self) -> TierStore:
        assert self._store is not None, "attached when the server starts"
        return self._store

    def stats(self) -> dict[str, int]:
        stats = self.store.tier_stats()
        assert stats is not None, "the store was opened with a tier"
        return stats

    def status(self) -> dict[str, Any]:
        """For people: the store's counts, and what the rows go back to."""
        checkpoint = self.checkpoint()
        return {
            **self.stats(),
            "step": None if checkpoint is None else checkpoint.step,
            "checkpoint": None if checkpoint is None else checkpoint.operation,
        }

    def checkpoint(self) -> PoolCheckpoint | None:
        """The one that the rows go back to when the server is started again."""
        committed = self.stats()["committed"]
        known = (self._state.prepared, self._state.committed)
        return next((one for one in known if one is not None and one.number == committed), None)

    def prepare(self, checkpoint: PoolCheckpoint) -> None:
        """From now on the checkpoint's manifest says whether it counts."""
        self._write(replace(self._state, prepared=checkpoint))

    def finish(self, *, commit: bool) -> None:
        """Commits what was prepared, or gives it up; nothing where nothing was."""
        prepared = self._state.prepared
        if prepared is None:
            return
        if commit:
            self.store.commit_checkpoint(prepared.number)
            self._write(replace(self._state, committed=prepared, prepared=None))
            return
        with contextlib.suppress(FailedPreconditionError):  # gone with all rows, when they were cleared
            self.store.drop_checkpoint(prepared.number)
        self._write(replace(self._state, prepared=None))

    def settle(self) -> None:
        """Finishes what a coordinator has left open. StorageError: whether it counts cannot be read."""
        prepared = self._state.prepared
        if prepared is None:
            return
        if self.stats()["committed"] == prepared.number:  # and only the state could not be written
            self._write(replace(self._state, committed=prepared, prepared=None))
            return
        counts = prepared.decide()
        try:
            self.finish(commit=counts)
        except FailedPreconditionError as failure:  # the rows were cleared, or loaded, since
            _warn_lost(failure)
            self._write(replace(self._state, prepared=None))

    def close(self) -> None:
        """Leaves the folder to others; the store has to be gone, too. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read(self, wanted: _State) -> _State:
        try:
            content = self._file.read(max_bytes=_MAX_STATE_BYTES)
        except NotFoundError:
            if self._has_rows:
                raise FailedPreconditionError(
                    f"{self.folder} has a pool and no {_STATE_NAME}, which says whose rows they are: give "
                    "another storage.path, or remove the pool"
                ) from None
            return wanted
        try:
            found = _State.decode(content, str(self._file))
        except CorruptionError as failure:
            raise CorruptionError(
                f"{failure}; if it is damaged, remove the folder {self.folder}, and load a checkpoint from "
                "files"
            ) from failure
        if (found.index, found.replicas) != (wanted.index, wanted.replicas):
            raise FailedPreconditionError(
                f"{self.folder} has the rows of server {found.index} of {found.replicas}, and this is server "
                f"{wanted.index} of {wanted.replicas}: rows are divided among the servers, so start as many "
                "as before; for another number dump the rows to files first, give another storage.path and "
                "load them there"
            )
        if found.schema is not None and wanted.schema is not None:
            try:
                changes = found.schema.changes_to(wanted.schema)
            except FailedPreconditionError as failure:
                raise FailedPreconditionError(f"the pool in {self.folder}: {failure}") from failure
            if changes:
                get_default_logger().warning("%s: %s since its rows were made", self.folder, changes)
        return replace(found, schema=wanted.schema or found.schema)

    def _settle_closed(self) -> None:
        """`settle` before the pool is opened: that would undo what is not committed."""
        prepared = self._state.prepared
        if prepared is None:
            return
        if not self._has_rows:
            get_default_logger().warning("the pool in %s is gone, with all its rows", self.folder)
            prepared.decide()  # what does not count yet must not any more
            self._state = replace(self._state, committed=None, prepared=None)
            return
        from persia._native import commit_pool, inspect_pool

        committed = inspect_pool(str(self.folder))["committed"] == prepared.number
        if not committed and prepared.decide():
            try:
                commit_pool(str(self.folder), **prepared.prepared)
                committed = True
            except FailedPreconditionError as failure:
                _warn_lost(failure)
        last = prepared if committed else self._state.committed
        self._state = replace(self._state, committed=last, prepared=None)

    def _write(self, state: _State) -> None:
        self._file.replace(state.encode())
        self._state = state


def _warn_lost(failure: PersiaError) -> None:
    # As text: who keeps the log record would keep frames, and the store.
    get_default_logger().warning("a checkpoint of the job is lost: %s", str(failure))


def _folder(storage: StorageConfig, index: int) -> Path:
    assert storage.path is not None, "checked by StorageConfig"
    root = Path(storage.path).absolute()
    if not root.is_dir():
        raise NotFoundError(
            f"embedding_parameter_server_config.storage.path={storage.path} is no directory of this machine: "
            "mount the device, or make the directory"
        )
    folder = root / f"server-{index}"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as failure:
        raise StorageError(f"{folder} could not be made: {failure}") from failure
    return folder


def _locked(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failure:
        os.close(handle)
        raise UnavailableError(
            f"{folder} is in use by another process: stop it, or give each server its own --replica-index"
        ) from failure
    return handle


def _size_of(folder: Path) -> int:
    from persia._native import inspect_pool

    size: int = inspect_pool(str(folder))["size_bytes"]
    return size
