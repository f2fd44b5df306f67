"""Embedding workers that come and go while a job trains: new ones are used, and no batch is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER

NUM_BATCHES = 800
# The loader waits before these: for new workers, however late they start, and for those that leave.
JOINED, LEFT = 400, 760


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def num_trained(job: Any) -> int:
    return int(job.nn_worker.output.count("batch "))


def gated(folder: Path, num_batches: int, *gates: int) -> list[str]:
    """Options of a loader."""
    at = [option for gate in gates for option in ("--gate-at", str(gate))]
    return ["--batches", str(num_batches), "--gates", str(folder), *at]


def test_workers_come_and_go_while_training_runs(start_job: Any, tmp_path: Path) -> None:
    loader = gated(tmp_path, NUM_BATCHES, JOINED, LEFT)
    job = start_job("--pace", "0.02", "--staleness", "8", loaders=[loader], embedding_workers=1)
    cluster, directory = job.cluster, Directory(job.cluster.session)
    wait_until(lambda: num_trained(job) > 20, "training has not begun")
    cluster.add_embedding_worker()
    cluster.add_embedding_worker()
    assert [worker.replicas for worker in directory.wait_for(EMBEDDING_WORKER, 60.0)] == [3, 3, 3]
    (tmp_path / str(JOINED)).touch()
    at_join = num_trained(job)
    wait_until(lambda: num_trained(job) > at_join + 100, "training does not continue")
    for index in (2, 1):
        assert cluster.stop(f"embedding-worker-{index}", 120.0) == 0
        # Newcomers do not wait for it.
        wait_until(
            lambda left=index: len(directory.wait_for(EMBEDDING_WORKER, 60.0)) == left, "still counted"
        )
    (tmp_path / str(LEFT)).touch()
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    assert report["batch_ids"] == list(range(NUM_BATCHES))
    assert report["counters"]["batches_trained"] == NUM_BATCHES
    assert report["counters"]["batches_failed"] == report["counters"]["batches_released"] == 0
    assert set(report["workers"][:20]) == {0}
    assert set(report["workers"]) == {0, 1, 2}
    assert set(report["workers"][-15:]) == {0}
    for index in (1, 2):
        assert "given up" not in cluster.logs(f"embedding-worker-{index}")


def test_reproducible_runs_do_not_notice(start_job: Any, tmp_path: Path) -> None:
    def run(resize: bool) -> dict[str, Any]:
        # Paced only where a worker is to start meanwhile: the pace changes no number.
        pace = ["--pace", "0.04"] if resize else []
        loader = gated(tmp_path, 400, *((200, 380) if resize else ()))
        job = start_job("--reproducible", *pace, loaders=[loader])
        if resize:
            wait_until(lambda: num_trained(job) > 10, "training has not begun")
            job.cluster.add_embedding_worker()
            (tmp_path / "200").touch()
            at_start = num_trained(job)
            wait_until(lambda: num_trained(job) > at_start + 60, "training does not continue")
            assert job.cluster.stop("embedding-worker-1", 120.0) == 0
            (tmp_path / "380").touch()
        assert job.finish_nn_worker() == 0, job.nn_worker.output
        report: dict[str, Any] = job.reports[0]
        return report

    resized, plain = run(True), run(False)
    assert set(resized["workers"]) == {0, 1}
    assert resized["losses"] == plain["losses"]
    assert resized["digest"] == plain["digest"]
