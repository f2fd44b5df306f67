"""Parameter servers with standbys: a killed server is replaced, with an equal result."""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.chaos.job import Kill, Settings, differences, run
from benchmarks.chaos.job import undisturbed as undisturbed_chaos
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import find_servers
from persia.errors import ConfigError, PersiaError
from persia.messaging.discovery import Directory
from persia.roles.lifetime import ServerOptions
from persia.roles.parameter_server import run_parameter_server
from persia.rows.reader import RowReader
from persia.security.secret import WORKER
from persia.utils import dump_yaml
from persia.waiting import Attempts

from .conftest import jobs

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


def await_log(job: Any, process: Any, text: str) -> None:
    """Waits until the process, or one of this name, has written `text`."""
    for _ in Attempts(240):
        output = job.cluster.logs(process) if isinstance(process, str) else process.output
        if text in output:
            return
    raise AssertionError(f"{process} has not written {text!r}: {output}")


def await_standbys(job: Any) -> None:
    for index in range(2):
        await_log(job, f"embedding-parameter-server-{index}", "has every row and change")


def find(job: Any, name: str) -> Any:
    return next(process for process in job.cluster.processes if process.name == name)


def freeze(process: Any) -> None:
    """Stops all threads of a process. On a busy machine some run for a while after the signal was sent."""
    process.send_signal(signal.SIGSTOP)
    for _ in Attempts(60):
        threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
        with contextlib.suppress(OSError):  # of a thread that has ended meanwhile
            # The state follows the name, which may hold spaces.
            if all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads):
                return
    raise AssertionError(f"{process} does not stop")


def start_again(job: Any, name: str, *options: str) -> Any:
    """A process that has ended, as a supervisor does; `options` come behind its own."""
    spec = find(job, name).spec
    return job.cluster._supervisor.start(replace(spec, command=(*spec.command, *options)))


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
        # Processes take minutes to start on a busy machine.
        env={"PERSIA_DEADLINE_SEC": "300"},
        start_deadline_s=300,
        **options,
    )


def check_equal(
    job: Any, undisturbed: Any, dump: Path, expected_dump: Path, num_batches: int = NUM_BATCHES
) -> None:
    (expected,), (report,) = undisturbed.reports, job.reports
    assert report["batch_ids"] == list(range(num_batches))
    assert report["losses"] == expected["losses"]
    assert report["digest"] == expected["digest"]
    assert rows_of(dump) == rows_of(expected_dump)
    assert len(rows_of(dump)) > 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The job without standbys, where nothing is killed, and its dump."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with jobs(folder) as start_job:
        job = start(start_job, folder / "rows", SERVERS)
        assert job.finish_nn_worker() == 0, job.nn_worker.output
        yield job, folder / "rows"


@pytest.mark.timeout(900)
def test_killed_servers_are_replaced_and_new_standbys_filled_with_equal_rows(
    start_job: Any, undisturbed: Any, tmp_path: Path
) -> None:
    job = start(start_job, tmp_path / "rows", WITH_STANDBYS)
    await_standbys(job)
    await_batch(job, 30)
    server, standby = (f"embedding-parameter-server-1{end}" for end in ("", "-standby"))
    job.cluster.kill(server)
    await_log(job, standby, "its standby takes over")
    # The killed server is started again as the standby of its successor, copies the rows while training
    # continues, and then takes over from it.
    start_again(job, server)
    await_log(job, standby, "has every row and change")
    await_batch(job, 90)
    job.cluster.kill(standby)
    await_log(job, server, "its standby takes over")
    job.cluster.kill("embedding-parameter-server-0")
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    check_equal(job, undisturbed[0], tmp_path / "rows", undisturbed[1])


