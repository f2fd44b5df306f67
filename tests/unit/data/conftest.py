"""A backend and a context without any embeddings, whose calls a test can hold up and make fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from persia._native import BatchReference
from persia.pipeline.counters import Counters
from persia.pipeline.lookup import LeaseReaper
from persia.pipeline.prefetch import Prefetcher
from tests.threads import expect_ended
from tests.unit.data import worker_cluster


class FakeBackend:
    """Records calls by reference number. `on_lookup` and `on_return` run inside the calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.looked_up: list[int] = []
        self.returned: list[int] = []
        self.released: list[int] = []
        self.on_lookup: Callable[[int], None] = lambda number: None
        self.on_return: Callable[[int], None] = lambda number: None
        self.num_nonfinite_slots = 0
        self._num_direct = 0

    slot_modes = ("",)

    def forget(self, reference: BatchReference) -> None:
        pass

    def configure(self, config: Any, *, replace: bool = False) -> None:
        pass

    def lookup(
        self,
        reference: BatchReference,
        *,
        requires_grad: bool,
        slots: int = 0,
        id_features: bytes | memoryview | None = None,
        as_rows: bool = False,
    ) -> Any:
        self.on_lookup(reference.reference)
        with self.lock:
            self.looked_up.append(reference.reference)
        return SimpleNamespace(reference=reference, batch_size=1, slots=[])

    def lookup_direct(
        self, id_features: bytes, *, requires_grad: bool, slots: int = 0, as_rows: bool = False
    ) -> Any:
        with self.lock:
            self._num_direct += 1
            number = self._num_direct
        return self.lookup(BatchReference(0, 1, number), requires_grad=requires_grad)

    def return_gradients(self, reference: BatchReference, gradients: Any, *, scale: float) -> Any:
        self.on_return(reference.reference)
        with self.lock:
            self.returned.append(reference.reference)
        return SimpleNamespace(
            staleness=2,
            lookups=[(0xFFFFFFFF, 2)],
            num_updated=3,
            num_missing=1,
            num_nonfinite_slots=self.num_nonfinite_slots,
            num_skipped_slots=1,
        )

    def release(self, reference: BatchReference) -> None:
        with self.lock:
            self.released.append(reference.reference)

    def set_embeddings(self, signs: Any, rows: Any) -> None:
        pass

    def clear(self) -> None:
        pass

    def sizes(self) -> list[int]:
        return [0]

    def close(self) -> None:
        pass


class FakeHost:
    """What prefetching needs of a context: a backend, counters, and a reaper that it closes."""

    def __init__(self, backend: FakeBackend, *, training: bool = True) -> None:
        self.backend = backend
        self.training = training
        self.counters = Counters()
        self.reaper = LeaseReaper(backend, self.counters)
        self.prefetchers: list[Prefetcher] = []

    def close(self) -> None:
        for prefetcher in self.prefetchers:
            prefetcher.close(30)
        self.reaper.close(30)


@pytest.fixture
def fake_backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def fake_host(fake_backend: FakeBackend) -> Iterator[FakeHost]:
    host = FakeHost(fake_backend)
    yield host
    host.close()


@pytest.fixture
def evaluating_host(fake_backend: FakeBackend) -> Iterator[FakeHost]:
    host = FakeHost(fake_backend, training=False)
    yield host
    host.close()


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Every test must end the threads it has started."""
    before = set(threading.enumerate())
    yield
    expect_ended(before)


cluster, directory, backend = worker_cluster.cluster, worker_cluster.directory, worker_cluster.backend
