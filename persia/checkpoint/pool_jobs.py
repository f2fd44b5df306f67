"""Dumps and loads whose rows stay where they are, in the servers' pools (server_pool.py)."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from pydantic import StrictBool

from persia.checkpoint.manifest import is_dump_id
from persia.checkpoint.server_job import ServerShare, TwoPhaseJob
from persia.checkpoint.server_pool import IN_PLACE_NAME, PoolCheckpoint, ServerPool
from persia.checkpoint.storage import Location
from persia.errors import FailedPreconditionError, InvalidArgumentError, PersiaError, StorageError
from persia.logger import get_default_logger
from persia.validation import Count, read_document, to_json

__all__ = ["PoolDumpJob", "PoolLoadJob"]

_WHAT = "checkpoint request"
_FIRST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.25


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


class PoolDumpJob(TwoPhaseJob):
    """Notes a checkpoint of a server's pool, and commits it once the job's manifest names it."""

    _kind = "dump"

    def __init__(self, operation: str, share: ServerShare, lease_s: float, arguments: dict[str, Any]) -> None:
        """`arguments`: those of `_Dump`. Small rows stay: to look for them all rows would be read, while the
        job waits for its answer.
        """
        super().__init__(operation, share, lease_s)
        if not is_dump_id(operation):
            raise InvalidArgumentError(f"{_WHAT}: {operation!r:.80} is not the name of a dump")
        self._pool = _required_pool(share, "in_place=True")
        self._dump = read_document(_Dump, arguments, _WHAT)
        self._directory = Location.of(self._dump.directory)
        self._pool.settle()
        self._num_rows = 0
        self._number = self._pool.store.request_checkpoint()

    def _work(self) -> None:
        self._require_directory()
        checkpoint = PoolCheckpoint(
            operation=self.operation,
            directory=str(self._directory),
            step=self._dump.step,
            prepared=self._await_prepared(),
            needs_latest=self._dump.needs_latest,
        )
        self._num_rows = checkpoint.num_rows
        self._pool.prepare(checkpoint)
        self._await_apply()
        self._pool.finish(commit=True)

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
                f"{failure}: servers with pools must be able to write and to remove files in the directory "
                f"of a checkpoint in place, {self._directory}: give the server's user that right, if it is "
                "this that fails"
            ) from failure

    def _await_prepared(self) -> dict[str, int]:
        """Until all rows of the checkpoint are in the pool; raises what keeps them out."""
        pause_s, written = _FIRST_LOOK_S, self._pool.stats()["num_written"]
        while True:
            self._check_alive()
            prepared = self._pool.store.prepared_checkpoint(self._number)
            if prepared is not None:
                return prepared
            now = self._pool.stats()["num_written"]
            self._count_rows(now - written)
            self._count_bytes(now - written)  # rows do for bytes: the coordinator sees that something moves
            written = now
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _clean_up(self) -> None:
        if self._is_closing:
            return  # the manifest may name it any moment: what was prepared waits for the next start
        try:
            self._pool.settle()  # what was prepared may count all the same: its coordinator may be gone
        except PersiaError as failure:
            get_default_logger().warning("%s stays undecided: %s", self.operation, failure)
            return
        with contextlib.suppress(FailedPreconditionError):  # it was settled, or cleared with all rows
            self._pool.store.drop_checkpoint(self._number)

    def _release(self) -> None:
        """The store was never held."""

    def _total_rows(self) -> int:
        return self._num_rows

    def _result(self) -> dict[str, Any]:
        schema = self._share.schema
        return {
            "step": self._number,
            "num_rows": self._num_rows,
            "schema": None if schema is None else to_json(schema),
        }


class PoolLoadJob(TwoPhaseJob):
    """Checks that the rows of a server are those of a checkpoint in its pool. Then nothing is moved."""

    _kind = "load"

    def __init__(self, operation: str, share: ServerShare, lease_s: float, arguments: dict[str, Any]) -> None:
        """`arguments`: those of `_Load`."""
        super().__init__(operation, share, lease_s)
        self._pool = _required_pool(share, "a checkpoint whose rows are in the pools of servers")
        self._wanted = read_document(_Load, arguments, _WHAT).in_place
        self._num_rows = 0

    def _work(self) -> None:
        self._pool.settle()
        checkpoint, stats = self._pool.checkpoint(), self._pool.stats()
        if checkpoint is None or checkpoint.operation != self._wanted:
            has = "none" if checkpoint is None else f"{_described(checkpoint)}"
            raise FailedPreconditionError(
                f"the pool {self._pool.folder} goes back to another checkpoint than {self._wanted}: it has "
                f"{has}; load the newest one, or one that was dumped to files"
            )
        if stats["batch"] != stats["committed"] + 1:
            raise FailedPreconditionError(
                f"this server has trained on since {self._wanted} (step {checkpoint.step}), to which only a "
                "start takes its rows back: start all parameter servers again, then load"
            )
        self._num_rows = checkpoint.num_rows
        self._await_apply()

    def _clean_up(self) -> None:
        """Nothing was changed."""

    def _release(self) -> None:
        """The store was never held."""

    def _total_rows(self) -> int:
        return self._num_rows


def _described(checkpoint: PoolCheckpoint) -> str:
    return f"{checkpoint.operation} (step {checkpoint.step}) of {checkpoint.directory}"


def _required_pool(share: ServerShare, what: str) -> ServerPool:
    if share.pool is None:
        raise InvalidArgumentError(
            f"{what} is asked for, and the rows of this server are in memory alone: set "
            "embedding_parameter_server_config.storage in its global config, or dump to files"
        )
    return share.pool
