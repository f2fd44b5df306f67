"""A dump or a load of one server: a thread that writes or reads files, and its progress.

An operation lives as long as its coordinator asks about it. After `lease_s` without a question it ends by
itself, releases the store, and removes what it has written.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import StrictBool

from persia.checkpoint.protocol import Report, Request, State
from persia.config import CheckpointingConfig, GlobalConfig
from persia.errors import (
    CorruptionError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PersiaError,
)
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool, lower_priority
from persia.observability.checkpointing import CheckpointLog
from persia.storage.location import Location
from persia.storage.manifest import NUM_VIRTUAL_SHARDS, FileEntry, Manifest, is_dump_id
from persia.storage.schema import RowSchema
from persia.storage.shard_file import Chunk, ShardFile, write_shard_file
from persia.validation import Hex, to_json

if TYPE_CHECKING:
    from persia._native import CheckpointLoader, EmbeddingStore, Snapshot

_CANCELLED = "it was cancelled"
_STOP_S = 5.0

_LEAST = 0.05  # of a processor: a slower dump would exceed the coordinator's deadline for progress
# The CPU limit of a container: "microseconds period", or "max period" ...
_CGROUP_V2 = ("cpu.max",)
# ... and of version 1; microseconds below zero are no limit.
_CGROUP_V1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
_CGROUPS = Path("/sys/fs/cgroup")


class JobMaker(Protocol):
    """A feature of a server that has its own kinds of operations: its tier, or its changes."""

    def make_job(self, request: Request, share: ServerShare, lease_s: float) -> ServerJob:
        """The operation that `request` begins."""


@dataclass(frozen=True, kw_only=True)
class ServerShare:
    """A server and its place in the job."""

    store: EmbeddingStore
    index: int
    replicas: int
    schema: RowSchema | None  # None: it was started without an embedding config
    num_threads: int  # files that are written, or read, at the same time
    moved_shards: Callable[[], Iterable[tuple[int, int]]] = tuple  # the placement of its generation
    generation: int = 0  # how often the number of servers was changed before it (ADR 34)
    # Whether dumps run at a lower priority: in a server. Not in a process that trains: a nice thread
    # that is preempted while it holds the GIL keeps the training waiting for it.
    lowers_priority: bool = False
    dump_percent: int = CheckpointingConfig().dump_percent  # CPU share of dumps while rows are trained
    log: CheckpointLog = field(default_factory=CheckpointLog)
    tier: JobMaker | None = None  # makes jobs whose rows stay in it; None: rows are in memory alone

    # By the same rule as the workers' routing: a load with another rule would put rows where no lookup asks.
    def owns(self, shards: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which virtual shards are this server's: a `ShardFilter`."""
        owners = np.arange(NUM_VIRTUAL_SHARDS) % self.replicas
        for shard, server in self.moved_shards():
            owners[shard] = server
        owned: NDArray[np.bool_] = owners[shards] == self.index
        return owned


