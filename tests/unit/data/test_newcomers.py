"""Embedding workers that join, and those that a rank does not know yet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from persia import _native
from persia._native import BatchReference
from persia.errors import (
    UnavailableError,
)
from persia.messaging.discovery import EventKind, ServiceEvent, ServiceInfo
from persia.pipeline.backend import ClusterBackend
from persia.pipeline.failover import Newcomers
from persia.waiting import Attempts
from tests.unit.data.worker_cluster import (
    IDS,
    Cluster,
    WorkerDirectory,
    away,
    info,
    register,
)


@pytest.fixture(params=[lambda *_: None, away], ids=["silent", "away"])
def probes(directory: WorkerDirectory, request: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Workers do not answer. The second look for one fails, as it would be followed by many."""
    indices: list[int] = []

    def probe(role: str, index: int, timeout_s: float) -> ServiceInfo | None:
        indices.append(index)
        assert len(indices) == 1, "it waits"
        answer: ServiceInfo | None = request.param()
        return answer

    monkeypatch.setattr(directory, "probe", probe)
    return indices


def test_a_worker_that_a_loader_found_first_is_waited_for(
    cluster: Cluster, backend: ClusterBackend, directory: WorkerDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank may have lost its broker at that moment."""
    reference, probe = register(cluster, 1), directory.probe
    del backend._workers._used[1]
    answers: list[Any] = [probe, lambda *_: None, away]
    monkeypatch.setattr(directory, "probe", lambda *arguments: answers.pop()(*arguments))
    result = backend.lookup(reference, requires_grad=True, id_features=IDS)
    assert result.reference.worker_index == 1
    assert answers == []


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_batch_of_another_incarnation_continues_after_one_look(
    backend: ClusterBackend, probes: list[int], requires_grad: bool
) -> None:
    """To wait for the whole deadline would end the rank."""
    stale = BatchReference(1, 4711, 1)
    result = backend.lookup(stale, requires_grad=requires_grad, id_features=IDS)
    assert probes == [1]
    if requires_grad:
        backend.release(result.reference)


def test_an_evaluation_does_not_wait_for_an_unknown_worker(
    backend: ClusterBackend, probes: list[int]
) -> None:
    del backend._workers._used[1]
    backend.lookup(BatchReference(1, 4711, 1), requires_grad=False, id_features=IDS)
    assert probes == [1]


def test_a_release_does_not_wait_for_an_unknown_worker(
    backend: ClusterBackend, probes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread releases all batches of a context."""
    del backend._workers._used[1]
    monkeypatch.setattr(backend, "is_gone", lambda _: False)
    with pytest.raises(UnavailableError):
        backend.release(BatchReference(1, 4711, 1))
    assert probes == [1]


def test_a_newcomer_does_not_bring_back_an_old_configuration(
    backend: ClusterBackend, directory: WorkerDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = _native.TrainConfig(optimizer="sgd", lr=1.0), _native.TrainConfig(optimizer="sgd", lr=0.5)
    backend.configure(old)

    called = threading.Event()

    def call_any(call: Callable[[], Any]) -> None:
        backend._config = new  # by the script's thread, meanwhile
        called.set()

    monkeypatch.setattr(backend, "_call_any", call_any)
    directory.tell(ServiceEvent(EventKind.JOINED, info(1, 99, directory.here[1].address)))
    assert called.wait(60)
    backend._newcomers.close()
    assert backend._config is new


def test_a_newcomer_that_has_died_does_not_hide_its_successor(
    cluster: Cluster, backend: ClusterBackend, directory: WorkerDirectory, log: Any
) -> None:
    """The rank would not hear of it before the deadline of the newcomer's configuration."""
    backend.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = f"127.0.0.1:{listener.getsockname()[1]}"
    for index in range(2):
        cluster.workers[index].stop()
    directory.tell(ServiceEvent(EventKind.JOINED, info(0, 98, nowhere)))
    successor = _native.EmbeddingWorker(
        slots=[_native.SlotConfig(name="a", dim=2)], feature_index_prefix_bit=8, num_servers=1
    )
    successor.set_server(0, cluster.server_address)
    address = f"127.0.0.1:{successor.start('127.0.0.1', 0)}"
    try:
        for index in range(2):
            directory.tell(ServiceEvent(EventKind.JOINED, info(index, successor.incarnation, address)))
        assert backend.lookup_direct(IDS, requires_grad=True).slots[0].rows.shape == (1, 2)
    finally:
        successor.stop()
    assert "is not usable" not in log.text


def test_newcomers_share_one_thread_which_ends_with_the_backend(
    backend: ClusterBackend, directory: WorkerDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))
    calls = threading.Semaphore(0)

    def call_any(call: Callable[[], Any]) -> None:
        calls.release()
        raise UnavailableError("the newcomer does not answer")

    monkeypatch.setattr(backend, "_call_any", call_any)
    for incarnation in range(100, 120):
        directory.tell(ServiceEvent(EventKind.JOINED, info(0, incarnation, directory.here[0].address)))
    assert calls.acquire(timeout=60)

    def configurers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "persia-configure-newcomer"]

    assert len(configurers()) == 1
    backend.close()
    assert configurers() == []
    directory.tell(ServiceEvent(EventKind.JOINED, info(0, 120, directory.here[0].address)))
    assert configurers() == []


def test_a_newcomer_is_configured_after_an_unforeseen_error(log: Any) -> None:
    calls: list[float] = []
    served = threading.Event()

    def configure(timeout_s: float) -> None:
        calls.append(timeout_s)
        if len(calls) == 1:
            raise ValueError("no number")
        if len(calls) == 2:
            raise UnavailableError("not yet")
        served.set()

    newcomers = Newcomers(configure, deadline_s=60.0)
    try:
        newcomers.add(info(0, 1, "h:1"))
        for _ in Attempts(60.0, pause_s=0.01):
            if "no number" in log.text:
                break
        newcomers.add(info(0, 2, "h:2"))
        assert served.wait(60)
    finally:
        newcomers.close()


def test_a_newcomer_that_is_refused_does_not_stop_the_events(
    backend: ClusterBackend, directory: WorkerDirectory, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend._workers, "_use", away)
    directory.tell(ServiceEvent(EventKind.JOINED, info(1, 99, "h:1")))
    assert "is not usable: the broker is away" in log.text
