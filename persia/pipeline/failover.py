"""Stages 3 and 5 after the death of an embedding worker: its batches continue on another one.

In: calls about a batch, and its ID features, which the rank keeps until the gradients are applied. Out: the
answer of the worker that holds the batch now. Another worker gets the ID features by `lookup_direct`, with
the first reference of the batch. Servers apply the update under that one, so it is applied once even if the
dead worker has sent it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from persia._native import BatchReference
from persia.errors import (
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    PersiaError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool
from persia.messaging.discovery import ServiceInfo
from persia.pipeline.queues import Deadline
from persia.waiting import Attempts

T = TypeVar("T")

_SLOW_S = 0.5  # a call that takes longer makes the monitor look whether its worker lives
# Between two looks at a worker whose calls stay slow. Each look takes a place among the connections that a
# process has to accept: one that is frozen for long would have none left, and seem dead.
_LONGEST_PAUSE_S = 8.0
_CONNECT_S = 2.0  # a host that does not answer for so long is taken to be down
_MAX_LOOKS = 32  # at workers, at a time
_CONFIGURE_S = 5.0  # of one try: `close` has to wait for it
_UNREACHABLE = frozenset({errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH})


class _Workers(Protocol):
    """What a backend knows of its embedding workers."""

    def is_gone(self, reference: BatchReference) -> bool:
        """Whether the worker that held the batch has died, or was started again."""

    def register(self, id_features: bytes | memoryview, original: BatchReference) -> BatchReference:
        """Looks the batch up for training at a worker that lives; returns its reference there."""

    def abandon(self, reference: BatchReference) -> None:
        """The batch, which has this reference at a worker that is gone, continues at another one."""


class _Held:
    def __init__(self, original: BatchReference, id_features: bytes | memoryview) -> None:
        self.original = self.current = original
        self.id_features = id_features
        self.lock = threading.Lock()  # held while the batch is registered again
        self.keys = [_key(original)]
        self.has_ended = False


class HeldBatches:
    """The batches that a rank has looked up for training and not ended. Thread-safe.

    Bounded by those who hold batches: the buffers and staleness permits of a context.
    """

    def __init__(self, workers: _Workers, deadline_s: float) -> None:
        self._workers = workers
        self._deadline_s = deadline_s
        self._batches: dict[tuple[int, int], _Held] = {}  # by each reference; single operations are atomic

    def count(self) -> int:
        """One that has moved counts for each worker that it was at."""
        return len(self._batches)

    def keep(self, reference: BatchReference, id_features: bytes | memoryview) -> None:
        """The batch can be registered again until `forget`."""
        # A view of a message keeps its dense part, too, after the loop has dropped the batch.
        if isinstance(id_features, memoryview) and memoryview(id_features.obj).nbytes > 2 * len(id_features):
            id_features = bytes(id_features)
        self._batches[_key(reference)] = _Held(reference, id_features)

    def forget(self, reference: BatchReference) -> BatchReference:
        """The batch has ended; returns its present reference."""
        held = self._batches.get(_key(reference))
        if held is None:
            return reference
        with held.lock:
            held.has_ended = True
            for key in held.keys:
                self._batches.pop(key, None)
            return held.current

    def call(self, reference: BatchReference, function: Callable[[BatchReference], T]) -> T:
        """Calls `function` with the present reference of the batch, and again after a worker's death.

        Raises what `function` raises while the worker lives, and when the deadline has passed.
        """
        held = self._batches.get(_key(reference))
        deadline = Deadline(self._deadline_s)
        while True:
            current = reference if held is None else held.current
            try:
                return function(current)
            except (NotFoundError, UnavailableError):
                if held is None or deadline.over or not self._workers.is_gone(current):
                    raise
                if not self._register_again(held, current):
                    raise

    def _register_again(self, held: _Held, lost: BatchReference) -> bool:
        """False: the batch has ended meanwhile."""
        with held.lock:
            if held.has_ended:
                return False
            if held.current is lost:  # else another call has done it, while this one waited
                held.current = self._workers.register(held.id_features, held.original)
                self._workers.abandon(lost)
                held.keys.append(_key(held.current))
                self._batches[held.keys[-1]] = held
            return True


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


class SlowCalls:
    """Decides when to look at the workers of slow calls: at once, then after pauses that double."""

    def __init__(self) -> None:
        self._looks: dict[int | None, tuple[float, float]] = {}  # of workers: when next, and the pause then

    def due(self, slow: Iterable[int | None], now: float) -> set[int | None]:
        """Those of the workers `slow` to look at now. A worker that is not among them begins anew."""
        self._looks = {worker: self._looks.get(worker, (now, _SLOW_S)) for worker in slow}
        due = {worker for worker, (when, _) in self._looks.items() if when <= now}
        for worker in due:
            pause_s = self._looks[worker][1]
            self._looks[worker] = (now + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S))
        return due


class CallMonitor:
    """Calls `on_slow` repeatedly while calls take long, on a thread of its own.

    Its argument is the indices of the workers that are slow, None for any of them. If it fails, no dead
    worker is found any more: each later call raises InternalError.
    """

    def __init__(self, on_slow: Callable[[set[int | None]], None]) -> None:
        self._on_slow = on_slow
        self._numbers = itertools.count()
        # (index of the worker, begin) by number of a call that is under way.
        self._calls: dict[int, tuple[int | None, float]] = {}
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="persia-call-monitor", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self, index: int | None = None) -> Iterator[None]:
        """For the time of a call to the worker `index`, or to any. InternalError: `on_slow` has failed."""
        if self._failure is not None:
            raise InternalError(
                f"this rank no longer finds embedding workers that have died, as the search failed with "
                f"{self._failure!r}: start the job again from its last checkpoint, and report this error"
            ) from self._failure
        number = next(self._numbers)
        self._calls[number] = (index, time.monotonic())
        try:
            yield
        finally:
            del self._calls[number]

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        self._thread.join(2 * _CONNECT_S)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as failure:
            get_default_logger().exception("looking for embedding workers that have died failed")
            self._failure = failure

    def _watch(self) -> None:
        slow_calls = SlowCalls()
        while not self._closed.wait(_SLOW_S):
            now = time.monotonic()
            # A copy in one step: calls begin and end meanwhile.
            calls = tuple(self._calls.values())
            if due := slow_calls.due({index for index, begin in calls if begin + _SLOW_S < now}, now):
                self._on_slow(due)


def is_down(address: str) -> bool:
    """Whether nothing listens at "host:port", or its host cannot be reached.

    The kernel accepts connections for a process that is busy. False if this process cannot tell, for example
    because the name of the host is not found at the moment.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
            return False
    except (ConnectionRefusedError, TimeoutError):
        return True
    except OSError as failure:
        return failure.errno in _UNREACHABLE


def find_down(workers: Sequence[ServiceInfo]) -> list[ServiceInfo]:
    """The workers that are down. Looks at them side by side, as each look may take seconds."""
    pool = DaemonPool(_MAX_LOOKS, "persia-look-at-worker")
    try:
        answers = [pool.submit(is_down, worker.address) for worker in workers]
        return [worker for worker, answer in zip(workers, answers, strict=True) if answer.result()]
    finally:
        pool.close()


def _key(reference: BatchReference) -> tuple[int, int]:
    return reference.worker_incarnation, reference.reference
