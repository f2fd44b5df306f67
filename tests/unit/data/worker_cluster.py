"""A small cluster in this process, for tests of what a rank does when its embedding workers change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from persia import _native
from persia._native import BatchReference
from persia.errors import (
    UnavailableError,
)
from persia.messaging.discovery import ServiceEvent, ServiceInfo
from persia.messaging.interface import Registration
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.pipeline import workers as worker_module
from persia.pipeline.backend import ClusterBackend

IDS = _native.encode_id_features(
    1, [("a", np.array([5], dtype=np.uint64), np.array([0, 1], dtype=np.uint32))]
)
GRADIENT = [("a", np.ones((1, 2), dtype=np.float32))]


class Cluster:
    """A parameter server and two embedding workers, in this process."""

    def __init__(self) -> None:
        self.server = _native.ParameterServer(
            replica_index=0, replica_size=1, capacity=100, num_internal_shards=1
        )
        address = self.server_address = f"127.0.0.1:{self.server.start('127.0.0.1', 0)}"
        self.workers, self.addresses, self.client = [], [], _native.RemoteClient(2)
        for index in range(2):
            slots = [_native.SlotConfig(name="a", dim=2)]
            worker = _native.EmbeddingWorker(slots=slots, feature_index_prefix_bit=8, num_servers=1)
            worker.set_server(0, address)
            self.addresses.append(f"127.0.0.1:{worker.start('127.0.0.1', 0)}")
            self.client.set_worker(index, self.addresses[-1])
            self.workers.append(worker)
        self.client.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))


class WorkerDirectory:
    """Discovery of the workers of a `Cluster`. `here` are those that answer."""

    def __init__(self, cluster: Cluster) -> None:
        self.here = [
            info(index, worker.incarnation, cluster.addresses[index])
            for index, worker in enumerate(cluster.workers)
        ]
        self.tell: Callable[[ServiceEvent], None] = lambda event: None

    def watch(self, role: str, callback: Callable[[ServiceEvent], None]) -> Registration:
        self.tell = callback
        return Registration(lambda: None)

    def wait_for(self, role: str, timeout_s: float, *, schema: str = "") -> list[ServiceInfo]:
        return list(self.here)

    def probe(self, role: str, index: int, timeout_s: float) -> ServiceInfo | None:
        return next((worker for worker in self.here if worker.index == index), None)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for worker in cluster.workers:
        worker.stop()
    cluster.server.stop()


@pytest.fixture
def directory(cluster: Cluster) -> WorkerDirectory:
    return WorkerDirectory(cluster)


@pytest.fixture
def backend(directory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterBackend]:
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "120")
    backend = ClusterBackend(directory)
    yield backend
    backend.close()


def info(index: int, incarnation: int, address: str) -> ServiceInfo:
    return ServiceInfo(
        role=EMBEDDING_WORKER,
        index=index,
        replicas=2,
        incarnation=incarnation,
        address=address,
        slot_modes=("",),
        schema="",
        pid=1,
        status_address="",
        has_rows=False,
    )


def register(cluster: Cluster, index: int) -> BatchReference:
    """As a loader does."""
    worker = cluster.workers[index]
    return BatchReference(index, worker.incarnation, worker.register_batch(0, IDS))


def away(*_: Any) -> None:
    raise UnavailableError("the broker is away")


def seem_dead(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    monkeypatch.setattr(worker_module, "is_down", lambda address: address in addresses)
