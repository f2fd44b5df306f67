"""The embedding workers that a rank knows: which ones serve it, which have left, and which have died.

In: events of discovery, answers of workers, and looks at the workers of slow calls. Out: the client has the
address of each worker in use, and a caller learns whether the worker of a batch still holds it.

Stages 3 and 5 after the death of a worker: its batches continue on another one (`HeldBatches`). The rank
keeps the ID features of a batch until its gradients are applied. Another worker gets them by
`lookup_direct`, with the first reference of the batch. Servers apply the update under that one, so it is
applied once even if the dead worker has sent it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from persia import env
from persia._native import BatchReference, RemoteClient
from persia.errors import (
    InternalError,
    NotFoundError,
    PersiaError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool
from persia.messaging.discovery import Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.pipeline.queues import Deadline
from persia.waiting import Attempts

T = TypeVar("T")

PROBE_S = 5.0  # for one answer of a worker
_SLOW_S = 0.5  # a call that takes longer makes the monitor look whether its worker lives
# Between two looks at a worker whose calls stay slow. Each look takes a place among the connections that a
# process has to accept: one that is frozen for long would have none left, and seem dead.
_LONGEST_PAUSE_S = 8.0
_CONNECT_S = 2.0  # a host that does not answer for so long is taken to be down
_MAX_LOOKS = 32  # at workers, at a time
_UNREACHABLE = frozenset({errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH})


class _Dead(NamedTuple):
    worker: ServiceInfo
    next_look: float  # by time.monotonic(): whether it lives


class KnownWorkers:
    """Tells a client which embedding workers to use. Thread-safe.

    Waits for all workers on creation. Workers that join later are used. One that has left is asked only for
    the batches that it holds. One that only seemed dead is used again.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        deadline_s: float,
        schema: str,
        on_joined: Callable[[ServiceInfo], None],
    ) -> None:
        """`schema`: hash that the workers' slots must have, or "". `on_joined`: called by the watch."""
        self._directory, self._deadline_s, self._on_joined = directory, deadline_s, on_joined
        self._lock = threading.Lock()  # held to change which workers are used
        self._used: dict[int, ServiceInfo] = {}  # the workers that have an address, by index
        self._left: set[int] = set()  # incarnations of used workers that have left in order
        self._dead: dict[int, _Dead] = {}  # by incarnation
        self._num_dropped = 0  # how often a worker was lost; never less than before
        self._client: RemoteClient | None = None  # first: events come from the watch on
        self._watch = directory.watch(EMBEDDING_WORKER, self._on_event)
        try:
            workers = directory.wait_for(EMBEDDING_WORKER, deadline_s, schema=schema)
            self._client = RemoteClient(len(workers), wire_dtype=env.get_wire_dtype())
            # Asked once more: a restart between the first answers and the client would go unnoticed.
            for worker in directory.wait_for(EMBEDDING_WORKER, deadline_s):
                self._use(worker, log=False)
        except BaseException:
            self._watch.close()
            raise
        self.slot_modes, self.schema = workers[0].slot_modes, workers[0].schema

    @property
    def client(self) -> RemoteClient:
        assert self._client is not None, "created with this"
        return self._client

    def close(self) -> None:
        """Ends the watch."""
        self._watch.close()

    def is_used(self, reference: BatchReference) -> bool:
        """Whether calls about the batch reach the worker that holds it."""
        worker = self._used.get(reference.worker_index)
        return worker is not None and worker.incarnation == reference.worker_incarnation

    def is_gone(self, reference: BatchReference) -> bool:
        """Whether the worker that held the batch has died, or was started again."""
        if reference.worker_incarnation in self._dead or self._has_successor(reference):
            return True
        # It answers before this process hears that it has joined.
        worker = self._directory.probe(EMBEDDING_WORKER, reference.worker_index, PROBE_S)
        if worker is None or worker.incarnation == reference.worker_incarnation:
            return False
        self._use(worker)
        return True

    def seems_gone(self, reference: BatchReference) -> bool | None:
        """Whether the worker does not answer now. None: it has a successor, so it never answers again."""
        if self._has_successor(reference):
            return None
        incarnation = reference.worker_incarnation
        return incarnation in self._dead and not self._lives_after_all(incarnation)

    def ensure_known(self, reference: BatchReference) -> None:
        """Looks once for the worker of a batch. UnavailableError: it has died, or does not answer.

        A loader may have discovered a new worker, or a successor, before this process has.
        """
        index, incarnation = reference.worker_index, reference.worker_incarnation
        if incarnation in self._dead and not self._lives_after_all(incarnation):
            raise UnavailableError(f"embedding worker {index} has died")
        known = self._used.get(index)
        if known is not None and (known.incarnation == incarnation or incarnation in self._dead):
            return
        # Once: other workers serve a batch of a predecessor, and no training waits for other calls.
        if (worker := self._directory.probe(EMBEDDING_WORKER, index, PROBE_S)) is None:
            raise UnavailableError(f"embedding worker {index}, which a data loader has used, does not answer")
        self._use(worker)

    def wait_for(self, reference: BatchReference) -> None:
        """Waits for a worker that a data loader has discovered first. The broker may be away."""
        index = reference.worker_index
        name = f"embedding worker {index}, which a data loader has used"
        for _ in Attempts(self._deadline_s, pause_s=0.2, waiting_for=lambda: name):
            if index in self._used or reference.worker_incarnation in self._dead:
                return
            with contextlib.suppress(UnavailableError):
                if worker := self._directory.probe(EMBEDDING_WORKER, index, PROBE_S):
                    self._use(worker)
        raise UnavailableError(f"{name}, has not answered for {self._deadline_s:g} s (PERSIA_DEADLINE_SEC)")

    def count_dropped(self) -> int:
        """How often a worker was lost: a call that fails while it rises may be repeated."""
        with self._lock:  # never between the count and the drop itself
            return self._num_dropped

    def drop_dead(self, indices: set[int | None]) -> None:
        """Ends the calls to workers that have died, unless no other lives: a successor is waited for.

        `indices`: of the workers to look at; with None among them, all.
        """
        workers = list(self._used.values())
        suspects = [worker for worker in workers if None in indices or worker.index in indices]
        dead = find_down(suspects)
        others = [w for w in workers if w not in dead and w.incarnation not in self._left]
        if not dead or len(find_down(others)) == len(others):
            return
        for worker in dead:
            with self._lock:
                if self._used.get(worker.index) != worker:  # its successor has joined
                    continue
                has_left = worker.incarnation in self._left
                self._lose(worker)  # first: calls that fail now look there
                del self._used[worker.index]
                self.client.drop_worker(worker.index)
            if not has_left:
                get_default_logger().warning("%s has died: its batches continue on other workers", worker)

    def _has_successor(self, reference: BatchReference) -> bool:
        worker = self._used.get(reference.worker_index)
        return worker is not None and worker.incarnation != reference.worker_incarnation

    def _lives_after_all(self, incarnation: int) -> bool:
        """Whether a dead worker answers again: loaders may reach it and give it batches.

        Looks at most every `PROBE_S`, and says False meanwhile.
        """
        with self._lock:
            dead = self._dead.get(incarnation)
            if dead is None:  # another thread has found that it lives
                return True
            worker, now = dead.worker, time.monotonic()
            if worker.index in self._used or now < dead.next_look:  # it has a successor, or it is too soon
                return False
            self._dead[incarnation] = _Dead(worker, now + PROBE_S)
        if find_down([worker]):
            return False
        answer = self._directory.probe(EMBEDDING_WORKER, worker.index, PROBE_S)
        if answer is None or answer.incarnation != incarnation:
            return False
        self._use(answer)
        return True

    def _lose(self, worker: ServiceInfo) -> None:
        """Of a worker that is dropped or replaced, under the lock."""
        self._dead[worker.incarnation] = _Dead(worker, time.monotonic() + PROBE_S)
        self._left.discard(worker.incarnation)
        self._num_dropped += 1

    def _use(self, worker: ServiceInfo, *, log: bool = True) -> None:
        with self._lock:
            known = self._used.get(worker.index)
            is_new = known is None or known.incarnation != worker.incarnation
            if known is not None and is_new:
                self._lose(known)
            self._dead.pop(worker.incarnation, None)  # it was only not reached
            self.client.set_worker(worker.index, worker.address)
            self._used[worker.index] = worker
        if is_new and log:
            get_default_logger().info("%s is used from now on", worker)

    def _on_event(self, event: ServiceEvent) -> None:
        if self._client is None:
            return
        worker = event.info
        try:
            if event.kind is EventKind.JOINED:
                self._use(worker)
                return self._on_joined(worker)
            with self._lock:
                # A successor at its index may have joined before.
                known = self._used.get(worker.index)
                if known is not None and known.incarnation == worker.incarnation:
                    self._left.add(worker.incarnation)
                    self._client.retire_worker(worker.index)
            get_default_logger().info("%s has left: it gets no more batches", worker)
        except PersiaError as failure:
            get_default_logger().error("%s is not usable: %s", worker, failure)


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
