"""A dump or a load of one server: a thread that writes or reads files, and where it stands.

An operation lives as long as its coordinator asks about it: after `lease_s` without a question it ends by
itself, gives back what it holds, and removes what it has written.
"""

from __future__ import annotations

import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.dump_throttle import max_processors
from persia.checkpoint.protocol import Report, Request, State
from persia.config import CheckpointingConfig
from persia.errors import (
    CorruptionError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PersiaError,
)
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool, give_way
from persia.observability.checkpointing import CheckpointLog
from persia.storage.location import Location
from persia.storage.manifest import FileEntry, Manifest, is_dump_id
from persia.storage.schema import RowSchema
from persia.storage.shard_file import Chunk, ShardFile, write_shard_file
from persia.validation import to_json

if TYPE_CHECKING:
    from persia._native import CheckpointLoader, Snapshot, TrainConfig

__all__ = ["DumpJob", "JobMaker", "LoadJob", "RowStore", "ServerJob", "ServerShare", "TwoPhaseJob"]

_CANCELLED = "it was cancelled"
_STOP_S = 5.0


class RowStore(Protocol):
    """What operations need of the native module: a ParameterServer, EmbeddedClient or EmbeddingBags."""

    def remove_small_rows(self) -> int: ...

    def begin_snapshot(
        self, num_parts: int = 1, *, with_state: bool = True, max_processors: float = 0.0
    ) -> Snapshot: ...

    def begin_load(
        self, train_config: TrainConfig, *, with_state: bool = True, fresh_state: bool = False
    ) -> CheckpointLoader: ...

    def track_changes(self, max_rows: int) -> None: ...

    def change_status(self) -> dict[str, int | bool]: ...

    def take_changes(self, num_parts: int = 1) -> Snapshot: ...


class JobMaker(Protocol):
    """A feature of a server that has its own kinds of operations: its tier, or its changes."""

    def make_job(self, request: Request, share: ServerShare, lease_s: float) -> ServerJob:
        """The operation that `request` begins."""


@dataclass(frozen=True, kw_only=True)
class ServerShare:
    """A server and its place in the job."""

    store: RowStore
    index: int
    replicas: int
    schema: RowSchema | None  # None: it was started without an embedding config
    num_threads: int  # files written, or read, at a time
    # Whether dumps leave the processors to others: in a server. Not in a process that trains: a nice thread
    # that is preempted while it holds the GIL keeps the training waiting for it.
    gives_way: bool = False
    dump_percent: int = CheckpointingConfig().dump_percent  # of the processors, while rows are trained
    log: CheckpointLog = field(default_factory=CheckpointLog)
    pool: JobMaker | None = None  # makes jobs whose rows stay in the tier; None: rows are in memory alone


