"""A log of answered requests, in the format that --gate and --sample read."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persia._native import AnsweredRequests
from persia.embedding.data import PersiaBatch
from persia.errors import StorageError
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import lower_priority
from persia.observability.exposition import Families, Row
from persia.serving.sideline import Share

_COUNTERS: list[Row] = [
    ("persia_serving_requests_logged", "num_written", "Requests written to --request-log."),
    ("persia_serving_requests_not_logged", "num_dropped", "Requests not logged: lack of time or an error."),
]
_CLOSE_S = 5.0
_PRIVATE = 0o600  # requests are data of users


@dataclass(frozen=True, kw_only=True)
class RequestLogOptions:
    """What is logged, and where to."""

    path: Path
    log_share: float = 1.0  # of the answered requests
    max_log_bytes: int = 64 << 20  # of the file; it then becomes PATH.1, in place of the one before


class RequestLog:
    """Appends the `PersiaBatch.to_bytes()` of requests to a file, on a thread of its own."""

    def __init__(self, options: RequestLogOptions) -> None:
        """StorageError: the file cannot be written."""
        self._num_written, self._num_failed = 0, 0
        self._error = ""  # why the last request was not written
        self._options = options
        self._num_bytes = 0
        self._file = -1
        try:
            self._open()
        except OSError as failure:
            raise StorageError(f"--request-log cannot be written: {failure}") from failure
        self._share = Share(options.log_share, "log")
        self.answered = AnsweredRequests(self._share.draw)  # also offered by the gRPC port
        self._thread = threading.Thread(target=self._run, name="persia-request-log", daemon=True)
        self._thread.start()

    def offer(self, batch: PersiaBatch, request_id: str) -> None:
        if self._share.takes(request_id):
            self.answered.offer(batch.to_bytes)

    def status(self) -> dict[str, Any]:
        dropped = self.answered.num_dropped + self._num_failed
        return {"num_written": self._num_written, "num_dropped": dropped, "error": self._error}

    def add_metrics(self, families: Families) -> None:
        families.counters(_COUNTERS, self.status())

    def close(self) -> None:
        """Writes what waits, for at most five seconds."""
        self.answered.close()
        self._thread.join(_CLOSE_S)
        # A thread that still writes must not find another file under this number.
        file, self._file = self._file, -1
        os.close(file)

    def _open(self) -> None:
        path = self._options.path
        # Also at the start: the end of a file of a killed process may be cut short.
        if path.is_file() and path.stat().st_size:
            os.replace(path, path.with_name(path.name + ".1"))
        elif path.is_file():
            path.unlink()  # others may be allowed to read it
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _PRIVATE)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._num_bytes = file, 0

    def _run(self) -> None:
        lower_priority()  # requests that wait for an answer come first
        while True:
            try:
                if (content := self.answered.next()) is None:
                    return
                # The gRPC port answers a batch without a look at its labels. One that cannot be read would
                # make the whole file unreadable.
                PersiaBatch.from_bytes(content)
                self._write(content)
            except Exception as failure:  # it must not end the thread
                self._fail(f"a request is not logged: {failure}")
            else:
                self._num_written += 1
                self._error = ""

    def _write(self, content: bytes) -> None:
        try:
            if self._num_bytes and self._num_bytes + len(content) > self._options.max_log_bytes:
                self._open()
            if os.write(self._file, content) < len(content):
                raise OSError("the disk is full")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._num_bytes)  # a part of a batch would spoil the file
            raise
        self._num_bytes += len(content)

    def _fail(self, error: str) -> None:
        self._num_failed += 1
        if error != self._error:
            get_default_logger().error("%s (--request-log): %s", self._options.path, error)
        self._error = error
