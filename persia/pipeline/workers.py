"""The embedding workers that a rank knows: which ones serve it, which have left, and which have died.

In: events of discovery, answers of workers, and looks at the workers of slow calls. Out: the client has the
address of each worker in use, and a caller learns whether the worker of a batch still holds it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from persia import env
from persia._native import BatchReference, RemoteClient
from persia.errors import PersiaError, UnavailableError
from persia.logger import get_default_logger
from persia.messaging.discovery import Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.pipeline.failover import find_down
from persia.waiting import Attempts

PROBE_S = 5.0  # for one answer of a worker


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
        self._lock = threading.Lock()  # guards changes of which workers are used
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
