"""Parameter servers with standbys: a killed server is replaced, with an equal result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import find_servers
from persia.errors import ConfigError, FailedPreconditionError
from persia.roles.lifetime import ServerOptions
from persia.roles.parameter_server import run_parameter_server
from persia.rows.reader import RowReader
from persia.waiting import Attempts

NUM_BATCHES = 400  # long enough that every kill comes before the end, on a busy machine, too
# Fewer rows than the job has IDs, so that the order of operations decides which rows are evicted.
SERVERS = {"embedding_parameter_server_config": {"capacity": 60, "num_hashmap_internal_shards": 2}}
WITH_STANDBYS = {
    "embedding_parameter_server_config": {**SERVERS["embedding_parameter_server_config"], "standbys": 1}
}


def rows_of(checkpoint: Path) -> list[tuple[int, bytes]]:
    """All rows bit for bit, by sign: (sign, embedding and state)."""
    found = []
    for block in RowReader(checkpoint).blocks():
        values = np.concatenate([block.embeddings, block.state], axis=1)
        found += [(int(sign), value.tobytes()) for sign, value in zip(block.signs, values, strict=True)]
    return sorted(found)


def await_batch(job: Any, number: int) -> None:
    for _ in Attempts(240):
        if f"batch {number}\n" in job.nn_worker.output + "\n":
            return
        if job.nn_worker.exit_code is not None:
            break
    raise AssertionError(job.nn_worker.output)


def start(start_job: Any, dump: Path, config: dict[str, Any], **options: Any) -> Any:
    return start_job(
        *("--reproducible", "--staleness", "1", "--dump", str(dump), "--dump-at-the-end", "--pace", "0.02"),
        loaders=[["--batches", str(NUM_BATCHES)]],
        parameter_servers=2,
        embedding_workers=2,
        global_config=config,
        **options,
    )


@pytest.mark.timeout(900)
def test_a_killed_server_is_replaced_by_its_standby_with_equal_rows(start_job: Any, tmp_path: Path) -> None:
    undisturbed = start(start_job, tmp_path / "undisturbed", SERVERS)
    assert undisturbed.finish_nn_worker() == 0, undisturbed.nn_worker.output

    job = start(start_job, tmp_path / "killed", WITH_STANDBYS)
    await_batch(job, 30)
    job.cluster.kill("embedding-parameter-server-1")
    await_batch(job, 80)
    job.cluster.kill("embedding-parameter-server-0")
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    for index in range(2):
        assert "this standby takes over" in job.cluster.logs(f"embedding-parameter-server-{index}-standby")

    (expected,), (report,) = undisturbed.reports, job.reports
    assert report["batch_ids"] == list(range(NUM_BATCHES))
    assert report["losses"] == expected["losses"]
    assert report["digest"] == expected["digest"]
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "undisturbed")
    assert len(rows_of(tmp_path / "killed")) > 0


@pytest.mark.timeout(600)
def test_training_goes_on_without_a_standby_that_was_killed(start_job: Any, tmp_path: Path) -> None:
    job = start(start_job, tmp_path / "rows", WITH_STANDBYS)
    await_batch(job, 30)
    job.cluster.kill("embedding-parameter-server-1-standby")
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    assert report["batch_ids"] == list(range(NUM_BATCHES))
    assert "updates go on without it" in job.cluster.logs("embedding-parameter-server-1")


@pytest.mark.timeout(600)
def test_a_server_that_is_stopped_hands_over_and_loads_are_refused(start_job: Any, tmp_path: Path) -> None:
    job = start(start_job, tmp_path / "rows", WITH_STANDBYS)
    await_batch(job, 30)
    checkpoints = Checkpoints(lambda: find_servers(job.cluster.session, 60), deadline_s=60)
    checkpoints.dump(DumpRequest(tmp_path / "c", step=1))
    with pytest.raises(FailedPreconditionError, match="with standbys do not load checkpoints"):
        checkpoints.load(Source(tmp_path / "c"))
    assert job.cluster.stop("embedding-parameter-server-1", 60) == 0
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    assert report["batch_ids"] == list(range(NUM_BATCHES))
    assert "this standby takes over" in job.cluster.logs("embedding-parameter-server-1-standby")


def test_a_standby_needs_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    with pytest.raises(ConfigError, match="standbys: 1"):
        run_parameter_server(ServerOptions(port=0, standby=True))
