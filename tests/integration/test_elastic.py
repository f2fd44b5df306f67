"""Another number of parameter servers while the job trains: equal results, also where servers die."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.job import Outcome, Settings, descendants, differences, started, trained_by
from benchmarks.chaos.job import undisturbed as undisturbed_chaos
from persia.errors import FailedPreconditionError, UnavailableError
from persia.launcher import hand_over
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER
from persia.observability.status import job_status
from persia.waiting import Attempts

from .conftest import jobs
from .test_standby import await_batch, check_equal

NUM_BATCHES = 400
SERVER = "embedding-parameter-server"


def start(
    start_job: Any,
    folder: Path,
    *,
    gates: Sequence[int] = (),
    num_batches: int = NUM_BATCHES,
    uneven: bool = False,
    pace: float = 0.01,
    **options: Any,
) -> Any:
    gated = [option for gate in gates for option in ("--gate-at", str(gate))]
    return start_job(
        *("--reproducible", "--staleness", "1", "--dump", str(folder / "rows"), "--dump-at-the-end"),
        *("--pace", str(pace), "--gate", str(folder / "gate"), *gated),
        loaders=[["--batches", str(num_batches), *(["--uneven"] if uneven else [])]],
        parameter_servers=2,
        embedding_workers=2,
        env={"PERSIA_DEADLINE_SEC": "300"},
        start_deadline_s=300,
        **options,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with jobs(folder) as start_job:
        job = start(start_job, folder)
        assert job.finish_nn_worker() == 0, job.nn_worker.output
        yield job, folder / "rows"


def names(job: Any) -> list[str]:
    """Of the parameter servers that run."""
    running = [process.name for process in job.cluster.processes if process.exit_code is None]
    return [name for name in running if name.startswith(SERVER)]


def kill_when_it_runs(job: Any, name: str) -> None:
    for _ in Attempts(240):
        if name in names(job):
            return job.cluster.kill(name)


@pytest.mark.timeout(900)
def test_more_servers_and_fewer_give_the_bits_of_a_job_that_keeps_its_own(
    start_job: Any, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "_MEASURE_S", 0.0)  # the rows are to move while batches are left
    # The gate leaves batches for what is to be seen of the last servers.
    job = start(start_job, tmp_path, gates=[NUM_BATCHES - 40])
    await_batch(job, 20)
    with pytest.raises(FailedPreconditionError, match="2 parameter servers already"):
        job.cluster.resize(2)
    # One of the new servers dies: the old ones continue.
    killer = threading.Thread(target=kill_when_it_runs, args=(job, f"{SERVER}-1-of-3"))
    killer.start()
    with pytest.raises(UnavailableError, match=f"{SERVER}-1-of-3 was ended by SIGKILL"):
        job.cluster.resize(3)
    killer.join()
    assert names(job) == [f"{SERVER}-0", f"{SERVER}-1"]
    state = job.cluster.resize(3)
    assert (state.before, state.after, state.failure) == (2, 3, "")
    assert state.num_rows > 0
    assert names(job) == [f"{SERVER}-{index}-of-3" for index in range(3)]
    job.cluster.resize(2)
    assert names(job) == [f"{SERVER}-{index}-of-2" for index in range(2)]
    (tmp_path / "gate").touch()
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    check_equal(job, undisturbed[0], tmp_path / "rows", undisturbed[1])
    (report,) = job.reports
    assert len(report["sizes"]) == 2
    # A new server is started again without rows, rather than to gather them.
    job.cluster.restart(f"{SERVER}-0-of-2")


def loads(job: Any) -> tuple[float, int]:
    """The imbalance, and how many virtual shards were moved, as embedding worker 0 says."""
    for _ in Attempts(240):
        workers = Directory(job.cluster.session).present(EMBEDDING_WORKER, 1.0)
        for status in job_status(workers[:1]):
            stats = {} if status.values is None else status.values["stats"]
            # Without any load, the imbalance is 1.
            if any(load["num_looked_up_rows"] for load in stats.get("server_loads", [])):
                return stats["load_imbalance"], stats["num_moved_shards"]
    raise AssertionError("no worker has asked its servers")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that appear once a measurement of the load has begun. It ends after some rows, not some time."""
    to_appear: list[Path] = []
    counts = hand_over._counts

    def count(*servers: Any) -> Any:
        counted = counts(*servers)
        for path in to_appear:
            path.touch()
        return counted

    monkeypatch.setattr(hand_over, "_counts", count)
    monkeypatch.setattr(hand_over, "_MEASURE_S", 240.0)
    monkeypatch.setattr(hand_over, "_ENOUGH_ROWS", 200)
    return to_appear