@pytest.mark.timeout(900)
def test_a_frozen_server_that_was_replaced_serves_nothing_when_it_returns(
    start_job: Any, undisturbed: Any, tmp_path: Path
) -> None:
    from persia._native import EmbeddingWorker, SlotConfig

    section = WITH_STANDBYS["embedding_parameter_server_config"]
    config = {"embedding_parameter_server_config": {**section, "standby_deadline_sec": 3}}
    job = start(start_job, tmp_path / "rows", config)
    await_standbys(job)
    await_batch(job, 30)
    frozen = find(job, "embedding-parameter-server-1")
    info = Directory(job.cluster.session).probe("embedding-parameter-server", 1, 5)
    assert info is not None
    job.cluster.join(WORKER)
    stranger = EmbeddingWorker(
        slots=[SlotConfig(name="user", dim=8)], feature_index_prefix_bit=8, num_servers=1
    )
    stranger.set_server(0, info.address)
    assert stranger.server_loads(timeout_s=60)  # connected
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(stranger.server_loads(timeout_s=60))
        except PersiaError as error:
            answers.append(error)

    freeze(frozen)
    # Its request waits in the socket of the frozen server, which reads it as soon as it wakes.
    asker = threading.Thread(target=ask)
    asker.start()
    await_log(job, "embedding-parameter-server-1-standby", "its standby takes over")
    await_batch(job, 60)
    frozen.send_signal(signal.SIGCONT)
    assert job.cluster.wait(frozen, 120) == 3
    assert "embedding-parameter-server 1 was replaced by" in frozen.output
    asker.join()
    assert isinstance(answers[0], PersiaError), answers
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    check_equal(job, undisturbed[0], tmp_path / "rows", undisturbed[1])


@pytest.mark.timeout(600)
def test_training_continues_without_a_standby_that_was_killed_or_a_broker_that_restarts(
    start_job: Any, tmp_path: Path
) -> None:
    job = start(start_job, tmp_path / "rows", WITH_STANDBYS)
    await_standbys(job)
    await_batch(job, 20)
    job.cluster.restart("nats")  # one sign of death alone: no standby takes over
    await_batch(job, 60)
    job.cluster.kill("embedding-parameter-server-1-standby")
    await_log(job, "embedding-parameter-server-1", "training continues without it")
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    assert report["batch_ids"] == list(range(NUM_BATCHES))
    for index in range(2):
        assert "takes over" not in job.cluster.logs(f"embedding-parameter-server-{index}-standby")


@pytest.mark.timeout(600)
def test_a_server_that_is_stopped_hands_over_and_a_load_reaches_both(start_job: Any, tmp_path: Path) -> None:
    job = start(start_job, tmp_path / "rows", WITH_STANDBYS)
    await_standbys(job)
    await_batch(job, 30)
    checkpoints = Checkpoints(lambda: find_servers(job.cluster.session, 60), deadline_s=60)
    checkpoints.dump(DumpRequest(tmp_path / "a", step=1))
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    assert rows_of(tmp_path / "a") != rows_of(tmp_path / "rows")
    checkpoints.load(Source(tmp_path / "a"))
    for index in range(2):
        name = f"embedding-parameter-server-{index}"
        await_log(job, name, "it copies the rows that are loaded now")
        for _ in Attempts(240):
            if job.cluster.logs(name).count("has every row and change") == 2:
                break
        assert job.cluster.stop(name, 60) == 0
        await_log(job, f"{name}-standby", "its standby takes over")
    checkpoints.dump(DumpRequest(tmp_path / "b", step=1))
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")


def test_a_standby_with_another_config_is_refused(start_job: Any, tmp_path: Path) -> None:
    job = start(start_job, tmp_path / "rows", WITH_STANDBYS)
    await_standbys(job)
    other = tmp_path / "other.yml"
    section = WITH_STANDBYS["embedding_parameter_server_config"]
    dump_yaml({"embedding_parameter_server_config": {**section, "capacity": 61}}, str(other))
    name = "embedding-parameter-server-0-standby"
    job.cluster.kill(name)
    refused = start_again(job, name, f"--global-config={other}")
    assert job.cluster.wait(refused, 120) != 0
    assert "has another config" in refused.output


@pytest.mark.timeout(1200)
def test_a_local_job_replaces_its_servers_without_going_back(tmp_path: Path) -> None:
    settings = Settings(batches=120, servers=1, standbys=1, deadline_s=500)
    # Once: a second kill before the restarted server has a copy of the rows would lose them.
    kills = [Kill(role="parameter server", step=40)]
    outcome = run(tmp_path / "killed", settings, kills)
    assert outcome.exit_code == 0, outcome.output
    assert all(kill.at for kill in kills), kills
    assert sorted(outcome.trained) == list(range(settings.batches))
    assert outcome.wasted == 0, outcome.output
    assert "it is started again" in outcome.output
    assert "every process is started again" not in outcome.output
    assert differences(undisturbed_chaos(tmp_path / "undisturbed", settings), outcome) == []


def test_a_standby_needs_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    with pytest.raises(ConfigError, match="standbys: 1"):
        run_parameter_server(ServerOptions(port=0, standby=True))