class ServerJob(ABC):
    """One operation on one server. Thread-safe.

    A job with two phases waits in between, until all other servers have done their part (`_await_apply`).
    """

    _kind: str  # in metrics
    is_packet = False  # the operation belongs to a stream of packets

    def __init__(self, request: Request, share: ServerShare, lease_s: float) -> None:
        """Begins what cannot wait, as a snapshot; `start` begins the rest. Raises what refuses `request`."""
        self.operation = request.operation
        self._share = share
        self._lease_s = lease_s
        self._began = self._last_asked = time.monotonic()
        self._changed = threading.Condition()
        self._state = State.RUNNING
        self._error: PersiaError | None = None
        self._cancelled = False
        self._is_closing = False
        self._may_end = True
        self._wants_apply = False
        self._done_bytes = 0
        self._done_rows = 0
        self._total_rows = 0
        self._thread = threading.Thread(target=self._run, name=f"persia-{self.operation}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._state in (State.DONE, State.FAILED)

    @property
    def is_abandoned(self) -> bool:
        """Whether its coordinator has been silent for the time of the lease."""
        return time.monotonic() - self._last_asked > self._lease_s

    def report(self) -> Report:
        """The state of the job. The question renews the lease."""
        with self._changed:
            self._last_asked = time.monotonic()
            return Report(
                state=self._state,
                done_bytes=self._done_bytes,
                done_rows=self._num_done_rows(),
                total_rows=self._total_rows,
                error=self._error,
                result=self._result() if self._state in (State.DONE, State.CHECKED) else None,
            )

    def apply(self) -> None:
        """Begins the second phase of a job that is checked. May be repeated."""
        with self._changed:
            if self._state is State.RUNNING and not self._wants_apply:
                raise FailedPreconditionError(f"{self.operation} is not checked yet: it cannot be applied")
            self._wants_apply = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Ends the job, unless it is over; returns when it has cleaned up, or after seconds."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
        self._interrupt()
        # Bounded: the coordinator waits for the answer, and the thread may hang in a call to the storage.
        self._thread.join(_STOP_S)

    def close(self) -> None:
        """As `cancel`, at the end of the server: the coordinator may still commit the checkpoint."""
        self._is_closing = True
        self.cancel()

    @abstractmethod
    def _work(self) -> None:
        """Runs on the job's thread. Calls `_check_alive` often."""

    # Kinds of jobs override those that they need.

    def _interrupt(self) -> None:  # noqa: B027
        """Ends what `_work` waits for, from another thread, after the job was cancelled."""

    def _release(self) -> None:  # noqa: B027
        """Gives the store back, before the operation is over."""

    def _clean_up(self) -> None:  # noqa: B027
        """Removes what a failed job has written."""

    def _num_done_rows(self) -> int:
        return self._done_rows

    def _result(self) -> dict[str, Any] | None:
        return None

    def _run(self) -> None:
        error: PersiaError | None = None
        try:
            self._work()
        except PersiaError as failure:
            error = failure.with_traceback(None)  # its frames would keep the store locked
        except Exception as failure:
            get_default_logger().exception("%s failed", self.operation)
            error = InternalError(f"{type(failure).__name__}: {failure}")
        # Before the state changes: who sees DONE may begin the next operation, which needs the store.
        self._release()
        if error is not None and self._cancelled and self._may_end:
            error = FailedPreconditionError(_CANCELLED)  # and whatever failed on the way
        if error is not None:
            get_default_logger().warning("%s failed: %s", self.operation, error)
            self._clean_up()
        self._share.log.ended(self._kind, began=self._began, done=error is None)
        with self._changed:  # both at once, for `report`
            self._state = State.DONE if error is None else State.FAILED
            self._error = error

    def _check_alive(self) -> None:
        if not self._may_end:
            return
        if self._cancelled:
            raise FailedPreconditionError(_CANCELLED)
        if self.is_abandoned:
            raise DeadlineExceededError(
                f"its coordinator has not asked about it for {self._lease_s:g} s, and seems to have ended"
            )

    def _await_apply(self) -> None:
        with self._changed:
            self._state = State.CHECKED
            while not self._wants_apply:
                self._check_alive()
                # Wakes up by itself, too: the end of the lease notifies nothing.
                self._changed.wait(min(1.0, self._lease_s / 4))
            # From here on it cannot be cancelled: half of the second phase would be worse than either state.
            self._state, self._may_end = State.RUNNING, False

    def _count_bytes(self, num_bytes: int) -> None:
        self._check_alive()
        with self._changed:
            self._done_bytes += num_bytes

    def _count_rows(self, num_rows: int) -> None:
        with self._changed:
            self._done_rows += num_rows

    def _on_threads(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Runs all tasks on the share's threads; raises the first error once all threads have stopped."""
        remaining, lock = iter(tasks), threading.Lock()
        failures: list[Exception] = []

        # Tasks are taken one by one, not divided: files and chunks differ in size by orders of magnitude.
        def serve() -> None:
            while not failures:
                try:
                    with lock:  # a generator may not be advanced by two threads
                        task = next(remaining, None)
                    if task is None:
                        return
                    task()
                except Exception as failure:
                    failures.append(failure)

        pool = DaemonPool(self._share.num_threads, f"persia-{self.operation}")
        try:
            for future in [pool.submit(serve) for _ in range(self._share.num_threads)]:
                future.result()  # every task checks whether it is still wanted, and ends
        finally:
            pool.close()
        if failures:
            raise failures[0]


class SnapshotJob(ServerJob):
    """Writes a snapshot of a server into files of its own, in the folder `operation` of `directory`."""

    def __init__(
        self,
        request: Request,
        share: ServerShare,
        lease_s: float,
        directory: Location,
        snapshot: Snapshot,
        *,
        with_pages: bool = False,
    ) -> None:
        """`with_pages`: the manifest will be signed, and so needs digests that cannot be forged."""
        super().__init__(request, share, lease_s)
        self._with_pages = with_pages
        self._directory = directory
        self._snapshot = snapshot
        self._parts = [snapshot.part(index) for index in range(snapshot.num_parts)]
        self._total_rows = snapshot.num_rows
        self._files: list[FileEntry] = []
        config = snapshot.train_config
        self._point: dict[str, Any] = {  # of the snapshot, for the manifest
            "step": snapshot.step,
            "num_rows": snapshot.num_rows,
            "train_config": None if config is None else config.encode().hex(),
            "schema": None if share.schema is None else to_json(share.schema),
        }

    def _write_files(self, name: str) -> None:
        self._on_threads(functools.partial(self._write_file, name, i) for i in range(len(self._parts)))

    def _write_file(self, name: str, index: int) -> None:
        path = f"{self.operation}/{name}-{self._share.index}-{index}.emb"
        entry = write_shard_file(
            self._parts[index], self._directory, path, self._count_bytes, with_pages=self._with_pages
        )
        self._files.append(entry)

    def _release(self) -> None:
        self._snapshot.close()

    def _clean_up(self) -> None:
        # One by one, not the folder: other servers have files in it.
        for file in self._files:
            (self._directory / file.path).remove_quietly()

    def _num_done_rows(self) -> int:
        return sum(part.num_rows for part in self._parts)  # counts long before the first bytes are written

    def _result(self) -> dict[str, Any]:
        files = sorted(self._files, key=lambda file: file.path)
        return {**self._point, "files": [to_json(file) for file in files]}


def require_dump_id(request: Request) -> None:
    """Raises InvalidArgumentError: the operation's name becomes a folder, so it must not lead elsewhere."""
    if not is_dump_id(request.operation):
        raise InvalidArgumentError(f"{request.what}: {request.operation!r:.80} is not the name of a dump")


@dataclass(frozen=True)
class _Dump:
    """Arguments of a dump."""

    directory: str  # URL
    keep_small_rows: StrictBool = False
    with_state: StrictBool = True
    with_pages: StrictBool = False


class DumpJob(SnapshotJob):
    """Writes all rows of a server, as they are when it is created."""

    _kind = "dump"

    def __init__(self, request: Request, share: ServerShare, lease_s: float) -> None:
        require_dump_id(request)
        dump = request.read(_Dump)
        directory = Location.of(dump.directory)  # first: what cannot be written to changes no row
        # From the store, before the snapshot: a restarted training has the same rows as a continued one.
        if not dump.keep_small_rows:
            share.store.remove_small_rows()  # does nothing where no slot has a min_norm
        snapshot = share.store.begin_snapshot(
            share.num_threads, with_state=dump.with_state, max_processors=max_processors(share.dump_percent)
        )
        if snapshot.train_config is None:
            snapshot.close()
            raise FailedPreconditionError(
                "this server has no optimizer yet, and so no rows: a TrainCtx that is entered configures it; "
                "dump after that"
            )
        super().__init__(request, share, lease_s, directory, snapshot, with_pages=dump.with_pages)

    def _interrupt(self) -> None:
        self._snapshot.close()  # a throttled dump may pause for longer than `cancel` waits

    def _work(self) -> None:
        if self._share.lowers_priority:
            lower_priority()  # compression takes much processor time, which training needs more
        self._write_files("embeddings")


@dataclass(frozen=True)
class _Load:
    """Arguments of a load."""

    directory: str  # URL
    manifest: str  # its SHA-256 in hex
    train_config: Hex
    with_state: StrictBool = True
    fresh_state: StrictBool = False
    strict: StrictBool = True


class LoadJob(ServerJob):
    """Reads a server's rows twice: to check all of them, and to replace the rows once it is told to apply."""

    _kind = "load"

    def __init__(self, request: Request, share: ServerShare, lease_s: float) -> None:
        super().__init__(request, share, lease_s)
        self._load = request.read(_Load)
        self._directory = Location.of(self._load.directory)
        self._slot_changes = ""
        self._loader: CheckpointLoader | None = None

    def _work(self) -> None:
        from persia._native import TrainConfig

        config = TrainConfig.decode(bytes.fromhex(self._load.train_config))
        files = self._open_files()
        # The only reference: another in a frame of an error's traceback would keep the store locked.
        self._loader = self._share.store.begin_load(
            config, with_state=self._load.with_state, fresh_state=self._load.fresh_state
        )
        # The files are read twice. Checked rows of a whole model would not fit into memory a second time.
        self._on_threads(self._pass_over(files, checks=True))
        self._await_apply()
        self._done_rows = 0
        self._loader.replace()
        try:
            self._on_threads(self._pass_over(files, checks=False))
            self._loader.commit()
        except PersiaError as failure:
            raise type(failure)(
                f"{failure}; the rows of this server are incomplete now: load a checkpoint before you train"
            ) from failure
        get_default_logger().info(
            "%d rows loaded from %s, %d evicted",
            self._loader.num_rows,
            self._directory,
            self._loader.num_evicted,
        )

    def _open_files(self) -> list[ShardFile]:
        manifest, digest = Manifest.read(self._directory)
        # By content, not by path: a shared directory may be mounted late, or hold another run's checkpoint.
        if digest != self._load.manifest:
            raise CorruptionError(
                f"the manifest of {self._directory} is not the one that the coordinator read: the checkpoint "
                "was replaced meanwhile, or this server sees another directory of that name; load again"
            )
        section = manifest.require_embeddings(self._directory)
        section.require_files(self._directory)
        if section.schema is not None and self._share.schema is not None:
            changes = section.schema.changes_to(self._share.schema)
            if changes and self._load.strict:
                raise FailedPreconditionError(
                    f"{changes} since {self._directory} was written: load it with strict=False to accept that"
                )
            self._slot_changes = str(changes) if changes else ""
        files = []
        # All indices first: a missing or foreign file must end the load before rows are read for minutes.
        for entry in section.files:
            self._check_alive()
            files.append(ShardFile(self._directory, entry))
        chunks = (chunk for file in files for chunk in file.chunks_of(self._share.owns))
        self._total_rows = sum(chunk.num_rows for chunk in chunks)
        return files

    def _pass_over(self, files: list[ShardFile], *, checks: bool) -> Iterator[Callable[[], None]]:
        """Yields one task for each chunk of this server's rows."""
        # With as many servers as at the dump a file is read by one; otherwise each reads its ranges of all.
        for file in files:
            for chunk in file.chunks_of(self._share.owns):
                yield functools.partial(self._consume, file, chunk, checks=checks)

    def _consume(self, file: ShardFile, chunk: Chunk, *, checks: bool) -> None:
        assert self._loader is not None, "made before files are read"
        self._check_alive()
        with file.naming(chunk):
            content = file.read(chunk)
            if checks:
                self._loader.verify(content)
            else:
                self._loader.add(content)
        self._count_bytes(chunk.num_bytes)
        self._count_rows(chunk.num_rows)

    def _release(self) -> None:
        self._loader = None  # the last reference: the native destructor unlocks the store

    def _result(self) -> dict[str, Any]:
        return {"slot_changes": self._slot_changes}


def dump_percent(config: GlobalConfig) -> int:
    """CPU share of a server's dumps. A dump holds packets up, so it is not throttled where there are some."""
    if config.embedding_parameter_server_config.enable_incremental_update:
        return 100
    return config.common_config.checkpointing_config.dump_percent


def max_processors(percent: int) -> float:
    """How many processors are `percent` of those that this process may use; 0, no limit, for 100."""
    return 0.0 if percent == 100 else max(_LEAST, percent / 100 * _available())


def _available() -> float:
    available = float(len(os.sched_getaffinity(0)))
    for names in (_CGROUP_V2, _CGROUP_V1):
        try:
            quota, period = " ".join((_CGROUPS / name).read_text() for name in names).split()
            if quota != "max" and int(quota) > 0:
                return min(available, int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue  # none of this version
    return available
