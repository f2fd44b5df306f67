"""`persia-launcher checkpoint dump | load | remove`: a job goes to other parameter servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from persia.checkpoint.protocol import Request, Verb
from persia.checkpoint.training_dump import TrainingDumps
from persia.messaging.session import NatsSession
from persia.rows.reader import check_files
from persia.storage.location import Location
from persia.storage.manifest import Manifest
from persia.testing import LocalNats


def launcher(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "persia.launcher", "checkpoint", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def num_rows(env: dict[str, str], location: Path) -> int:
    """Of all servers, as a dump of its own finds them."""
    finished = launcher(env, "dump", str(location))
    assert finished.returncode == 0, finished.stderr
    place = Location.of(str(location))
    manifest, _ = Manifest.read(place)
    assert all(error is None for error in check_files(place, manifest, lambda _: None).values())
    assert manifest.embeddings is not None
    return int(manifest.embeddings.num_rows)


def test_rows_move_from_one_server_to_three(run_job: Callable[..., Any], tmp_path: Path) -> None:
    from persia.testing import LocalCluster

    old = run_job(loaders=[20])
    (report,) = old.reports
    moved = num_rows(old.cluster.env, tmp_path / "rows")
    assert moved == sum(report["sizes"]) > 100
    config = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 8}, "items": {"dim": 8}}}
    with LocalCluster(embedding_config=config, parameter_servers=3) as new:
        finished = launcher(new.env, "load", str(tmp_path / "rows"))
        assert finished.returncode == 0, finished.stderr
        assert num_rows(new.env, tmp_path / "again") == moved


@pytest.mark.parametrize("verb", ["dump", "load"])
def test_without_a_broker_the_commands_end_with_a_clear_error(verb: str, tmp_path: Path) -> None:
    env = {"PERSIA_NATS_URL": "nats://127.0.0.1:9", "PERSIA_DEADLINE_SEC": "1"}
    (tmp_path / "manifest.json").write_bytes(Manifest().encode())
    finished = launcher(env, verb, str(tmp_path))
    assert finished.returncode == 1
    assert "127.0.0.1:9" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_training_is_dumped_between_two_batches_and_goes_on(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    place = tmp_path / "all"
    patience = {"PERSIA_DEADLINE_SEC": "120"}
    job = start_job("--pace", "0.05", loaders=[["--batches", "150"]], env=patience)
    while (dumped := launcher(job.cluster.env, "dump", str(place), "--with-dense")).returncode == 75:
        assert "not yet: there is no training to ask" in dumped.stderr  # it has not entered its context
    assert dumped.returncode == 0, dumped.stderr
    manifest, _ = Manifest.read(Location.of(str(place)))
    assert manifest.step is not None
    assert 0 < manifest.step < 150
    assert manifest.dense is not None
    assert {"dense.pt", "opt.pt"} <= set(manifest.dense.files)
    assert manifest.embeddings is not None
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    assert report["batch_ids"] == list(range(150))
    after = launcher(job.cluster.env, "dump", str(place), "--with-dense")
    assert (after.returncode, "or has left it" in after.stderr) == (75, True)
    removed = launcher({}, "remove", str(place))
    assert (removed.returncode, place.exists()) == (0, False), removed.stderr
    assert launcher({}, "remove", str(place)).returncode == 0  # it is gone


def test_rows_of_a_training_stay_in_place(start_job: Callable[..., Any], tmp_path: Path) -> None:
    place, pools = tmp_path / "all", tmp_path / "pools"
    pools.mkdir()
    storage = {"kind": "file", "path": str(pools), "size_bytes": 1 << 30, "cache_rows": 32}
    job = start_job(
        *("--pace", "0.05"),
        loaders=[["--batches", "100000"]],
        env={"PERSIA_DEADLINE_SEC": "120"},
        global_config={"embedding_parameter_server_config": {"storage": storage}},
    )
    dump = ("dump", str(place), "--with-dense", "--in-place")
    while (dumped := launcher(job.cluster.env, *dump)).returncode == 75:
        assert "not yet: there is no training to ask" in dumped.stderr  # it has not entered its context
    assert dumped.returncode == 0, dumped.stderr
    manifest, _ = Manifest.read(Location.of(str(place)))
    assert manifest.dense is not None
    assert manifest.embeddings is not None
    assert manifest.embeddings.in_place
    for name in ("nn-worker", "embedding-worker-0", "embedding-parameter-server-0"):
        job.cluster.kill(name)
    job.cluster.restart("embedding-parameter-server-0")
    assert f"(step {manifest.step}) of" in job.cluster.logs("embedding-parameter-server-0")
    alone = launcher(job.cluster.env, "dump", str(place), "--in-place")
    assert alone.returncode == 0, alone.stderr
    again, _ = Manifest.read(Location.of(str(place)))
    assert again.embeddings is not None
    assert again.embeddings.dump_id != manifest.embeddings.dump_id
    assert again.embeddings.num_rows == manifest.embeddings.num_rows


def test_servers_without_an_optimizer_are_not_dumped_yet(tmp_path: Path) -> None:
    from persia.testing import LocalCluster

    config = {"slots_config": {"user": {"dim": 8}}}
    with LocalCluster(embedding_config=config) as cluster:
        refused = launcher(cluster.env, "dump", str(tmp_path / "rows"))
    assert (refused.returncode, "no optimizer yet, and so no rows" in refused.stderr) == (75, True)


def test_a_rank_that_dumps_for_someone_else_is_asked_again_later(
    make_session: Callable[[str], NatsSession], nats_server: LocalNats, job_name: str, tmp_path: Path
) -> None:
    dumps = TrainingDumps(lambda _, in_place: None)
    busy = Request(verb=Verb.DUMP, operation="earlier", arguments={"directory": "/c"})
    dumps.handle(busy.encode())
    session = make_session("rank 0")
    session.respond(session.subjects.training_dump, dumps.handle)
    env = {**os.environ, "PERSIA_NATS_URL": nats_server.url, "PERSIA_JOB_NAME": job_name}
    refused = launcher(env, "dump", str(tmp_path), "--with-dense")
    assert (refused.returncode, "rank 0 is busy with earlier" in refused.stderr) == (75, True)


def test_a_dump_that_is_ended_by_a_signal_is_taken_back(
    make_session: Callable[[str], NatsSession], nats_server: LocalNats, job_name: str, tmp_path: Path
) -> None:
    written: list[str] = []
    dumps = TrainingDumps(lambda directory, in_place: written.append(directory))
    session = make_session("rank 0")
    session.respond(session.subjects.training_dump, dumps.handle)
    env = {**os.environ, "PERSIA_NATS_URL": nats_server.url, "PERSIA_JOB_NAME": job_name}
    command = [sys.executable, "-m", "persia.launcher", "checkpoint", "dump", str(tmp_path)]
    with subprocess.Popen([*command, "--with-dense", "--hold=60"], env=env) as asking:
        deadline = time.monotonic() + 60
        while not dumps.is_wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        asking.terminate()
        assert asking.wait(120) == 128 + signal.SIGTERM
    dumps.serve()
    assert written == []


def test_only_checkpoints_are_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    refused = launcher({}, "remove", str(tmp_path / "precious"))
    assert (refused.returncode, "is no checkpoint" in refused.stderr) == (1, True)
    assert (tmp_path / "precious").exists()
