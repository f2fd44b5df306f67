"""Stages 3 and 5, the calls: embedding workers of a cluster, or the engine in this process.

In: the reference of a batch, or its ID features; gradients. Out: what the native client answers. Everything
above knows only `EmbeddingBackend`. Deadlines are the backend's, so that no caller can forget one.
"""

from __future__ import annotations

import contextlib
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
from persia.messaging.discovery import Directory
from persia.pipeline.failover import AbandonedBatches, Newcomers
from persia.pipeline.queues import Deadline
from persia.pipeline.slot_rows import row_blocks
from persia.pipeline.staleness import ALL_SLOTS, served_slots
from persia.pipeline.workers import PROBE_S, CallMonitor, HeldBatches, KnownWorkers

__all__ = ["NEW_CONTEXT", "ClusterBackend", "EmbeddingBackend", "SlotGradient", "SlotGradients"]

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
        self._config: TrainConfig | None = None
        self._held = HeldBatches(self, deadline_s)
        self.count_in_flight = self._held.count
        self._newcomers = Newcomers(self._configure_newcomers, deadline_s)
        self._workers = KnownWorkers(
            directory, deadline_s=deadline_s, schema=schema, on_joined=self._newcomers.add
        )
        self.is_gone = self._workers.is_gone
        self._abandoned = AbandonedBatches(
            self._workers.seems_gone, lambda batch: self.client.release(batch, timeout_s=PROBE_S), PROBE_S
        )
        self.abandon = self._abandoned.add
        super().__init__(
            self.client,
            deadline_s=deadline_s,
            slot_modes=self._workers.slot_modes,
            schema=self._workers.schema,
        )
        self._monitor = CallMonitor(self._workers.drop_dead)

    @property
    def client(self) -> RemoteClient:
        """What the calls go through; for its counts."""
        return self._workers.client

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
            self._workers.wait_for(reference)
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
        self._workers.close()
        self._newcomers.close()

    def _call_holder(self, reference: BatchReference, call: Callable[[BatchReference], T]) -> T:
        return self._held.call(reference, partial(self._call_worker, call))

    def _call_worker(self, call: Callable[[BatchReference], T], reference: BatchReference) -> T:
        self._workers.ensure_known(reference)
        while True:
            num_dropped = self._workers.count_dropped()
            try:
                with self._monitor.watching(reference.worker_index):
                    return call(reference)
            except UnavailableError:
                # Given up under the call, and found to live by another thread meanwhile?
                if self._workers.count_dropped() == num_dropped or not self._workers.is_used(reference):
                    raise

    def _call_any(self, call: Callable[[], T]) -> T:
        """Repeats a call that any worker can answer, if one has died under it."""
        deadline = Deadline(self._deadline_s)
        while True:
            num_dropped = self._workers.count_dropped()
            try:
                with self._monitor.watching():
                    return call()
            except UnavailableError:
                if self._workers.count_dropped() == num_dropped or deadline.over:
                    raise

    def _configure_newcomers(self, timeout_s: float) -> None:
        if self._config is not None:  # workers keep it for servers that restart
            # Not kept here: a newer one may have been accepted meanwhile.
            self._call_any(partial(self.client.configure, self._config, timeout_s=timeout_s))
