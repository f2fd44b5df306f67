"""Stages 3 and 5, the calls: embedding workers of a cluster, or the engine in this process.

In: the reference of a batch, or its ID features; gradients. Out: what the native client answers. Everything
above knows only `EmbeddingBackend`. Deadlines are the backend's, so that no caller can forget one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia._native import (
    BatchReference,
    EmbeddedClient,
    EmbeddingClient,
    EmbeddingStore,
    LookupResult,
    RemoteClient,
    ReturnReport,
    TrainConfig,
)
from persia.config import SlotsConfig
from persia.errors import NotFoundError, PersiaError, UnavailableError
from persia.logger import get_default_logger
from persia.messaging.discovery import Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.pipeline.failover import AbandonedBatches, CallMonitor, Dead, HeldBatches, Newcomers, find_down
from persia.pipeline.queues import Deadline
from persia.pipeline.slot_rows import row_blocks
from persia.pipeline.staleness import ALL_SLOTS, served_slots
from persia.waiting import Attempts

__all__ = ["NEW_CONTEXT", "ClusterBackend", "EmbeddingBackend", "SlotGradient", "SlotGradients"]

_PROBE_S = 5.0  # for one answer of a worker

# After an update that an exact context has applied, and the servers have not.
NEW_CONTEXT = "begin a new context and load a checkpoint there"

T = TypeVar("T")

# [num_rows, dim]; of a slot that came unpooled (sums by distinct row, their gradients' greatest magnitude);
# None: the loss did not reach the slot.
SlotGradient = NDArray[np.float32] | tuple[NDArray[np.float32], float] | None
SlotGradients = Sequence[tuple[str, SlotGradient]]


class EmbeddingBackend:
    """An `EmbeddingClient` of the native module with one deadline for all calls. Thread-safe.

    The client is the engine itself in an embedded job, and RPC to embedding workers in a cluster.
    """

    num_exact = 0  # contexts that train by it with consistency="exact"

    def __init__(
        self,
        client: EmbeddingClient,
        *,
        deadline_s: float,
        slot_modes: tuple[str, ...] = ("",),
        schema: str = "",
    ) -> None:
        """`slot_modes`: by the number of their bit in a lookup. `schema`: hash of the slots, or ""."""
        self._client = client
        self._deadline_s = deadline_s
        self.slot_modes, self.schema = slot_modes, schema
        # Not locked: two lookups that pick the same worker by a race are only a little less balanced.
        self._num_direct_lookups = 0

    @property
    def local_store(self) -> EmbeddingStore | None:
        """The store behind it when that is in this process."""
        return self._client.store if isinstance(self._client, EmbeddedClient) else None

    def configure(self, config: TrainConfig, *, replace: bool = False) -> None:
        """Gives every server its training config; another one than it has needs `replace`."""
        self._client.configure(config, replace=replace, timeout_s=self._deadline_s)

    def lookup(
        self,
        reference: BatchReference,
        *,
        requires_grad: bool,
        slots: int = ALL_SLOTS,
        id_features: bytes | memoryview | None = None,
        as_rows: bool = False,
    ) -> LookupResult:
        """The embeddings of a batch that a loader registered, or that `lookup_direct` began with.

        `slots` selects slots by their mode, for batches that require gradients: the others are absent from
        the result. `id_features`: of the batch, with its first lookup. If its worker dies before it has
        ended, it is registered again at another one. `as_rows`: slots may come unpooled.
        """
        # In a cluster this is RemoteClient (native/src/client/remote_client.cc).
        return self._client.lookup(
            reference, requires_grad=requires_grad, timeout_s=self._deadline_s, slots=slots, as_rows=as_rows
        )

    def lookup_direct(
        self,
        id_features: bytes | memoryview,
        *,
        requires_grad: bool,
        slots: int = ALL_SLOTS,
        as_rows: bool = False,
    ) -> LookupResult:
        """The embeddings of ID features built in this process; workers take turns."""
        # The client takes the index modulo the number of its workers. Without a bound on the counter, its
        # value would exceed the 32 bits of the argument after some months.
        worker_index = self._num_direct_lookups
        self._num_direct_lookups = (worker_index + 1) % (1 << 31)
        return self._client.lookup_direct(
            worker_index,
            id_features,
            requires_grad=requires_grad,
            timeout_s=self._deadline_s,
            slots=slots,
            as_rows=as_rows,
        )

    def return_gradients(
        self, reference: BatchReference, gradients: SlotGradients, *, scale: float
    ) -> ReturnReport:
        """Applies a batch's gradients, divided by `scale`; returns when every server has."""
        # In a cluster: RemoteClient::ReturnGradients (native/src/client/remote_client.cc).
        return self._client.return_gradients(reference, gradients, scale=scale, timeout_s=self._deadline_s)

    def forget(self, reference: BatchReference) -> None:
        """The batch gets no call any more: its worker lets it expire, if it holds it."""

    def release(self, reference: BatchReference) -> None:
        """Gives a batch up without gradients."""
        self._client.release(reference, timeout_s=self._deadline_s)

    def set_embeddings(self, signs: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Writes rows [num_signs, dim]; signs carry their feature group's prefix."""
        self._client.set_embeddings(signs, rows, timeout_s=self._deadline_s)

    def set_slot_rows(
        self, slots: SlotsConfig, name: str, ids: NDArray[np.uint64], rows: NDArray[np.float32]
    ) -> None:
        """Writes rows [n, dim] of `ids` [n] of a slot. InvalidArgumentError: another shape."""
        blocks = row_blocks(slots, name, ids, rows)
        with self._client.other_rows("rows were set"):
            for signs, values in blocks:
                self.set_embeddings(signs, values)

    def clear(self) -> None:
        """Removes all rows from all servers."""
        with self._client.other_rows("rows were cleared"):  # also between tries
            self._client.clear(timeout_s=self._deadline_s)

    def sizes(self) -> list[int]:
        """Rows per parameter server."""
        return self._client.sizes(timeout_s=self._deadline_s)

    def close(self) -> None:
        """The client closes its connections when it is destroyed."""


class ClusterBackend(EmbeddingBackend):
    """Embedding workers of a cluster behind RPC. Waits for all of them on creation.

    Workers that join later are used. One that has left is asked only for the batches that it holds. The
    batches of one that has died continue on another, or on its successor. One that only seemed dead is used
    again.
    `schema`: the hash of this process' slots, which must be theirs; "" to accept any.
    """

    def __init__(self, directory: Directory, *, schema: str = "") -> None:
        deadline_s = env.get_deadline_s()
        self._directory = directory
        self._lock = threading.Lock()  # guards changes of which workers are used
        self._workers: dict[int, ServiceInfo] = {}  # those that have an address, by index
        self._left: set[int] = set()  # incarnations of those among them that have left in order
        self._dead: dict[int, Dead] = {}  # by incarnation
        self._num_dropped = 0  # how often a worker was lost; never less than before
        self._config: TrainConfig | None = None
        self._held = HeldBatches(self, deadline_s)
        self.count_in_flight = self._held.count
        self._abandoned = AbandonedBatches(
            self._seems_gone, lambda batch: self.client.release(batch, timeout_s=_PROBE_S), _PROBE_S
        )
        self.abandon = self._abandoned.add
        self._newcomers = Newcomers(self._configure_newcomers, deadline_s)
        self._remote: RemoteClient | None = None  # first: events come from the watch on
        self._watch = directory.watch(EMBEDDING_WORKER, self._on_event)
        try:
            workers = directory.wait_for(EMBEDDING_WORKER, deadline_s, schema=schema)
            self._remote = RemoteClient(len(workers), wire_dtype=env.get_wire_dtype())
            # Asked once more: a restart between the first answers and the client would go unnoticed.
            for worker in directory.wait_for(EMBEDDING_WORKER, deadline_s):
                self._use(worker, log=False)
        except BaseException:
            self._watch.close()
            raise
        modes, schema = workers[0].slot_modes, workers[0].schema
        super().__init__(self._remote, deadline_s=deadline_s, slot_modes=modes, schema=schema)
        self._monitor = CallMonitor(self._drop_dead_workers)

    @property
    def client(self) -> RemoteClient:
        """What the calls go through; for its counts."""
        assert self._remote is not None, "created with this"
        return self._remote

    def configure(self, config: TrainConfig, *, replace: bool = False) -> None:
        # Kept only once all servers have accepted it: a worker that joins must not get a refused one.
        self._call_any(partial(super().configure, config, replace=replace))
        self._config = config

    def lookup(
        self,
        reference: BatchReference,
        *,
        requires_grad: bool,
        slots: int = ALL_SLOTS,
        id_features: bytes | memoryview | None = None,
        as_rows: bool = False,
    ) -> LookupResult:
        call = partial(super().lookup, requires_grad=requires_grad, slots=slots, as_rows=as_rows)
        if id_features is None:
            return self._call_holder(reference, call)
        form: dict[str, Any] = {"requires_grad": requires_grad, "slots": slots, "as_rows": as_rows}
        look_up_anew = partial(self.lookup_direct, id_features, **form)
        if requires_grad:
            return self.look_up_held(reference, id_features, call, look_up_anew)
        try:
            return self._call_worker(call, reference)
        except (NotFoundError, UnavailableError):  # another worker does too: no gradients follow
            return look_up_anew()

    def look_up_anywhere(
        self, id_features: bytes | memoryview, call: Callable[[], LookupResult]
    ) -> LookupResult:
        """A training lookup by `call`, at any worker, of a batch that was built in this process."""
        result = self._call_any(call)
        self._held.keep(result.reference, id_features)
        return result

    def look_up_held(
        self,
        reference: BatchReference,
        id_features: bytes | memoryview,
        call: Callable[[BatchReference], LookupResult],
        look_up_anew: Callable[[], LookupResult],
    ) -> LookupResult:
        """The first training lookup of a batch, by `call` at its worker.

        `look_up_anew`: at any worker, if that one has died, or has expired or released the batch.
        """
        self._held.keep(reference, id_features)
        try:
            self._await_worker(reference)
            return self._call_worker(call, reference)
        except BaseException as failure:
            self._held.forget(reference)
            if isinstance(failure, UnavailableError) and self.is_gone(reference):
                self.abandon(reference)
            elif not isinstance(failure, NotFoundError):
                raise
        # Under a new key: this rank has sent no update under the first one, a predecessor may have.
        return look_up_anew()

    def lookup_direct(
        self,
        id_features: bytes | memoryview,
        *,
        requires_grad: bool,
        slots: int = ALL_SLOTS,
        as_rows: bool = False,
    ) -> LookupResult:
        form: dict[str, Any] = {"requires_grad": requires_grad, "slots": slots, "as_rows": as_rows}
        call = partial(super().lookup_direct, id_features, **form)
        return self.look_up_anywhere(id_features, call) if requires_grad else self._call_any(call)

    def return_gradients(
        self, reference: BatchReference, gradients: SlotGradients, *, scale: float
    ) -> ReturnReport:
        call = partial(super().return_gradients, gradients=gradients, scale=scale)
        try:
            return self._call_holder(reference, call)
        except BaseException as failure:
            self.client.fail_exact(reference, f"{failure}: {NEW_CONTEXT}")  # the rank has applied them
            raise
        finally:
            self._held.forget(reference)  # an error is final: gradients are not sent again

    def forget(self, reference: BatchReference) -> None:
        self._held.forget(reference)

    def release(self, reference: BatchReference) -> None:
        current = self._held.forget(reference)
        try:
            self._call_worker(super().release, current)
        except (NotFoundError, UnavailableError):
            if not self.is_gone(current):  # a dead worker holds nothing
                raise
            with contextlib.suppress(PersiaError):
                self.client.release(current, timeout_s=0.0)  # an exact context holds its rows

    def set_embeddings(self, signs: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        self._call_any(partial(super().set_embeddings, signs, rows))

    def clear(self) -> None:
        self._call_any(super().clear)

    def sizes(self) -> list[int]:
        return self._call_any(super().sizes)

    def is_gone(self, reference: BatchReference) -> bool:
        """Whether the worker that held the batch has died, or was started again."""
        index, incarnation = reference.worker_index, reference.worker_incarnation
        known = self._workers.get(index)
        if incarnation in self._dead or (known is not None and known.incarnation != incarnation):
            return True
        # It answers before this process hears that it has joined.
        worker = self._directory.probe(EMBEDDING_WORKER, index, _PROBE_S)
        if worker is None or worker.incarnation == incarnation:
            return False
        self._use(worker)
        return True

    def register(self, id_features: bytes | memoryview, original: BatchReference) -> BatchReference:
        """Looks the batch up for training at a worker that lives; returns its reference there."""
        # All slots: servers have their rows, and later lookups replace the parts that stages need.
        call = partial(
            self.client.lookup_direct,
            original.reference % (1 << 31),  # batches are spread
            id_features,
            requires_grad=True,
            timeout_s=self._deadline_s,
            slots=served_slots(self.slot_modes),
            original=original,
        )
        return self._call_any(call).reference

    def close(self) -> None:
        self._abandoned.close()
        self._monitor.close()
        self._watch.close()
        self._newcomers.close()

    def _call_holder(self, reference: BatchReference, call: Callable[[BatchReference], T]) -> T:
        return self._held.call(reference, partial(self._call_worker, call))

    def _call_worker(self, call: Callable[[BatchReference], T], reference: BatchReference) -> T:
        index, incarnation = reference.worker_index, reference.worker_incarnation
        if incarnation in self._dead and not self._lives_after_all(incarnation):
            raise UnavailableError(f"embedding worker {index} has died")
        # A loader may have discovered a new worker, or a successor, before this process has.
        known = self._workers.get(index)
        if known is None or (known.incarnation != incarnation and incarnation not in self._dead):
            # Once: other workers serve a batch of a predecessor, and no training waits for other calls.
            if (worker := self._directory.probe(EMBEDDING_WORKER, index, _PROBE_S)) is None:
                raise UnavailableError(
                    f"embedding worker {index}, which a data loader has used, does not answer"
                )
            self._use(worker)
        while True:
            num_dropped = self._count_dropped()
            try:
                with self._monitor.watching(index):
                    return call(reference)
            except UnavailableError:
                # Given up under the call, and found to live by another thread meanwhile?
                worker = self._workers.get(index)
                lives = worker is not None and worker.incarnation == incarnation
                if self._count_dropped() == num_dropped or not lives:
                    raise

    def _await_worker(self, reference: BatchReference) -> None:
        """Waits for a worker that a data loader has discovered first. The broker may be away."""
        index = reference.worker_index
        name = f"embedding worker {index}, which a data loader has used"
        for _ in Attempts(self._deadline_s, pause_s=0.2, waiting_for=lambda: name):
            if index in self._workers or reference.worker_incarnation in self._dead:
                return
            with contextlib.suppress(UnavailableError):
                if worker := self._directory.probe(EMBEDDING_WORKER, index, _PROBE_S):
                    self._use(worker)
        raise UnavailableError(f"{name}, has not answered for {self._deadline_s:g} s (PERSIA_DEADLINE_SEC)")

    def _lives_after_all(self, incarnation: int) -> bool:
        """Whether a dead worker answers again: loaders may reach it and give it batches.

        Looks at most every `_PROBE_S`, and says False meanwhile.
        """
        with self._lock:
            dead = self._dead.get(incarnation)
            if dead is None:  # another thread has found that it lives
                return True
            worker, now = dead.worker, time.monotonic()
            if worker.index in self._workers or now < dead.next_look:  # it has a successor, or it is too soon
                return False
            self._dead[incarnation] = Dead(worker, now + _PROBE_S)
        if find_down([worker]):
            return False
        answer = self._directory.probe(EMBEDDING_WORKER, worker.index, _PROBE_S)
        if answer is None or answer.incarnation != incarnation:
            return False
        self._use(answer)
        return True

    def _seems_gone(self, reference: BatchReference) -> bool | None:
        """None: the worker has a successor, so it never answers again."""
        incarnation = reference.worker_incarnation
        known = self._workers.get(reference.worker_index)
        if known is not None and known.incarnation != incarnation:
            return None
        return incarnation in self._dead and not self._lives_after_all(incarnation)

    def _call_any(self, call: Callable[[], T]) -> T:
        """Repeats a call that any worker can answer, if one has died under it."""
        deadline = Deadline(self._deadline_s)
        while True:
            num_dropped = self._count_dropped()
            try:
                with self._monitor.watching():
                    return call()
            except UnavailableError:
                if self._count_dropped() == num_dropped or deadline.over:
                    raise

    def _count_dropped(self) -> int:
        with self._lock:  # never between the count and the drop itself
            return self._num_dropped

    def _drop_dead_workers(self, indices: set[int | None]) -> None:
        """Ends the calls to workers that have died, unless no other lives: a successor is waited for.

        `indices`: of the workers to look at; with None among them, all.
        """
        workers = list(self._workers.values())
        suspects = [worker for worker in workers if None in indices or worker.index in indices]
        dead = find_down(suspects)
        others = [w for w in workers if w not in dead and w.incarnation not in self._left]
        if not dead or len(find_down(others)) == len(others):
            return
        for worker in dead:
            with self._lock:
                if self._workers.get(worker.index) != worker:  # its successor has joined
                    continue
                has_left = worker.incarnation in self._left
                self._lose(worker)  # first: calls that fail now look there
                del self._workers[worker.index]
                self.client.drop_worker(worker.index)
            if not has_left:
                get_default_logger().warning("%s has died: its batches continue on other workers", worker)

    def _lose(self, worker: ServiceInfo) -> None:
        """Of a worker that is dropped or replaced, under the lock."""
        self._dead[worker.incarnation] = Dead(worker, time.monotonic() + _PROBE_S)
        self._left.discard(worker.incarnation)
        self._num_dropped += 1

    def _use(self, worker: ServiceInfo, *, log: bool = True) -> None:
        assert self._remote is not None, "created before a worker is used"
        with self._lock:
            known = self._workers.get(worker.index)
            is_new = known is None or known.incarnation != worker.incarnation
            if known is not None and is_new:
                self._lose(known)
            self._dead.pop(worker.incarnation, None)  # it was only not reached
            self._remote.set_worker(worker.index, worker.address)
            self._workers[worker.index] = worker
        if is_new and log:
            get_default_logger().info("%s is used from now on", worker)

    def _on_event(self, event: ServiceEvent) -> None:
        if self._remote is None:
            return
        worker = event.info
        try:
            if event.kind is EventKind.JOINED:
                self._use(worker)
                return self._newcomers.add(worker)
            with self._lock:
                # A successor at its index may have joined before.
                known = self._workers.get(worker.index)
                if known is not None and known.incarnation == worker.incarnation:
                    self._left.add(worker.incarnation)
                    self._remote.retire_worker(worker.index)
            get_default_logger().info("%s has left: it gets no more batches", worker)
        except PersiaError as failure:
            get_default_logger().error("%s is not usable: %s", worker, failure)

    def _configure_newcomers(self, timeout_s: float) -> None:
        if self._config is not None:  # workers keep it for servers that restart
            # Not kept here: a newer one may have been accepted meanwhile.
            self._call_any(partial(self.client.configure, self._config, timeout_s=timeout_s))
