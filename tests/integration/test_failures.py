"""When processes die: typed errors that name them, or recovery, and never a hang."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.job import trained_by
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER
from persia.observability.status import job_status
from persia.testing import LocalCluster

from .conftest import EMBEDDING_CONFIG, JOBS
from .watching import all_processes, get


def await_output(process: Any, text: str, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in process.output:
        assert time.monotonic() < deadline, f"{process.name} never printed {text!r}:\n{process.output}"
        assert process.exit_code is None, f"{process.name} ended:\n{process.output}"
        time.sleep(0.02)


def test_killed_loader_is_named_after_the_silence(start_job: Any) -> None:
    job = start_job(loaders=[["--batches", "20"], ["--batches", "500", "--hang-after", "10"]])
    await_output(job.loaders[1], "hanging")
    job.loaders[1].send_signal(signal.SIGKILL)
    assert job.finish_nn_worker() != 0
    (report,) = job.reports
    assert "UnavailableError: data loader 1 of 2 was silent for 2 s" in report["error"]
    assert "data loader 1 of 2 was silent" in job.nn_worker.output
    assert report["counters"]["batches_trained"] == 30
    assert report["threads"] == []


def test_killed_loader_is_named_while_another_goes_on(start_job: Any) -> None:
    job = start_job(loaders=[["--batches", "1000000"], ["--batches", "500", "--hang-after", "10"]])
    await_output(job.loaders[1], "hanging")
    job.cluster.kill("data-loader-1")
    assert job.finish_nn_worker() != 0
    (report,) = job.reports
    assert "UnavailableError: data loader 1 of 2 was silent for 2 s" in report["error"]


def test_silent_loader_that_lives_is_waited_for(start_job: Any) -> None:
    job = start_job(loaders=[["--batches", "20", "--hang-after", "10"]])
    await_output(job.loaders[0], "hanging")
    time.sleep(5)  # more than twice the silence of 2 s
    assert job.nn_worker.exit_code is None
    job.loaders[0].send_signal(signal.SIGINT)
    assert job.finish_nn_worker() != 0
    assert "data loader 0 ended with an error after 10 batches: KeyboardInterrupt" in job.reports[0]["error"]


def test_error_in_the_training_script_is_not_the_loaders(start_job: Any) -> None:
    job = start_job("--fail-after", "5", loaders=[["--batches", "500"]])
    assert job.finish_nn_worker() == 1
    assert "ValueError: boom after 5 batches" in job.nn_worker.output
    assert job.cluster.wait(job.loaders[0], 240.0) == os.EX_TEMPFAIL, job.loaders[0].output
    assert re.search(r"stopped sending after .*ValueError: boom after 5 batches", job.loaders[0].output)
    assert "Traceback" not in job.loaders[0].output


def test_error_in_a_loader_reaches_the_rank(start_job: Any) -> None:
    job = start_job(loaders=[["--batches", "20", "--fail-after", "5"]])
    assert job.finish_nn_worker() != 0
    (report,) = job.reports
    assert "data loader 0 ended with an error after 5 batches: ValueError: row 17" in report["error"]
    assert report["counters"]["batches_trained"] == 5
    assert "row 17 of the file is broken" in job.loaders[0].output


def test_interrupt_ends_the_rank_in_order(start_job: Any) -> None:
    job = start_job(loaders=[["--batches", "100000"]])
    await_output(job.nn_worker, "batch 20")
    job.nn_worker.send_signal(signal.SIGINT)
    assert job.finish_nn_worker() != 0
    (report,) = job.reports
    counters = report["counters"]
    assert report["error"].startswith("KeyboardInterrupt")
    assert report["threads"] == []
    ended = counters["batches_trained"] + counters["batches_released"]
    assert counters["batches_received"] == ended
    assert report["staleness"]["in_flight"] == 0
    assert job.cluster.wait(job.loaders[0], 240.0) == os.EX_TEMPFAIL, job.loaders[0].output
    assert re.search("stopped sending after .*KeyboardInterrupt", job.loaders[0].output)


def test_sigterm_ends_the_rank_in_order(start_job: Any) -> None:
    job = start_job(loaders=[["--batches", "100000"]])
    await_output(job.nn_worker, "batch 20")
    job.nn_worker.send_signal(signal.SIGTERM)
    job.finish_nn_worker()
    (report,) = job.reports
    assert report["error"] == f"Terminated: {128 + signal.SIGTERM}"
    assert report["threads"] == []


def test_sigterm_does_not_wait_for_a_dead_worker(start_job: Any) -> None:
    """Supervisors end all processes together, and kill what has not ended a few seconds later."""
    job = start_job(loaders=[["--batches", "100000"]], env={"PERSIA_DEADLINE_SEC": "600"})
    await_output(job.nn_worker, "batch 20")
    job.cluster.kill("embedding-worker-0")
    job.cluster.stop(job.nn_worker.name, timeout_s=60)


@pytest.mark.parametrize("role", ["embedding-parameter-server", "embedding-worker"])
def test_bug_15_dead_server_is_a_typed_error(start_job: Any, role: str) -> None:
    job = start_job(loaders=[["--batches", "100000"]], env={"PERSIA_DEADLINE_SEC": "60"})
    await_output(job.nn_worker, "batch 20")
    job.cluster.kill(f"{role}-0")
    assert job.finish_nn_worker() != 0
    error = job.reports[0]["error"]
    assert error.split(":")[0] in {"UnavailableError", "DeadlineExceededError"}
    # A rank talks to embedding workers only: it may have given up before the worker could say who is missing.
    # It may also be the loader who was the first to notice.
    assert re.search(rf"embedding[- ]worker 0|{role} 0", error)
    # Calls under way end by their own deadline, which is longer than a failed context waits.
    calls = ("persia-lookup", "persia-gradient", "persia-reaper")
    assert [name for name in job.reports[0]["threads"] if not name.startswith(calls)] == []


def test_batches_of_a_killed_worker_continue_on_the_other(start_job: Any, tmp_path: Path) -> None:
    """The worker is not started again."""
    gate = ("--gate", str(tmp_path / "gate"), "--gate-at", "100")
    job = start_job(*gate, loaders=[["--batches", "300"]], embedding_workers=2)
    await_output(job.nn_worker, "batch 50")
    job.cluster.kill("embedding-worker-1")
    (tmp_path / "gate").touch()
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    assert sorted(report["batch_ids"]) == list(range(300))
    assert report["counters"]["batches_trained"] == report["counters"]["gradients_submitted"] == 300
    assert set(report["workers"][:50]) == {0, 1}
    assert set(report["workers"][-100:]) == {0}
    assert report["counters"]["batches_failed"] == 0
    assert job.cluster.wait(job.loaders[0], 120) == 0


def test_batches_of_the_only_worker_continue_on_its_successor(start_job: Any, tmp_path: Path) -> None:
    gate = ("--gate", str(tmp_path / "gate"), "--gate-at", "100")
    job = start_job(*gate, loaders=[["--batches", "300"]])
    await_output(job.nn_worker, "batch 50")
    job.cluster.restart("embedding-worker-0")
    processes = all_processes(job.cluster, 4)
    restarts = {status.info.role: status for status in job_status(processes)}
    assert restarts[EMBEDDING_PARAMETER_SERVER].values["restarts"] == 0
    worker = restarts[EMBEDDING_WORKER]
    assert worker.values["restarts"] == 1
    page = get(f"http://{worker.info.status_address}/metrics")
    assert re.search(r'^persia_restarts{.*role="embedding-worker".*} 1.0$', page, re.MULTILINE)
    (tmp_path / "gate").touch()
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    assert sorted(report["batch_ids"]) == list(range(300))
    assert report["counters"]["batches_failed"] == 0
    assert re.search(r"embedding-worker 0 of 1 at .* is used from now on", job.nn_worker.output)


def test_lost_rows_end_the_training_and_keep_the_checkpoint(start_job: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    options = ("--dump", str(checkpoint), "--dump-after", "20", "--dump-at-the-end", "--pace", "0.01")
    job = start_job(*options, loaders=[["--batches", "3000"]])
    await_output(job.nn_worker, "dumped\n")
    before = (checkpoint / "manifest.json").read_bytes()
    job.cluster.restart("embedding-parameter-server-0")
    assert job.finish_nn_worker() != 0
    (report,) = job.reports
    assert report["error"].startswith("RowsLostError: embedding-parameter-server 0 of 1")
    assert report["counters"]["batches_trained"] < 3000
    assert report["refused"].startswith("RowsLostError"), "a dump would have replaced a good checkpoint"
    assert (checkpoint / "manifest.json").read_bytes() == before


def test_lost_rows_roll_the_job_back(tmp_path: Path) -> None:
    """To its last checkpoint, by whatever starts ranks and data loaders again."""
    env = {"OMP_NUM_THREADS": "1", "PERSIA_DEADLINE_SEC": "120"}
    with LocalCluster(embedding_config=EMBEDDING_CONFIG, env=env) as cluster:

        def start() -> tuple[Any, Any]:
            loader = cluster.start_loader(JOBS / "loader.py", "--total", "300", "--resume")
            arguments = (str(tmp_path), "20", "0.01", "300")
            return loader, cluster.start_nn_worker(JOBS / "recovered.py", *arguments)

        loader, rank = start()
        await_output(rank, "step 50\n")
        cluster.restart("embedding-parameter-server-0")
        assert cluster.wait(rank, 240) == 75, rank.output
        assert f"after the newest checkpoint of {tmp_path / 'recovery'}" in rank.output
        assert cluster.wait(loader, 240) == 75, loader.output
        loader, rank = start()
        assert cluster.wait(rank, 240) == 0, rank.output
        assert cluster.wait(loader, 240) == 0, loader.output
    trained, wasted = trained_by(tmp_path / "rank0.log")
    assert sorted(trained) == list(range(300)), "each batch exactly once"
    assert wasted > 0


def test_restarted_parameter_server_is_found_again(start_job: Any) -> None:
    job = start_job("--on-lost-rows", "continue", loaders=[["--batches", "300"]])
    await_output(job.nn_worker, "batch 50")
    job.cluster.restart("embedding-parameter-server-0")
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    # Its rows are gone, so some gradients have found none; every batch was trained all the same.
    assert report["counters"]["batches_trained"] == 300


def test_dead_nn_worker_ends_its_loader(start_job: Any) -> None:
    env = {"PERSIA_DEADLINE_SEC": "60", "PERSIA_LOG_FORMAT": "json"}
    job = start_job(loaders=[["--batches", "100000"]], env=env)
    await_output(job.nn_worker, "batch 20")
    job.nn_worker.send_signal(signal.SIGKILL)
    assert job.cluster.wait(job.loaders[0], 120) != 0
    assert "UnavailableError" in job.loaders[0].output
    assert "NN worker 0" in job.loaders[0].output
    records = [json.loads(line) for line in job.loaders[0].output.splitlines() if line.startswith("{")]
    (lost,) = [record for record in records if "was not sent" in record["message"]]
    assert (lost["level"], lost["role"], lost["replica"]) == ("error", "data-loader", 0)
    assert lost["batch_id"] >= 20
    assert lost["message"].startswith(f"batch {lost['batch_id']} ")