@pytest.mark.timeout(900)
def test_rebalanced_servers_have_an_even_load_and_the_bits_of_a_job_that_keeps_its_own(
    start_job: Any, tmp_path: Path, measured: list[Path]
) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed = start(start_job, tmp_path / "undisturbed", num_batches=700, uneven=True, pace=0)
    assert undisturbed.finish_nn_worker() == 0, undisturbed.nn_worker.output
    job = start(start_job, tmp_path, gates=[100, 250, 400, 500, 650], num_batches=700, uneven=True)
    await_batch(job, 99)
    assert loads(job) == (2.0, 0)
    # One of the new servers dies: the old ones continue.
    killer = threading.Thread(target=kill_when_it_runs, args=(job, f"{SERVER}-1-generation-1"))
    killer.start()
    measured[:] = [tmp_path / "gate"]
    with pytest.raises(UnavailableError, match=f"{SERVER}-1-generation-1 was ended by SIGKILL"):
        job.cluster.rebalance()
    killer.join()
    assert names(job) == [f"{SERVER}-0", f"{SERVER}-1"]
    measured[:] = [tmp_path / "gate-2"]
    state = job.cluster.rebalance()
    assert (state.before, state.after, state.failure) == (2, 2, "")
    assert names(job) == [f"{SERVER}-{index}-generation-2" for index in range(2)]
    (tmp_path / "gate-3").touch()
    await_batch(job, 499)  # the last hundred, at least, are of the new servers
    imbalance, num_moved = loads(job)
    assert imbalance < 1.4  # it was placed by some hundred sampled rows
    assert num_moved == state.num_moved_shards > 0
    # Another number of servers is placed by load, too: by default, the second of four would have none.
    measured[:] = [tmp_path / "gate-4"]
    assert job.cluster.resize(4).num_moved_shards > 0
    (tmp_path / "gate-5").touch()
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    check_equal(job, undisturbed, tmp_path / "rows", tmp_path / "undisturbed" / "rows", num_batches=700)
    # A server that has restarted knows which rows a checkpoint has for it.
    job.cluster.restart(f"{SERVER}-0-of-4")
    restarted, other, *_ = Directory(job.cluster.session).wait_for(EMBEDDING_PARAMETER_SERVER, 120.0)
    assert restarted.moved_shards == other.moved_shards != ()


def test_what_cannot_be_moved_is_refused_before_anything_starts() -> None:
    from persia.testing import LocalCluster

    section = {"embedding_parameter_server_config": {"enable_incremental_update": True}}
    slots = {"slots_config": {"user": {"dim": 8}}}
    with LocalCluster(embedding_config=slots, global_config=section, start_deadline_s=300) as cluster:
        with pytest.raises(FailedPreconditionError, match="enable_incremental_update"):
            cluster.resize(2)
        assert [process.name for process in cluster.processes if "-of-" in process.name] == []


class Launched:
    """A job of the launcher, followed by what it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []
        self._env: dict[str, str] = {}

    def await_line(self, pattern: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if found := re.search(r"(PERSIA_NATS_URL)=(\S+) (PERSIA_JOB_NAME)=(\S+)", line):
                self._env = {found[1]: found[2], found[3]: found[4]}
            if re.search(pattern, line):
                return
        raise AssertionError("".join(self.lines))

    def await_end(self) -> int:
        assert self._process.stdout is not None
        self.lines += self._process.stdout
        return self._process.wait()

    @contextlib.contextmanager
    def resize(self, number: int) -> Iterator[subprocess.Popen[str]]:
        command = (sys.executable, "-m", "persia.launcher", "resize", "--parameter-servers", str(number))
        with subprocess.Popen(
            command,
            env={**os.environ, **self._env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                yield process
            finally:
                process.kill()  # if the test has failed: it would wait for the job

    def signal_loaders(self, number: signal.Signals) -> None:
        """Stopped, they leave batches for what follows, however slow the machine is."""
        for pid, command in descendants(self._process.pid):
            if "jobs/loader.py" in command:
                os.kill(pid, number)

    def signal_server(self, number: signal.Signals, index: int, replicas: int) -> None:
        """As soon as it has been started."""
        wanted = f" {SERVER} --port=0 --replica-index={index} --replica-size={replicas} "
        for _ in Attempts(240):
            if found := [pid for pid, command in descendants(self._process.pid) if wanted in command]:
                os.kill(found[0], number)
                return
        raise AssertionError("".join(self.lines))


@pytest.mark.timeout(900)
def test_a_job_of_the_launcher_rolls_back_with_the_servers_that_it_has(tmp_path: Path) -> None:
    settings = Settings(batches=200, every_steps=50)
    with started(tmp_path / "job", settings, 2) as process:
        job = Launched(process)
        # Between two dumps, which would refuse a change.
        job.await_line("dumped .*step-000000000050 ")
        job.signal_loaders(signal.SIGSTOP)
        # An old server dies in the middle: the job returns to its checkpoint, with two servers.
        with job.resize(3) as resizing:
            job.signal_server(signal.SIGSTOP, 2, 3)  # the change waits for it
            job.signal_server(signal.SIGKILL, 0, 2)
            output, _ = resizing.communicate()
        assert resizing.returncode == 1, output
        assert "still 2 parameter servers" in output
        job.await_line("dumped .*step-000000000100 ")
        job.signal_loaders(signal.SIGSTOP)
        with job.resize(3) as resizing:
            job.await_line("2 were replaced by 3")
            job.signal_loaders(signal.SIGCONT)
            output, _ = resizing.communicate()
        assert resizing.returncode == 0, output
        # A server of the three dies: the job returns to its checkpoint, with three.
        job.signal_server(signal.SIGKILL, 0, 3)
        job.await_line("every process is started again")
        assert job.await_end() == 0, "".join(job.lines)
    ended = Outcome(tmp_path / "job", 0, "".join(job.lines), *trained_by(tmp_path / "job" / "rank0.log"))
    assert sorted(ended.trained) == list(range(200))
    assert differences(ended, undisturbed_chaos(tmp_path / "alone", settings)) == []
