"""The native classes of the simulation, with the interfaces of persia._native that the product uses."""

from __future__ import annotations

import ctypes
from typing import Any

from benchmarks.simulation.kernel import Kernel
from persia._native import BatchReference

_LINK = ("alone", "replicating", "broken", "fenced")
_LOG = ("following", "taken over", "renounced", "unfit")
_MAX_IDS = 4096


class ParameterServer:
    """persia::server::ParameterServer of the process that makes it."""

    def __init__(self, index: int, replicas: int, deadline_s: float, *, is_standby: bool) -> None:
        self.kernel = Kernel.current
        self.library = self.kernel.library
        self.handle = self.library.server(
            self.kernel.process.number, index, replicas, int(deadline_s * 1000), is_standby
        )
        self.incarnation = self.library.server_incarnation(self.handle)

    def start(self, host: str) -> int:
        return self.kernel.call(lambda p: self.library.server_start(p, self.handle, host.encode()))

    def stop(self) -> None:
        self.kernel.call(lambda p: self.library.server_stop(p, self.handle))

    def attach_standby(self, address: str, incarnation: int) -> None:
        self.kernel.call(lambda p: self.library.server_attach(p, self.handle, address.encode(), incarnation))

    def release_standby(self) -> None:
        self.kernel.call(lambda p: self.library.server_release(p, self.handle))

    def fence(self, reason: str) -> None:
        self.kernel.call(lambda p: self.library.server_fence(p, self.handle, reason.encode()))

    def follow(self, primary: int) -> None:
        self.kernel.call(lambda p: self.library.log_follow(p, self.handle, primary))

    def take_over(self, primary_has_ended: bool) -> None:
        self.kernel.call(lambda p: self.library.log_take_over(p, self.handle, primary_has_ended))

    def renounce(self) -> bool:
        return bool(self.kernel.call(lambda p: self.library.log_renounce(p, self.handle)))

    @property
    def replication(self) -> str:
        state = _LINK[self.library.server_state(self.handle)]
        if state != "replicating":
            return state
        if not self.library.server_serves(self.handle):
            return "stalled"
        return "copying" if self.library.server_is_copying(self.handle) else state

    @property
    def standby_state(self) -> str:
        state = self.library.log_state(self.handle)
        if state < 0:
            raise ValueError("the server was made without is_standby")
        return _LOG[state]

    @property
    def standby_failure(self) -> str:
        return "see the trace"

    @property
    def has_copy(self) -> bool:
        if self.library.log_state(self.handle) < 0:
            raise ValueError("the server was made without is_standby")
        return bool(self.library.log_has_copy(self.handle))

    @property
    def is_standby_with_rows(self) -> bool:
        return self.library.log_state(self.handle) == 0 and bool(self.library.log_has_copy(self.handle))

    @property
    def silent_for_s(self) -> float:
        return float(self.library.log_silent_for(self.handle))

    def stats(self) -> dict[str, int]:
        names = ("num_rows", "num_updates", "num_repeated_updates")
        return {name: self.library.server_count(self.handle, name.encode()) for name in names}

    def digest(self) -> int:
        return self.kernel.call(lambda p: self.library.server_digest(p, self.handle))


class EmbeddingWorker:
    """persia::worker::EmbeddingWorker behind its service."""

    def __init__(self, num_servers: int, max_waiting: int) -> None:
        self.kernel = Kernel.current
        self.library = self.kernel.library
        self.handle = self.library.worker(self.kernel.process.number, num_servers, max_waiting)
        self.incarnation = self.library.worker_incarnation(self.handle)

    def set_server(self, index: int, address: str) -> None:
        self.library.worker_set_server(self.handle, index, address.encode())

    def start(self, host: str) -> int:
        return self.kernel.call(lambda p: self.library.worker_start(p, self.handle, host.encode()))

    def register_batch(self, loader_index: int, id_features: bytes) -> int:
        ids = bytes(id_features)
        return self.kernel.call(
            lambda p: self.library.worker_register(p, self.handle, loader_index, ids, len(ids))
        )

    def release_waiting(self) -> int:
        return self.kernel.call(lambda p: self.library.worker_release_waiting(p, self.handle))

    def count(self, name: str) -> int:
        return int(self.library.worker_count(self.handle, name.encode()))


