"""A coordinator of a resize whose servers are not its own, and that ends at any step: as a pod may."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from persia.errors import DeadlineExceededError, UnavailableError
from persia.launcher.coordinator import Coordinator, NotResizedError
from persia.launcher.hand_over import ask, attempts, servers
from persia.messaging.discovery import Directory
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.elastic import Step
from persia.testing import LocalCluster

SLOTS = {"slots_config": {"user": {"dim": 8}}}
NUM_OLD, NUM_NEW = 2, 3


class Died(BaseException):
    """The coordinator's process is gone."""


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(embedding_config=SLOTS, parameter_servers=NUM_OLD, start_deadline_s=300) as started:
        yield started


class NewServers:
    """The servers of a generation, which something else than the coordinator starts and ends."""

    def __init__(self, cluster: LocalCluster, folder: Path, generation: int, **env: str) -> None:
        self._config = folder / "embedding.yml"
        self._config.write_text(yaml.safe_dump(SLOTS))
        self._env, self._generation = {**os.environ, **cluster.env, **env}, generation
        self.processes = [self.start(index, sources=NUM_OLD) for index in range(NUM_NEW)]

    def start(self, index: int, sources: int) -> subprocess.Popen[bytes]:
        options = (f"--replica-index={index}", f"--replica-size={NUM_NEW}", f"--sources={sources}")
        command = (
            sys.executable,
            "-m",
            "persia.launcher",
            "embedding-parameter-server",
            "--port=0",
            *options,
        )
        more = (f"--generation={self._generation}", f"--embedding-config={self._config}")
        return subprocess.Popen([*command, *more], env=self._env)

    def kill(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].wait()

    def replace(self, index: int) -> None:
        self.kill(index)
        self.processes[index] = self.start(index, sources=NUM_OLD)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def new(cluster: LocalCluster, tmp_path: Path) -> Iterator[NewServers]:
    started = NewServers(cluster, tmp_path, generation=1)
    yield started
    started.end()


def make(cluster: LocalCluster, dies_at: str = "") -> tuple[Coordinator, list[str]]:
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        if text == dies_at:
            raise Died

    return Coordinator(cluster.session, servers(0, NUM_OLD), servers(1, NUM_NEW), tell), said


def serving(cluster: LocalCluster, generation: int, number: int) -> list[bool]:
    return [ask(cluster.session, one, Step.WHO).is_serving for one in servers(generation, number)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", ["follow ...", "hand over ..."])
def test_what_a_coordinator_left_half_done_is_taken_back(
    cluster: LocalCluster, new: NewServers, step: str
) -> None:
    coordinator, _ = make(cluster, dies_at=step)
    with pytest.raises(Died):
        coordinator.run()
    new.kill(1)  # none waits for it
    with pytest.raises(NotResizedError, match="before the new servers had all rows"):
        make(cluster)[0].run()
    assert serving(cluster, 0, NUM_OLD) == [True] * NUM_OLD
    assert ask(cluster.session, (0, 0), Step.WHO).state == ""  # ready for another one


def await_serving(cluster: LocalCluster, wanted: list[bool]) -> None:
    for _ in attempts(f"serving {wanted}"):
        with contextlib.suppress(UnavailableError, DeadlineExceededError):
            if serving(cluster, 1, NUM_NEW) == wanted:
                return
    raise AssertionError(serving(cluster, 1, NUM_NEW))


@pytest.mark.timeout(600)
def test_a_hand_over_that_one_new_server_knows_of_is_finished(cluster: LocalCluster, new: NewServers) -> None:
    coordinator, _ = make(cluster)
    coordinator._serve = lambda: ask(cluster.session, (1, 0), Step.SERVE)  # type: ignore[method-assign,assignment]
    coordinator.run()
    assert serving(cluster, 1, NUM_NEW) == [True, False, False]
    # One of the others dies and is started again: its rows are lost, as ever. The third one keeps its rows.
    new.replace(2)
    await_serving(cluster, [True, False, True])
    present = Directory(cluster.session).present(EMBEDDING_PARAMETER_SERVER, 2.0)
    assert [(info.index, info.has_rows) for info in present] == [(0, True), (2, False)]
    assert ask(cluster.session, (1, 1), Step.WHO).was_sent_rows
    make(cluster)[0].run()
    assert serving(cluster, 1, NUM_NEW) == [True, True, True]
    assert serving(cluster, 0, NUM_OLD) == [False, False]


@pytest.mark.timeout(600)
def test_rows_that_have_all_moved_are_not_taken_back(cluster: LocalCluster, new: NewServers) -> None:
    coordinator, _ = make(cluster)
    coordinator._serve = lambda: None  # type: ignore[method-assign]
    coordinator.run()
    assert serving(cluster, 0, NUM_OLD) == [False, False]
    new.replace(2)  # it may have answered
    make(cluster)[0].run()
    await_serving(cluster, [True, True, True])
    assert serving(cluster, 0, NUM_OLD) == [False, False]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["follow", "handed over"])
