"""The storage tier of one server: whose it is, and which checkpoints of the job its rows belong to.

A job has as many tier files as servers. Each file is committed by itself, and yet all servers must restart
from the same checkpoint. So servers only *prepare* a checkpoint. The coordinator commits it by replacing the
manifest in one step (or `latest`, among several checkpoints), and then every server commits its file. A
server that ended in between reads at its next start what the manifest says. Before it gives a checkpoint up,
it makes sure that no coordinator can commit it later. docs/adr/0018 has the reasons.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import StrictBool

from persia.checkpoint.protocol import IN_PLACE_NAME, Request, Verb
from persia.checkpoint.server_job import ServerJob, ServerShare, require_dump_id
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
from persia.storage.location import Location
from persia.storage.schema import RowSchema
from persia.tiers.commit_record import TierCheckpoint, TierState
from persia.validation import Count, to_json
from persia.waiting import Attempts

if TYPE_CHECKING:
    from persia._native import EmbeddingStore, TierOptions

_STATE_NAME = "server.json"
_MAX_STATE_BYTES = 16 << 20
# A small checkpoint is prepared in milliseconds, while training waits; a large one takes minutes.
_FIRST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.25


class ServerTier:
    """A server's folder below `storage.path`, locked against other processes. Not thread-safe."""

    def __init__(
        self,
        storage: StorageConfig,
        *,
        index: int,
        replicas: int,
        schema: RowSchema | None,
        num_threads: int,
    ) -> None:
        """Makes the folder if there is none; the store makes the tier file. To be closed.

        NotFoundError: `storage.path` is no directory; UnavailableError: another process has the folder;
        FailedPreconditionError: its rows are those of another server, or of other slots; StorageError:
        the storage does not tell whether its last checkpoint is committed.
        """
        self._storage, self._num_threads = storage, num_threads
        self._store: EmbeddingStore | None = None
        self.folder = _folder(storage, index)
        # Before anything is read: another process may be writing it.
        self._lock = _locked(self.folder)
        try:
            self._file = Location.of(self.folder / _STATE_NAME)
            self._state = self._read(TierState(index=index, replicas=replicas, schema=schema))
            self.settle()
            self._write(self._state)
        except BaseException:
            self.close()
            raise

    @property
    def tier_options(self) -> TierOptions:
        """For the store of this server."""
        from persia._native import TierOptions, inspect_pool

        storage = self._storage
        size_bytes = inspect_pool(str(self.folder))["size_bytes"] if self._has_rows else 0
        return TierOptions(
            directory=str(self.folder),
            kind=storage.kind,
            # A tier file that was made, or grown, larger than the configuration says stays so.
            size_bytes=max(storage.size_bytes, size_bytes),
            cache_rows=storage.num_cache_rows,
            cache_bytes=storage.cache_bytes or 0,
            syncs=storage.syncs,
            num_threads=self._num_threads,
        )

    def attach(self, store: EmbeddingStore) -> None:
        """The store that was opened with `tier_options`."""
        self._store = store
        stats, checkpoint = self.stats(), self.checkpoint()
        if checkpoint is None:
            get_default_logger().info("rows are in %s; it has no checkpoint yet", self.folder)
            return
        get_default_logger().info("%d rows recovered from %s: %s", stats["num_rows"], self.folder, checkpoint)

    @property
    def _has_rows(self) -> bool:
        return (self.folder / "rows.pool").exists()

    @property
    def store(self) -> EmbeddingStore:
        assert self._store is not None, "attached when the server starts"
        return self._store

    def stats(self) -> dict[str, int]:
        stats = self.store.tier_stats()
        assert stats is not None, "the store was opened with a tier"
        return stats

    def status(self) -> dict[str, Any]:
        """For people: the store's counts, and the checkpoint that a restart begins with."""
        checkpoint = self.checkpoint()
        return {
            **self.stats(),
            "step": None if checkpoint is None else checkpoint.step,
            "checkpoint": None if checkpoint is None else checkpoint.operation,
        }

    def make_job(self, request: Request, share: ServerShare, lease_s: float) -> ServerJob:
        """A dump or a load whose rows stay in the tier."""
        kind = TierDumpJob if request.verb is Verb.DUMP else TierLoadJob
        return kind(request, share, lease_s, self)

    def checkpoint(self) -> TierCheckpoint | None:
        """The checkpoint whose rows the server has after a restart."""
        # By the tier file, as the state may be older: it is written after the commit.
        committed = self.stats()["committed"]
        known = (self._state.prepared, self._state.committed)
        return next((one for one in known if one is not None and one.number == committed), None)

    def prepare(self, checkpoint: TierCheckpoint) -> None:
        """Records that the manifest decides from now on whether the checkpoint is committed."""
        # Before the server reports it: the coordinator may commit as soon as it has the report.
        self._write(replace(self._state, prepared=checkpoint))

    def finish(self, *, commit: bool) -> None:
        """Commits the prepared checkpoint, if there is one, or gives it up. FailedPreconditionError: its rows
        were cleared, or replaced by a load, since.
        """
        prepared = self._state.prepared
        if prepared is None:
            return
        if commit:
            self._commit(prepared)
        elif self._store is not None:  # opening the tier file undoes what is not committed
            with contextlib.suppress(FailedPreconditionError):  # gone with all rows, when they were cleared
                self._store.drop_checkpoint(prepared.number)
        committed = prepared if commit else self._state.committed
        self._write(replace(self._state, committed=committed, prepared=None))

    def settle(self) -> None:
        """Decides a checkpoint that a coordinator has left open, before the store is opened or later.
        StorageError: what tells cannot be read.
        """
        prepared = self._state.prepared
        if prepared is None:
            return
        if self._store is None and not self._has_rows:
            get_default_logger().warning("the tier file in %s is gone, with all its rows", self.folder)
            # Without its rows the checkpoint is incomplete: the coordinator must not commit it later.
            prepared.decide()
            self._write(replace(self._state, committed=None, prepared=None))
            return
        # Outside of the `try`: a tier file of another version is no lost checkpoint, and must stay as it is.
        commit = self._is_committed(prepared) or prepared.decide()
        try:
            self.finish(commit=commit)
        except FailedPreconditionError as failure:
            # As text: who keeps the log record would keep frames, and the store.
            get_default_logger().warning("a checkpoint of the job is lost: %s", str(failure))
            self._write(replace(self._state, prepared=None))

    def _is_committed(self, checkpoint: TierCheckpoint) -> bool:
        """Whether the tier file has it, and at most this server's state could not be written."""
        from persia._native import inspect_pool

        stats = inspect_pool(str(self.folder)) if self._store is None else self.stats()
        return bool(stats["committed"] == checkpoint.number)

    def _commit(self, checkpoint: TierCheckpoint) -> None:
        from persia._native import commit_pool

        if self._is_committed(checkpoint):
            return
        if self._store is None:
            commit_pool(str(self.folder), **checkpoint.prepared)
        else:
            self._store.commit_checkpoint(checkpoint.number)

    def close(self) -> None:
        """Unlocks the folder for other processes, after the store is gone. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read(self, wanted: TierState) -> TierState:
        try:
            content = self._file.read(max_bytes=_MAX_STATE_BYTES)
        except NotFoundError:
            if self._has_rows:
                raise FailedPreconditionError(
                    f"{self.folder} has a tier file and no {_STATE_NAME}, which says whose rows they are: "
                    "give another storage.path, or remove the folder"
                ) from None
            return wanted
        try:
            found = TierState.decode(content, str(self._file))
        except CorruptionError as failure:
            raise CorruptionError(
                f"{failure}; if it is damaged, remove the folder {self.folder}, and load a checkpoint from "
                "files"
            ) from failure
        # Virtual shards are divided by the number of servers: another number would look for rows elsewhere.
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
                raise FailedPreconditionError(f"the tier file in {self.folder}: {failure}") from failure
            if changes:
                get_default_logger().warning("%s: %s since its rows were made", self.folder, changes)
        return replace(found, schema=wanted.schema or found.schema)

    def _write(self, state: TierState) -> None:
        self._file.replace(state.encode())
        self._state = state


def _folder(storage: StorageConfig, index: int) -> Path:
    assert storage.path is not None, "checked by StorageConfig"
    root = Path(storage.path).absolute()
    if not root.is_dir():
        raise NotFoundError(
            f"embedding_parameter_server_config.storage.path={storage.path} is no directory of this machine: "
            "mount the device, or make the directory"
        )
    # One for each server: those of a machine have the same `storage.path`.
    folder = root / f"server-{index}"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as failure:
        raise StorageError(f"{folder} could not be made: {failure}") from failure
    return folder


def _locked(folder: Path) -> int:
    # A lock of the open folder: it ends with the process, however that ends, and leaves no file behind.
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failure:
        os.close(handle)
        raise UnavailableError(
            f"{folder} is in use by another process: stop it, or give each server its own --replica-index"
        ) from failure
    return handle


@dataclass(frozen=True)
class _Dump:
    """Arguments of a dump."""

    directory: str  # URL of the manifest
    step: Count | None = None  # of the training loop
    needs_latest: StrictBool = False


@dataclass(frozen=True)
class _Load:
    """Arguments of a load."""

    in_place: str  # the dump that made the checkpoint


class TierDumpJob(ServerJob):
    """Prepares a checkpoint in a server's tier, and commits it once the job's manifest names it."""

    _kind = "dump"

    def __init__(self, request: Request, share: ServerShare, lease_s: float, tier: ServerTier) -> None:
        """Keeps small rows: to find them, all rows would be read while the job waits for the answer."""
        super().__init__(request, share, lease_s)
        require_dump_id(request)
        self._tier = tier
        self._dump = request.read(_Dump)
        self._directory = Location.of(self._dump.directory)
        self._tier.settle()  # at most one checkpoint may be undecided: the state has room for one
        self._number = self._tier.store.request_checkpoint()

    def _work(self) -> None:
        self._require_directory()
        checkpoint = TierCheckpoint(
            operation=self.operation,
            directory=str(self._directory),
            step=self._dump.step,
            prepared=self._await_prepared(),
            needs_latest=self._dump.needs_latest,
        )
        self._total_rows = checkpoint.num_rows
        # From `prepare` on, only the manifest decides: this job may not give the rows up by itself.
        self._tier.prepare(checkpoint)
        self._await_apply()
        self._tier.finish(commit=True)

    def _require_directory(self) -> None:
        marker = self._directory / self.operation / IN_PLACE_NAME
        if not marker.exists():
            raise StorageError(
                f"{marker} was written, and this server cannot see it: the directory of a checkpoint in "
                f"place, {self._directory}, has to be one that all servers read, on a shared file system or "
                "in a storage service"
            )
        # To give the checkpoint up, this server removes the marker.
        probe = self._directory / self.operation / f"server-{self._share.index}"
        try:
            with probe.create():
                pass
            probe.remove()
        except StorageError as failure:
            raise StorageError(
                f"{failure}: servers with storage tiers must be able to write and to remove files in the "
                f"directory of a checkpoint in place, {self._directory}: check the rights of its user"
            ) from failure

    def _await_prepared(self) -> dict[str, int]:
        """Waits until all rows of the checkpoint are in the tier; raises what keeps them out."""
        written = self._tier.stats()["num_written"]
        # No timeout of its own: the coordinator sees that nothing is written, and cancels.
        for _ in Attempts(math.inf, pause_s=_FIRST_LOOK_S, longest_pause_s=_LONGEST_LOOK_S):
            self._check_alive()
            prepared = self._tier.store.prepared_checkpoint(self._number)
            if prepared is not None:
                return prepared
            now = self._tier.stats()["num_written"]
            self._count_rows(now - written)
            self._count_bytes(now - written)  # rows count as bytes, so that the coordinator sees progress
            written = now
        raise AssertionError("attempts end with a timeout")

    def _clean_up(self) -> None:
        if self._is_closing:
            return  # the coordinator may commit it at any moment: the next start decides
        try:
            self._tier.settle()  # the coordinator may have committed it before it ended
        except PersiaError as failure:
            get_default_logger().warning("%s stays undecided: %s", self.operation, failure)
            return
        with contextlib.suppress(FailedPreconditionError):  # it was settled, or cleared with all rows
            self._tier.store.drop_checkpoint(self._number)

    def _result(self) -> dict[str, Any]:
        schema = self._share.schema
        return {
            "step": self._number,
            "num_rows": self._total_rows,
            "schema": None if schema is None else to_json(schema),
        }


class TierLoadJob(ServerJob):
    """Checks that the rows of a server are those of a checkpoint in its tier. No row is moved."""

    _kind = "load"

    def __init__(self, request: Request, share: ServerShare, lease_s: float, tier: ServerTier) -> None:
        super().__init__(request, share, lease_s)
        self._tier = tier
        self._wanted = request.read(_Load).in_place

    def _work(self) -> None:
        self._tier.settle()
        checkpoint, stats = self._tier.checkpoint(), self._tier.stats()
        if checkpoint is None or checkpoint.operation != self._wanted:
            has = "none" if checkpoint is None else str(checkpoint)
            raise FailedPreconditionError(
                f"the tier in {self._tier.folder} goes back to another checkpoint than {self._wanted}: it "
                f"has {has}; load the newest one, or one that was dumped to files"
            )
        # Updates since the commit are only undone when the tier file is opened.
        if stats["batch"] != stats["committed"] + 1:
            raise FailedPreconditionError(
                f"this server has trained on since {self._wanted} (step {checkpoint.step}), to which only a "
                "start takes its rows back: start all parameter servers again, then load"
            )
        self._total_rows = checkpoint.num_rows
        self._await_apply()