class LookupResult:
    """A batch that was looked up, with the gradients that follow from it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        worker, incarnation, reference = ctypes.c_uint32(), ctypes.c_uint64(), ctypes.c_uint64()
        Kernel.current.library.batch(
            handle, ctypes.byref(worker), ctypes.byref(incarnation), ctypes.byref(reference)
        )
        self.reference = BatchReference(worker.value, incarnation.value, reference.value)


class RemoteClient:
    """persia::client::RemoteClient; `gradients` is a LookupResult."""

    def __init__(self, num_workers: int, **_options: object) -> None:
        self.kernel = Kernel.current
        self.library = self.kernel.library
        self.handle = self.library.client(self.kernel.process.number, num_workers)

    def _worker(self, index: int, action: int, address: str = "") -> None:
        self.kernel.call(
            lambda p: self.library.client_worker(p, self.handle, index, action, address.encode())
        )

    def set_worker(self, index: int, address: str) -> None:
        self._worker(index, 0, address)

    def retire_worker(self, index: int) -> None:
        self._worker(index, 1)

    def drop_worker(self, index: int) -> None:
        self._worker(index, 2)

    def configure(self, _config: object, *, replace: bool, timeout_s: float) -> None:
        self.kernel.call(lambda p: self.library.client_configure(p, self.handle, timeout_s))

    def lookup(
        self,
        reference: BatchReference,
        *,
        requires_grad: bool,
        timeout_s: float,
        slots: int,
        as_rows: bool = False,
    ) -> LookupResult:
        key = (reference.worker_index, reference.worker_incarnation, reference.reference)
        return LookupResult(
            self.kernel.call(lambda p: self.library.client_lookup(p, self.handle, *key, timeout_s))
        )

    def lookup_direct(
        self,
        worker_index: int,
        id_features: bytes | memoryview,
        *,
        requires_grad: bool,
        timeout_s: float,
        slots: int = 0,
        original: BatchReference | None = None,
        as_rows: bool = False,
    ) -> LookupResult:
        ids = bytes(id_features)
        first = (0, 0, 0)
        if original is not None:
            first = (original.worker_index, original.worker_incarnation, original.reference)
        return LookupResult(
            self.kernel.call(
                lambda p: self.library.client_lookup_direct(
                    p, self.handle, worker_index, ids, len(ids), *first, timeout_s
                )
            )
        )

    def return_gradients(
        self, reference: BatchReference, gradients: LookupResult, *, scale: float, timeout_s: float
    ) -> None:
        key = (reference.worker_index, reference.worker_incarnation, reference.reference)
        self.kernel.call(
            lambda p: self.library.client_return(p, self.handle, gradients.handle, *key, timeout_s)
        )

    def fail_exact(self, _reference: BatchReference, _what: str) -> None:
        """No batch is replayed here."""

    def count_rows(self, timeout_s: float) -> int:
        return self.kernel.call(lambda p: self.library.client_count_rows(p, self.handle, timeout_s))

    def release(self, reference: BatchReference, *, timeout_s: float) -> None:
        key = (reference.worker_index, reference.worker_incarnation, reference.reference)
        self.kernel.call(lambda p: self.library.client_release(p, self.handle, *key, timeout_s))


def id_features(library: Any, number: int) -> bytes:
    """ID features of batch `number`, a function of the number alone."""
    buffer = ctypes.create_string_buffer(_MAX_IDS)
    size = library.id_features(number, buffer, _MAX_IDS)
    return buffer.raw[:size]
