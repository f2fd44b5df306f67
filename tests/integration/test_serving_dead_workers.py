"""A server whose rows are at embedding workers of a job, while they die."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from persia import env
from persia.embedding.data import PersiaBatch
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.serving import RemoteRows
from persia.testing import LocalCluster

from .test_serving import SLOTS, START_S, dump, make_batch, no_cluster, start

__all__ = ["no_cluster", "start"]  # fixtures


def lookups_pass_by_a_dead_worker(addresses: list[str]) -> None:
    """The first worker is dead, the second is not."""
    ids = PersiaBatch.from_bytes(make_batch([20])).encode_id_features()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("persia.job.inference._TRY_S", 240.0)  # a retry until the time-out takes as long
        started = time.monotonic()
        RemoteRows(addresses, deadline_s=240).lookup(ids)
        assert time.monotonic() - started < 120, "a refused connection fails at once"
    rows = RemoteRows(addresses, deadline_s=240)  # whose probes have the usual time-out
    dead = rows._workers[0]
    most = time.monotonic() + START_S
    while dead.failure is None:
        assert time.monotonic() < most, "it is not found down"
        rows.lookup(ids)
    asked: list[str] = []
    dead.client = Counting(dead.client, asked)
    least = time.monotonic() + 3
    while time.monotonic() < least or "sizes" not in asked:
        assert time.monotonic() < most, "the probe asks"
        rows.lookup(ids)
        time.sleep(0.05)
    assert "lookup_direct" not in asked, "no request finds out whether the worker is back"


class Counting:
    """A client whose calls are noted."""

    def __init__(self, client: Any, calls: list[str]) -> None:
        self._client, self._calls = client, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._client, name)


def test_rows_of_servers_and_workers_that_die(start: Any, tmp_path: Path) -> None:
    with LocalCluster(embedding_config=SLOTS, embedding_workers=2, parameter_servers=2) as cluster:
        patch = pytest.MonkeyPatch()
        for name in ("PERSIA_NATS_URL", "PERSIA_JOB_NAME"):
            patch.setenv(name, cluster.env[name])
        env.reload_env()
        dump(tmp_path / "model", factor=1.0, step=1)
        workers = Directory(cluster.session).wait_for(EMBEDDING_WORKER, START_S)
        patch.undo()
        env.reload_env()
        addresses = [argument for w in workers for argument in ("--embedding-worker", w.address)]
        served = start(str(tmp_path / "model"), *addresses, "--timeout", "4")
        assert served.infer(make_batch([10, 99])) == ("1", [3.0, 0.0])
        cluster.kill("embedding-worker-0")
        for _ in range(6):
            assert served.infer(make_batch([20]))[1] == [7.0], "the other one answers"
        assert served.client.is_server_ready()
        lookups_pass_by_a_dead_worker([w.address for w in workers])
        cluster.kill("embedding-worker-1")
        refusal = served.refusal(make_batch([20]))
        assert "UNAVAILABLE] none of the embedding workers" in refusal
        assert workers[0].address in refusal
        served.wait_until(lambda: not served.client.is_server_ready())