class ServerJob(ABC):
    """One operation on one server. Thread-safe."""

    _kind: str  # in metrics
    is_packet = False  # the operation belongs to a stream of packets

    def __init__(self, operation: str, share: ServerShare, lease_s: float) -> None:
        self.operation = operation
        self._share = share
        self._lease_s = lease_s
        self._began = self._last_asked = time.monotonic()
        self._changed = threading.Condition()
        self._state = State.RUNNING
        self._error: PersiaError | None = None
        self._cancelled = False
        self._is_closing = False
        self._may_end = True
        self._done_bytes = 0
        self._done_rows = 0
        self._thread = threading.Thread(target=self._run, name=f"persia-{operation}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._state in (State.DONE, State.FAILED)

    @property
    def is_abandoned(self) -> bool:
        """Nobody has asked about it for the time of its lease."""
        return time.monotonic() - self._last_asked > self._lease_s

    def report(self) -> Report:
        """Where it stands; whoever asks keeps it alive."""
        with self._changed:
            self._last_asked = time.monotonic()
            return Report(
                state=self._state,
                done_bytes=self._done_bytes,
                done_rows=self._num_done_rows(),
                total_rows=self._total_rows(),
                error=self._error,
                result=self._result() if self._state in (State.DONE, State.CHECKED) else None,
            )

    def cancel(self) -> None:
        """Ends it, unless it is over; returns when it has cleaned up, or after seconds."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
        self._interrupt()
        self._thread.join(_STOP_S)

    def close(self) -> None:
        """`cancel`, as the server ends: its coordinator has not said so."""
        self._is_closing = True
        self.cancel()

    @abstractmethod
    def _work(self) -> None:
        """On a thread of its own. Calls `_check_alive` often."""

    def _interrupt(self) -> None:
        """Ends what `_work` waits for: it was cancelled, from another thread."""
        return None

    @abstractmethod
    def _clean_up(self) -> None:
        """After a failure."""

    @abstractmethod
    def _release(self) -> None:
        """Gives the store back, before the operation is over."""

    def _num_done_rows(self) -> int:
        return self._done_rows

    def _total_rows(self) -> int:
        return 0

    def _result(self) -> dict[str, Any] | None:
        return None

    def _run(self) -> None:
        error: PersiaError | None = None
        try:
            self._work()
        except PersiaError as failure:
            error = failure.with_traceback(None)  # whoever keeps the error would keep frames, and the store
        except Exception as failure:
            get_default_logger().exception("%s failed", self.operation)
            error = InternalError(f"{type(failure).__name__}: {failure}")
        self._release()
        if error is not None and self._cancelled and self._may_end:
            error = FailedPreconditionError(_CANCELLED)  # and whatever failed on the way
        if error is not None:
            get_default_logger().warning("%s failed: %s", self.operation, error)
            self._clean_up()
        self._share.log.ended(self._kind, began=self._began, done=error is None)
        with self._changed:
            self._state = State.DONE if error is None else State.FAILED
            self._error = error

    def _check_alive(self) -> None:
        if not self._may_end:
            return
        if self._cancelled:
            raise FailedPreconditionError(_CANCELLED)
        if self.is_abandoned:
            raise DeadlineExceededError(
                f"nobody has asked about it for {self._lease_s:g} s: its coordinator seems to have ended"
            )

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

        def serve() -> None:
            while not failures:
                try:
                    with lock:
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


class DumpJob(ServerJob):
    """Writes all rows of a server, as they are when it is created, into files of their own."""

    _kind = "dump"

    def __init__(self, operation: str, share: ServerShare, lease_s: float, arguments: dict[str, Any]) -> None:
        """`arguments`: {"directory": URL, "keep_small_rows": bool, "with_state": bool}; files go to
        the folder `operation` in it.
        """
        super().__init__(operation, share, lease_s)
        if not is_dump_id(operation):
            raise InvalidArgumentError(f"checkpoint request: {operation!r:.80} is not the name of a dump")
        self._directory = Location.of(_text(arguments, "directory"))
        self._files: list[FileEntry] = []
        if arguments.get("keep_small_rows") is not True:
            share.store.remove_small_rows()  # of slots with a min_norm; none goes without
        with_state = arguments.get("with_state") is not False
        self._snapshot = share.store.begin_snapshot(
            share.num_threads, with_state=with_state, max_processors=max_processors(share.dump_percent)
        )
        config = self._snapshot.train_config
        if config is None:
            self._snapshot.close()
            raise FailedPreconditionError(
                "this server has no optimizer yet, and so no rows: a TrainCtx that is entered configures it; "
                "dump after that"
            )
        self._parts = [self._snapshot.part(index) for index in range(self._snapshot.num_parts)]
        self._cut = {
            "step": self._snapshot.step,
            "num_rows": self._snapshot.num_rows,
            "train_config": config.encode().hex(),
            "schema": None if share.schema is None else to_json(share.schema),
        }

    def _interrupt(self) -> None:
        self._snapshot.close()  # writers may rest for longer than anybody waits for them

    def _work(self) -> None:
        if self._share.gives_way:
            give_way()  # compressing takes the processors for long; training wants them more
        self._on_threads(functools.partial(self._write, index) for index in range(self._snapshot.num_parts))

    def _write(self, index: int) -> None:
        entry = write_shard_file(self._parts[index], self._directory, self._path(index), self._count_bytes)
        self._files.append(entry)

    def _path(self, index: int) -> str:
        return f"{self.operation}/embeddings-{self._share.index}-{index}.emb"

    def _release(self) -> None:
        self._snapshot.close()

    def _clean_up(self) -> None:
        for file in self._files:
            (self._directory / file.path).remove_quietly()

    def _num_done_rows(self) -> int:
        return sum(part.num_rows for part in self._parts)  # long before the first bytes are written

    def _total_rows(self) -> int:
        return self._snapshot.num_rows

    def _result(self) -> dict[str, Any]:
        return {**self._cut, "files": [to_json(file) for file in sorted(self._files, key=_by_path)]}


class TwoPhaseJob(ServerJob):
    """Does its work, and waits to be told that all other servers have done theirs, before it is effective."""

    def __init__(self, operation: str, share: ServerShare, lease_s: float) -> None:
        super().__init__(operation, share, lease_s)
        self._wants_apply = False

    def apply(self) -> None:
        """To be called once it is checked; repeating it does nothing."""
        with self._changed:
            if self._state is State.RUNNING and not self._wants_apply:
                raise FailedPreconditionError(f"{self.operation} is not checked yet: it cannot be applied")
            self._wants_apply = True
            self._changed.notify_all()

    def _await_apply(self) -> None:
        with self._changed:
            self._state = State.CHECKED
            while not self._wants_apply:
                self._check_alive()
                self._changed.wait(min(1.0, self._lease_s / 4))
            # From here on it ends with all of it: half would be worse than either.
            self._state, self._may_end = State.RUNNING, False


class LoadJob(TwoPhaseJob):
    """Reads what concerns a server twice: to check it all, and, when told so, to replace the rows by it."""

    _kind = "load"

    def __init__(self, operation: str, share: ServerShare, lease_s: float, arguments: dict[str, Any]) -> None:
        """`arguments`: {"directory": URL, "manifest": its SHA-256 in hex, "with_state": bool,
        "fresh_state": bool, "train_config": hex, "strict": bool}.
        """
        super().__init__(operation, share, lease_s)
        self._arguments = arguments
        self._directory = Location.of(_text(arguments, "directory"))
        self._num_rows = 0
        self._slot_changes = ""
        self._loader: CheckpointLoader | None = None

    def _work(self) -> None:
        from persia._native import TrainConfig

        config = TrainConfig.decode(bytes.fromhex(_text(self._arguments, "train_config")))
        files = self._open_files()
        with_state = self._arguments.get("with_state") is not False
        fresh_state = self._arguments.get("fresh_state") is True
        loader = self._share.store.begin_load(config, with_state=with_state, fresh_state=fresh_state)
        # Held by this alone: a name in a frame of an error's traceback would keep the store locked.
        self._loader = loader
        del loader
        self._on_threads(self._pass_over(files, self._verify))
        self._await_apply()
        self._done_rows = 0
        self._loader.replace()
        try:
            self._on_threads(self._pass_over(files, self._add))
            self._loader.commit()
        except PersiaError as failure:
            raise type(failure)(
                f"{failure}; the rows of this server are incomplete now: load a checkpoint before going on"
            ) from failure
        get_default_logger().info(
            "%d rows loaded from %s, %d evicted",
            self._loader.num_rows,
            self._directory,
            self._loader.num_evicted,
        )

    def _verify(self, chunk: bytes) -> None:
        assert self._loader is not None
        self._loader.verify(chunk)

    def _add(self, chunk: bytes) -> None:
        assert self._loader is not None
        self._loader.add(chunk)

    def _open_files(self) -> list[ShardFile]:
        manifest, digest = Manifest.read(self._directory)
        if digest != self._arguments.get("manifest"):
            raise CorruptionError(
                f"the manifest of {self._directory} is not the one that the coordinator read: the checkpoint "
                "was replaced meanwhile, or this server sees another directory of that name; load again"
            )
        section = manifest.embeddings
        if section is None:
            raise InvalidArgumentError(f"{self._directory} has no embeddings")
        section.require_files(self._directory)
        if section.schema is not None and self._share.schema is not None:
            changes = section.schema.changes_to(self._share.schema)
            if changes and self._arguments.get("strict") is not False:
                raise FailedPreconditionError(
                    f"{changes} since {self._directory} was written: load it with strict=False to accept that"
                )
            self._slot_changes = str(changes) if changes else ""
        files = []
        for entry in section.files:
            self._check_alive()
            files.append(ShardFile(self._directory, entry))
        chunks = (chunk for file in files for chunk in file.chunks_of(self._is_mine))
        self._num_rows = sum(chunk.num_rows for chunk in chunks)
        return files

    def _pass_over(
        self, files: list[ShardFile], consume: Callable[[bytes], None]
    ) -> Iterator[Callable[[], None]]:
        """One task for each chunk of this server's rows."""
        for file in files:
            for chunk in file.chunks_of(self._is_mine):
                yield functools.partial(self._consume, file, chunk, consume)

    def _is_mine(self, shards: NDArray[np.uint32]) -> NDArray[np.bool_]:
        mine: NDArray[np.bool_] = shards % self._share.replicas == self._share.index
        return mine

    def _consume(self, file: ShardFile, chunk: Chunk, consume: Callable[[bytes], None]) -> None:
        self._check_alive()
        with file.naming(chunk):
            consume(file.read(chunk))
        self._count_bytes(chunk.num_bytes)
        self._count_rows(chunk.num_rows)

    def _clean_up(self) -> None:
        """Nothing was written."""

    def _release(self) -> None:
        self._loader = None

    def _total_rows(self) -> int:
        return self._num_rows

    def _result(self) -> dict[str, Any]:
        return {"slot_changes": self._slot_changes}


def _by_path(file: FileEntry) -> str:
    return file.path


def _text(arguments: dict[str, Any], key: str) -> str:
    value = arguments.get(key)
    if not isinstance(value, str):
        raise InvalidArgumentError(f"checkpoint request: {key} is {value!r:.80}, not a text")
    return value
