"""Stages 3 and 5, the calls: embedding workers of a cluster, or the engine in this process.

In: the reference of a batch, or its ID features; gradients. Out: what the native client answers. Everything
above knows only `EmbeddingBackend`. Deadlines are the backend's, so that no caller can forget one.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from persia.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    NotFoundError,
    PersiaError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging.discovery import Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.pipeline.staleness import ALL_SLOTS

__all__ = ["ClusterBackend", "EmbeddingBackend", "SlotGradients", "slot_signs"]

_ROWS_AT_A_TIME = 65_536  # bounds a message of set_embeddings

# A loader that used the worker has reached it before, so it is running, and answers soon or not at all.
_PROBE_S = 5.0

SlotGradients = Sequence[tuple[str, NDArray[np.float32] | None]]


class EmbeddingBackend:
    """An `EmbeddingClient` of the native module with one deadline for all calls. Thread-safe.

    The client is the engine itself in an embedded job, and RPC to embedding workers in a cluster.
    """

    def __init__(
        self, client: EmbeddingClient, *, deadline_s: float, slot_modes: tuple[str, ...] = ("",)
    ) -> None:
        """`slot_modes`: the modes of slots (`SlotConfig.mode`), by the number of their bit in a lookup."""
        self._client = client
        self._deadline_s = deadline_s
        self.slot_modes = slot_modes
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
        self, reference: BatchReference, *, requires_grad: bool, slots: int = ALL_SLOTS
    ) -> LookupResult:
        """The embeddings of a batch that a loader registered, or that `lookup_direct` began with.

        `slots` selects slots by their mode, for batches that require gradients: the others are absent from
        the result.
        """
        # In a cluster this is RemoteClient (native/src/client/remote_client.cc).
        return self._client.lookup(
            reference, requires_grad=requires_grad, timeout_s=self._deadline_s, slots=slots
        )

    def lookup_direct(
        self, id_features: bytes, *, requires_grad: bool, slots: int = ALL_SLOTS
    ) -> LookupResult:
        """The embeddings of ID features built in this process; workers take turns."""
        # The client takes the index modulo the number of its workers. Without a bound on the counter, its
        # value would exceed the 32 bits of the argument after some months.
        worker_index = self._num_direct_lookups
        self._num_direct_lookups = (worker_index + 1) % (1 << 31)
        return self._client.lookup_direct(
            worker_index, id_features, requires_grad=requires_grad, timeout_s=self._deadline_s, slots=slots
        )

    def return_gradients(
        self, reference: BatchReference, gradients: SlotGradients, *, scale: float
    ) -> ReturnReport:
        """Applies a batch's gradients, divided by `scale`; returns when every server has."""
        # In a cluster: RemoteClient::ReturnGradients (native/src/client/remote_client.cc).
        return self._client.return_gradients(reference, gradients, scale=scale, timeout_s=self._deadline_s)

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
        signs = slot_signs(slots, name, ids)
        dim = slots.slots_config[name].dim
        if not isinstance(rows, np.ndarray) or rows.shape != (len(ids), dim):
            what = list(rows.shape) if isinstance(rows, np.ndarray) else type(rows).__name__
            raise InvalidArgumentError(f"rows of slot {name} are {what}: pass float32 [{len(ids)}, {dim}]")
        # Converted once, so that blocks are views and each is copied into its message only.
        values = np.ascontiguousarray(rows, np.float32)
        for begin in range(0, len(signs), _ROWS_AT_A_TIME):
            block = slice(begin, begin + _ROWS_AT_A_TIME)
            self.set_embeddings(signs[block], values[block])

    def clear(self) -> None:
        """Removes all rows from all servers."""
        self._client.clear(timeout_s=self._deadline_s)

    def sizes(self) -> list[int]:
        """Rows per parameter server."""
        return self._client.sizes(timeout_s=self._deadline_s)

    def close(self) -> None:
        """The client closes its connections when it is destroyed."""


