"""Workers that are down are asked by threads, which end with the rows that they are of."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from persia.embedding.data import PersiaBatch
from persia.errors import DeadlineExceededError, UnavailableError
from persia.job.inference import _Latencies
from persia.serving.embeddings import RemoteRows
from persia.waiting import Attempts
from tests.ports import free_port
from tests.unit.serving.test_batcher import make_batch


def probes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "persia-probe"]


def test_a_probe_ends_with_its_rows() -> None:
    before = set(probes())
    rows = RemoteRows([f"127.0.0.1:{free_port()}"], deadline_s=2.0)
    batch: PersiaBatch = make_batch([1])
    for _ in range(3):
        with pytest.raises(UnavailableError, match="none of the embedding workers"):
            rows.lookup(batch.encode_id_features())
    (probe,) = set(probes()) - before  # one, however often it was found down
    del rows
    for _ in Attempts(60):
        if not probe.is_alive():
            break
    assert not probe.is_alive()


class Client:
    """An embedding worker's answers; it does not answer a lookup until `released`."""

    def __init__(self, name: str) -> None:
        self.name, self.released, self.num_asked = name, threading.Event(), 0

    def lookup_direct(self, *_: object, timeout_s: float, **__: object) -> str:
        self.num_asked += 1
        if not self.released.wait(timeout_s):
            raise DeadlineExceededError(f"{self.name} did not answer")
        return self.name

    def sizes(self, timeout_s: float) -> list[int]:
        if not self.released.wait(timeout_s):
            raise DeadlineExceededError(f"{self.name} did not answer")
        return [0]


def test_a_worker_that_hangs_is_hedged_and_gets_no_more_lookups_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        ports = []
        for _ in range(2):  # something listens there: neither refuses
            ports.append(stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1])
        rows: Any = RemoteRows([f"127.0.0.1:{port}" for port in ports], deadline_s=60.0)
        hangs, good = Client("hangs"), Client("good")
        good.released.set()
        for worker, client in zip(rows._workers, (hangs, good), strict=True):
            worker.client = client
        # It would hold the first lookup for a second, and each later one that took its turn.
        assert rows.lookup(b"") == "good"
        # On a busy machine the good one may take longer than the delay, and would be hedged as well.
        monkeypatch.setattr(_Latencies, "hedge_after_s", lambda _: 60.0)
        for _ in range(19):
            assert rows.lookup(b"") == "good"
        assert hangs.num_asked <= 2, "once more at the moment at which the first one has just ended"
        for _ in Attempts(60):  # nobody waits for its lookup any more, and it is found down all the same
            if rows._workers[0].failure is not None:
                break
        assert rows.lookup(b"") == "good"
        hangs.released.set()
        for _ in Attempts(60):
            if rows._workers[0].failure is None:
                break
        for _ in Attempts(60):
            if rows.lookup(b"") == "hangs":
                break
        for _ in Attempts(60):
            if [worker.num_pending for worker in rows._workers] == [0, 0]:
                break
        assert [worker.num_pending for worker in rows._workers] == [0, 0]


class Pool:
    """A pool whose first call gets no thread; later ones get one after `delay_s`."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s, self.futures = delay_s, list[Future[Any]]()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        self.futures.append(Future())
        if len(self.futures) > 1:
            time.sleep(self.delay_s)
            self.futures[-1].set_result(function())
        return self.futures[-1]


def test_a_hedged_lookup_that_no_thread_has_begun_is_cancelled() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        rows: Any = RemoteRows([f"127.0.0.1:{s.getsockname()[1]}" for s in servers], deadline_s=60.0)
        rows._pool = pool = Pool(delay_s=0.2)
        for worker in rows._workers:
            worker.client = Client("good")
            worker.client.released.set()
        assert rows.lookup(b"") == "good"
        queued, _ = pool.futures
        assert queued.cancelled()
        assert [worker.num_pending for worker in rows._workers] == [0, 0]
        assert min(rows._latencies._seconds) >= 0.2, "the time in the queue is part of it"


def test_the_delay_before_a_second_worker_is_that_of_slow_lookups() -> None:
    latencies = _Latencies()
    assert latencies.hedge_after_s() == 0.05, "until enough lookups are known"
    for number in range(100):
        latencies.add(0.1 if number < 4 else 0.01)
    assert latencies.hedge_after_s() == 0.01
    for _ in range(20):
        latencies.add(0.2)
    assert latencies.hedge_after_s() == 0.2
    for _ in range(300):
        latencies.add(0.0001)
    assert latencies.hedge_after_s() == 0.002, "never below what a scheduler takes"
