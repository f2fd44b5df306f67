"""consistency="exact" in a cluster: the results of synchronous training with batches in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .test_failures import await_output
from .test_standby import await_log, await_standbys

PATIENT = {"PERSIA_DEADLINE_SEC": "100"}
BATCHES = 24
EXACT = ("--reproducible", "--consistency", "exact")
RESULTS = ("batch_ids", "losses", "digest")


def trained(run_job: Any, *options: str, **servers: Any) -> dict[str, Any]:
    servers = {"loaders": [BATCHES], "parameter_servers": 2, "env": PATIENT, **servers}
    (report,) = run_job("--reproducible", *options, **servers).reports
    assert report["counters"]["batches_trained"] == BATCHES
    return dict(report)


def test_results_equal_synchronous_ones_to_the_last_bit(run_job: Any) -> None:
    expected = trained(run_job, "--consistency", "synchronous")
    # Batches wait before the first step, so that lookups miss the updates of all of them.
    for options, workers in ((["4", "--ahead", "4"], 1), (["16"], 2)):
        report = trained(run_job, *EXACT, "--staleness", *options, embedding_workers=workers)
        for result in RESULTS:
            assert report[result] == expected[result], (options, result)
        assert set(report["staleness"]["by_mode"]) == {"exact"}
    hybrid = trained(run_job, "--staleness", "4", "--ahead", "4")
    assert hybrid["losses"] != expected["losses"], "the servers' rows are stale"


def test_a_killed_worker_changes_no_result(start_job: Any, run_job: Any, tmp_path: Path) -> None:
    """Its batches continue on the other one, with the updates in their order."""
    expected = trained(run_job, "--consistency", "synchronous")
    gate = ("--gate", str(tmp_path / "gate"), "--gate-at", "12")
    options = (*EXACT, "--staleness", "8", *gate)
    job = start_job(
        *options, loaders=[["--batches", str(BATCHES)]], parameter_servers=2, embedding_workers=2, env=PATIENT
    )
    await_output(job.nn_worker, "batch 11")
    job.cluster.kill("embedding-worker-1")
    (tmp_path / "gate").touch()
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    assert report["counters"]["batches_failed"] == 0
    assert set(report["workers"][:12]) == {0, 1}
    for result in RESULTS:
        assert report[result] == expected[result], result


def test_a_server_that_is_started_again_ends_the_training(start_job: Any, tmp_path: Path) -> None:
    gate = ("--gate", str(tmp_path / "gate"), "--gate-at", "12")
    options = (*EXACT, "--staleness", "8", "--ahead", "4", *gate, "--on-lost-rows", "continue")
    job = start_job(*options, loaders=[["--batches", "3000"]], env=PATIENT)
    await_output(job.nn_worker, "at the gate")
    job.cluster.restart("embedding-parameter-server-0")
    (tmp_path / "gate").touch()
    assert job.finish_nn_worker() != 0
    (report,) = job.reports
    assert report["error"].startswith("FailedPreconditionError"), report["error"]
    assert "started again" in report["error"]


@pytest.mark.timeout(600)
def test_a_standby_that_takes_over_changes_no_result(start_job: Any, run_job: Any, tmp_path: Path) -> None:
    """The rank cannot tell it from a server that has lost its rows, unless all of its batches were updated.

    Then it reads its rows again; else the training ends. Which of both depends on when the standby is found.
    """
    expected = trained(run_job, "--consistency", "synchronous")
    gate = ("--gate", str(tmp_path / "gate"), "--gate-at", "12")
    config = {"embedding_parameter_server_config": {"num_hashmap_internal_shards": 2, "standbys": 1}}
    job = start_job(
        *(*EXACT, "--staleness", "8", "--ahead", "4", *gate),
        loaders=[["--batches", str(BATCHES)]],
        env=PATIENT,
        global_config=config,
        parameter_servers=2,
    )
    await_standbys(job)
    await_output(job.nn_worker, "at the gate")
    job.cluster.kill("embedding-parameter-server-0")
    await_log(job, "embedding-parameter-server-0-standby", "its standby takes over")
    (tmp_path / "gate").touch()
    has_failed = job.finish_nn_worker() != 0
    (report,) = job.reports
    if has_failed:
        assert "started again" in report["error"], report["error"]
    else:
        for result in RESULTS:
            assert report[result] == expected[result], result