def test_a_new_server_that_dies_while_it_is_sent_rows_changes_nothing(
    cluster: LocalCluster, new: NewServers, when: str
) -> None:
    coordinator, _ = make(cluster)
    hand_over = coordinator._steps.hand_over

    def kill_after() -> None:
        hand_over()
        new.kill(1)

    if when == "follow":
        coordinator._tell = lambda text: new.kill(1) if text == "follow ..." else None
    else:
        coordinator._steps.hand_over = kill_after  # type: ignore[method-assign]
    with pytest.raises(NotResizedError):
        coordinator.run()
    assert serving(cluster, 0, NUM_OLD) == [True, True]


@pytest.mark.timeout(600)
def test_an_old_server_that_dies_is_started_again_beside_those_that_gather(
    cluster: LocalCluster, new: NewServers
) -> None:
    coordinator, _ = make(cluster)
    coordinator._steps.await_new()
    cluster.restart("embedding-parameter-server-0")
    assert serving(cluster, 0, NUM_OLD) == [True, True]
    coordinator.run()
    assert serving(cluster, 1, NUM_NEW) == [True, True, True]


@pytest.mark.timeout(600)
def test_a_new_server_that_dies_before_rows_move_ends_the_change(
    cluster: LocalCluster, new: NewServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = make(cluster)
    coordinator._steps.await_new()
    new.kill(1)
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "5")  # to wait for it
    with pytest.raises(NotResizedError, match="new parameter servers did not start"):
        coordinator.run()
    assert serving(cluster, 0, NUM_OLD) == [True, True]


@pytest.mark.timeout(600)
def test_new_servers_without_any_that_could_send_them_rows_begin_without(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """As after all of them were started again, once the old ones have ended."""
    job = {"PERSIA_JOB_NAME": "another", "PERSIA_DEADLINE_SEC": "5"}
    alone = NewServers(cluster, tmp_path, generation=1, **job)
    try:
        with NatsSession(cluster.env["PERSIA_NATS_URL"], "another", name="test") as session:
            session.connect(60.0)
            found = Directory(session).wait_for(EMBEDDING_PARAMETER_SERVER, 300.0, NUM_NEW)
    finally:
        alone.end()
    assert [info.has_rows for info in found] == [False] * NUM_NEW


@pytest.mark.timeout(600)
def test_the_command_is_refused_before_rows_move_and_says_so(tmp_path: Path) -> None:
    section = {"embedding_parameter_server_config": {"enable_incremental_update": True}}
    with LocalCluster(embedding_config=SLOTS, global_config=section, start_deadline_s=300) as cluster:
        ended = resize(cluster, "--parameter-servers=2", "--generation=1", "--sources=1")
    assert ended.returncode == 3
    assert "enable_incremental_update" in ended.stderr


def resize(cluster: LocalCluster, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as the pod does."""
    return subprocess.run(
        [sys.executable, "-m", "persia.launcher", "resize", *options],
        env={**os.environ, **cluster.env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.timeout(600)
def test_the_command_moves_rows_past_the_generation_of_a_change_that_failed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    new = NewServers(cluster, tmp_path, generation=2)
    try:
        numbers = (f"--parameter-servers={NUM_NEW}", f"--sources={NUM_OLD}")
        ended = resize(cluster, *numbers, "--generation=2", "--from-generation=0")
        assert ended.returncode == 0, ended.stderr
        assert serving(cluster, 2, NUM_NEW) == [True] * NUM_NEW
    finally:
        new.end()
