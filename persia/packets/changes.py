"""The changes of one server: remembered for a stream of packets, and written when its coordinator asks.

A server remembers from its start on, so that no update is missed before a trainer has found it. What it has
belongs to one stream at a time: `begin` names it. Whatever makes the changes incomplete, a restart of the
server or more of them than it can remember, also ends that, and the coordinator has to begin anew.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, StrictBool

from persia.checkpoint.protocol import Request
from persia.checkpoint.server_job import ServerShare, SnapshotJob
from persia.config import GlobalConfig
from persia.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from persia.logger import get_default_logger
from persia.storage.location import Location
from persia.storage.position import is_packet_folder
from persia.validation import Count

if TYPE_CHECKING:
    from persia._native import EmbeddingStore, Snapshot

# Fewer changes are written faster by one thread to one file than to several files.
_ROWS_OF_ONE_FILE = 100_000
_READ_BYTES = 1 << 20


_Seconds = Annotated[float, Field(strict=True, ge=0, lt=1e9)]


@dataclass(frozen=True, kw_only=True)
class IncrementalSettings:
    """How a job writes packets: from the configuration of its servers alone, so that all agree."""

    directory: str
    buffer_size: Count  # changed rows of a server that are written at once
    interval_s: _Seconds
    dense_interval_s: _Seconds
    keep_packets: Count

    @classmethod
    def of(cls, config: GlobalConfig) -> IncrementalSettings | None:
        """Returns None for a job without incremental updates or without training."""
        section = config.embedding_parameter_server_config
        if not section.enable_incremental_update or config.common_config.job_type != "Train":
            return None
        return cls(
            directory=str(Location.of(section.incremental_dir)),
            buffer_size=section.incremental_buffer_size,
            interval_s=section.incremental_interval_ms / 1000,
            dense_interval_s=float(section.incremental_dense_interval_sec),
            keep_packets=section.incremental_keep_packets,
        )


@dataclass(frozen=True)
class _Begin:
    """Arguments of `track`. `anew`: forget the changes so far."""

    stream: str
    anew: StrictBool


@dataclass(frozen=True)
class _Take:
    """Arguments of `take`; files go to the folder of the operation in `directory`, a URL."""

    directory: str
    stream: str
    with_pages: StrictBool = False


class ServerChanges:
    """The changes of a server, and the stream of packets that they belong to. Thread-safe."""

    def __init__(self, store: EmbeddingStore, settings: IncrementalSettings) -> None:
        """Must be made before the store's first row."""
        self._store = store
        self._settings = settings
        self._lock = threading.Lock()
        self._stream: str | None = None
        # No packet has taken any, and none were lost: they are all rows of the store.
        self._is_from_start = True
        self._track()

    @classmethod
    def of(cls, store: EmbeddingStore, settings: IncrementalSettings | None) -> ServerChanges | None:
        """Returns None without `settings`: no change is tracked then."""
        return None if settings is None else cls(store, settings)

    def begin(self, request: Request) -> None:
        """Makes the changes those of the stream that `request` names."""
        begin = request.read(_Begin)
        with self._lock:
            if begin.anew:
                self._track()
            elif not self._is_from_start and self._stream != begin.stream:
                raise FailedPreconditionError(f"changes are of stream {self._stream}, not of {begin.stream}")
            self._stream, self._is_from_start = begin.stream, False

    def status(self) -> dict[str, Any]:
        """For the coordinator: `settings`, `stream`, `is_from_start`, `num_rows`."""
        with self._lock:
            # Here and not only in `take`: the trainer asks often, and tracks anew as soon as it knows.
            status = self._store.change_status()
            if status["has_overflowed"]:
                self._lose()
            return {
                "settings": dataclasses.asdict(self._settings),
                "stream": self._stream,
                "is_from_start": self._is_from_start,
                "num_rows": int(status["num_rows"]),
            }

    def take(self, stream: str, num_threads: int) -> Snapshot:
        """A snapshot of the changes. FailedPreconditionError: they are not (any more) that stream's."""
        with self._lock:
            if self._stream != stream:
                raise FailedPreconditionError(
                    f"the changes of this server are not those of stream {stream}: it has restarted, or "
                    "lost some"
                )
            num_rows = self._store.change_status()["num_rows"]
            try:
                return self._store.take_changes(1 if num_rows <= _ROWS_OF_ONE_FILE else num_threads)
            except ResourceExhaustedError as failure:
                self._lose()
                raise FailedPreconditionError(str(failure)) from failure

    def make_job(self, request: Request, share: ServerShare, lease_s: float) -> ChangesJob:
        """The job that writes the changes as they are now."""
        return ChangesJob(request, share, lease_s, self)

    def _track(self) -> None:
        # Twice: training continues while a packet or a whole checkpoint is written.
        self._store.track_changes(2 * self._settings.buffer_size)

    def _lose(self) -> None:
        if self._stream is not None:
            get_default_logger().warning(
                "more rows have changed than incremental_buffer_size allows for; a whole checkpoint is needed"
            )
        self._stream, self._is_from_start = None, False


# Unlike a dump it keeps its priority: what a packet carries gets stale while it waits.
class ChangesJob(SnapshotJob):
    """Writes the changes of a server, as they are when it is created; once applied, they are forgotten."""

    _kind = "packet"
    is_packet = True

    def __init__(self, request: Request, share: ServerShare, lease_s: float, changes: ServerChanges) -> None:
        take = request.read(_Take)
        if not is_packet_folder(request.operation):
            raise InvalidArgumentError(
                f"{request.what}: {request.operation!r:.80} is not the name of a packet's folder"
            )
        snapshot = changes.take(take.stream, share.num_threads)
        super().__init__(
            request, share, lease_s, Location.of(take.directory), snapshot, with_pages=take.with_pages
        )
        self._point["is_from_nothing"] = snapshot.is_from_nothing

    def _work(self) -> None:
        if self._total_rows > 0:
            self._write_files("rows")
        else:
            # An empty snapshot still has a header and an index, and can only be committed once it is read.
            for part in self._parts:
                while part.read(_READ_BYTES):
                    self._check_alive()
        # Until the packet's manifest is written: a failed packet leaves the changes to the next one.
        self._await_apply()
        self._snapshot.commit()
