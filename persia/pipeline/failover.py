"""What a rank does in the background after the death of an embedding worker, and for one that joins.

`workers.py` finds dead workers and continues their batches. Here, batches that a worker holds which only
seemed dead are released once it answers, and workers that join are configured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from persia._native import BatchReference
from persia.errors import (
    DeadlineExceededError,
    PersiaError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging.discovery import ServiceInfo
from persia.waiting import Attempts

_CONFIGURE_S = 5.0  # of one try: `close` has to wait for it


class AbandonedBatches:
    """Releases the batches that workers hold which only seemed dead, once they are reached again.

    A worker that is full of them takes no more batches, until they expire. Thread-safe.
    """

    def __init__(
        self,
        is_gone: Callable[[BatchReference], bool | None],
        release: Callable[[BatchReference], None],
        pause_s: float,
    ) -> None:
        """`is_gone`: whether the worker does not answer now; None if it never will."""
        self._is_gone, self._release, self._pause_s = is_gone, release, pause_s
        self._lock = threading.Lock()
        self._batches: dict[int, list[BatchReference]] = {}  # by the incarnation of their worker
        self._closed = threading.Event()

    def add(self, reference: BatchReference) -> None:
        with self._lock:
            batches = self._batches.setdefault(reference.worker_incarnation, [])
            batches.append(reference)
            if len(batches) > 1:  # the thread of this worker runs
                return
        threading.Thread(
            target=self._run, args=(reference,), name="persia-abandoned-batches", daemon=True
        ).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self, first: BatchReference) -> None:
        while not self._closed.wait(self._pause_s):
            try:
                is_gone = self._is_gone(first)
            except PersiaError:  # the broker is away: the next try
                continue
            if is_gone is True:
                continue
            with self._lock:
                batches = list(self._batches[first.worker_incarnation])
            num_ended = len(batches) if is_gone is None else self._release_all(batches)
            with self._lock:
                del self._batches[first.worker_incarnation][:num_ended]
                if not self._batches[first.worker_incarnation]:
                    del self._batches[first.worker_incarnation]
                    return

    def _release_all(self, batches: list[BatchReference]) -> int:
        """How many were released, before the worker was gone again."""
        for number, batch in enumerate(batches):
            try:
                self._release(batch)
            except PersiaError:
                return number
        return len(batches)


class Newcomers:
    """Gives workers that have joined the training config, on one thread while there are such workers.

    Not on the thread of events: a worker that dies now is waited for until its successor has joined.
    Thread-safe.
    """

    def __init__(self, configure: Callable[[float], None], deadline_s: float) -> None:
        """`configure`: sends the present config to all workers, and takes at most its argument in seconds."""
        self._configure, self._deadline_s = configure, deadline_s
        self._lock = threading.Lock()
        self._newest: ServiceInfo | None = None  # None: the calls so far have served all
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def add(self, worker: ServiceInfo) -> None:
        with self._lock:
            self._newest = worker
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="persia-configure-newcomer", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(2 * _CONFIGURE_S)

    def _run(self) -> None:
        while (worker := self._take_newest()) is not None:
            try:
                self._serve()
            except PersiaError as failure:
                get_default_logger().error("%s has joined and is not usable: %s", worker, failure)
            except Exception:
                get_default_logger().exception("%s has joined and is not usable", worker)

    def _take_newest(self) -> ServiceInfo | None:
        with self._lock:
            worker, self._newest = self._newest, None
            if worker is None or self._closed.is_set():
                self._thread = None  # in this step: the next newcomer starts another one
                return None
            return worker

    def _serve(self) -> None:
        failure: PersiaError | None = None
        for _ in Attempts(self._deadline_s):
            if self._closed.is_set():
                return
            try:
                return self._configure(min(_CONFIGURE_S, self._deadline_s))
            except (DeadlineExceededError, UnavailableError) as error:
                failure = error
        assert failure is not None, "there is a first attempt"
        raise failure