class ClusterBackend(EmbeddingBackend):
    """Embedding workers of a cluster behind RPC. Waits for all of them on creation.

    Workers that join later are used; one that has left is asked only for the batches that it holds.
    `schema`: the hash of this process' slots, which must be theirs; "" to accept any.
    """

    def __init__(self, directory: Directory, *, schema: str = "") -> None:
        deadline_s = env.get_deadline_s()
        self._directory = directory
        # Written by discovery events and lookups on several threads: single operations of a dict are atomic.
        self._incarnations: dict[int, int] = {}  # of the workers that have an address
        self._config: TrainConfig | None = None
        self._watch = directory.watch(EMBEDDING_WORKER, self._on_event)
        self._remote: RemoteClient | None = None
        try:
            workers = directory.wait_for(EMBEDDING_WORKER, deadline_s, schema=schema)
            self._remote = RemoteClient(len(workers), wire_dtype=env.get_wire_dtype())
            # Asked once more: a restart between the first answers and the client would go unnoticed.
            for worker in directory.wait_for(EMBEDDING_WORKER, deadline_s):
                self._use(worker)
        except BaseException:
            self._watch.close()
            raise
        super().__init__(
            self._remote,
            deadline_s=deadline_s,
            slot_modes=workers[0].slot_modes,
        )

    @property
    def client(self) -> RemoteClient:
        """What the calls go through; for its counts."""
        assert self._remote is not None, "created with this"
        return self._remote

    def configure(self, config: TrainConfig, *, replace: bool = False) -> None:
        # Kept only once all servers have accepted it: a worker that joins must not get a refused one.
        super().configure(config, replace=replace)
        self._config = config

    def lookup(
        self, reference: BatchReference, *, requires_grad: bool, slots: int = ALL_SLOTS
    ) -> LookupResult:
        # A loader may have discovered a new worker before this process has.
        index = reference.worker_index
        if index not in self._incarnations:
            worker = self._directory.probe(EMBEDDING_WORKER, index, _PROBE_S)
            if worker is None:
                raise UnavailableError(
                    f"embedding worker {index} does not answer, which a data loader has used"
                )
            self._use(worker)
        return super().lookup(reference, requires_grad=requires_grad, slots=slots)

    def close(self) -> None:
        self._watch.close()

    def _use(self, worker: ServiceInfo) -> None:
        assert self._remote is not None, "created before a worker is used"
        self._remote.set_worker(worker.index, worker.address)
        self._incarnations[worker.index] = worker.incarnation

    def _on_event(self, event: ServiceEvent) -> None:
        if self._remote is None:
            return
        worker, is_new = event.info, event.info.index not in self._incarnations
        try:
            if event.kind is EventKind.LEFT:
                # A successor at its index may have joined before.
                if self._incarnations.get(worker.index) == worker.incarnation:
                    self._remote.retire_worker(worker.index)
                return
            self._use(worker)
            if is_new:
                get_default_logger().info("%s is used from now on", worker)
            if self._config is not None:  # workers keep it for servers that restart
                super().configure(self._config)
        except PersiaError as failure:
            get_default_logger().error("%s has joined and is not usable: %s", worker, failure)


def slot_signs(slots: SlotsConfig, name: str, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The signs uint64 [n] of `ids` uint64 [n] in the slot `name`: `id mod (2^(64-bits) - 1) + prefix`.

    Raises NotFoundError for an unknown slot, InvalidArgumentError for one with a hash stack, whose IDs share
    rows, and InvalidTypeError for another dtype than uint64.
    """
    slot = slots.slots_config.get(name)
    if slot is None:
        raise NotFoundError(f"there is no slot {name!r}: the slots are {', '.join(slots.slots_config)}")
    if slot.hash_stack is not None:
        raise InvalidArgumentError(
            f"slot {name} has a hash stack: several IDs share a row, which has no single owner to set it"
        )
    if not isinstance(ids, np.ndarray) or ids.dtype != np.uint64 or ids.ndim != 1:
        what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise InvalidTypeError(f"ids of slot {name} are {what}: pass a numpy array of uint64 [n]")
    # The modulus is 2^bits - 1 and not 2^bits, as in the native worker: an ID keeps the influence of all its
    # bits, and both must compute the same sign or the rows written here are never found.
    num_id_bits = 64 - slots.feature_index_prefix_bit
    prefix = np.uint64(slots.group_numbers()[name] << num_id_bits)
    signs: NDArray[np.uint64] = ids % np.uint64(2**num_id_bits - 1) + prefix
    return signs
