"""Real honcho, small Procfiles: the failing process is found, and nothing is left running."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("honcho", reason="needs honcho (the 'examples' extra)")

import honcho_job
from honcho_job import OutputFollower, _processes_of, run_procfile


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PERSIA_JOB_NAME": f"test-{os.getpid()}-{tmp_path.name}"}


def write_procfile(tmp_path: Path, **commands: str) -> Path:
    path = tmp_path / "Procfile"
    path.write_text("".join(f"{name}: {command}\n" for name, command in commands.items()), encoding="utf-8")
    return path


def test_the_job_ends_well_when_the_trainer_does(tmp_path: Path, environment: dict[str, str]) -> None:
    server = "sh -c 'trap \"echo told to end; exit 1\" TERM; echo serving; sleep 60 & wait'"
    trainer = "sh -c 'sleep 0.5; echo trained'"
    procfile = write_procfile(tmp_path, server=server, trainer=trainer)
    shown: list[str] = []
    exit_code, follower = run_procfile(procfile, environment, 60.0, shown.append)
    assert exit_code == 0
    assert follower.first_stopped == ("trainer.1", 0)
    assert any(line.endswith("| trained") for line in shown)
    assert shown[-1].endswith("trainer.1 stopped (rc=0)"), "how the others end is no news"
    assert _processes_of(environment["PERSIA_JOB_NAME"]) == []


def test_the_process_that_failed_first_is_named_with_its_output(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    procfile = write_procfile(tmp_path, server="sleep 60", trainer="sh -c 'echo the reason; exit 7'")
    exit_code, follower = run_procfile(procfile, environment, 60.0, lambda line: None)
    failure = follower.failure(exit_code)
    assert (failure.process, failure.exit_code, failure.last_lines) == ("trainer.1", 7, ["the reason"])


def test_an_error_of_honcho_itself_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    exit_code, follower = run_procfile(tmp_path / "missing", environment, 60.0, lambda line: None)
    assert exit_code != 0
    assert "Procfile does not exist" in "\n".join(follower.failure(exit_code).last_lines)


def test_an_interrupt_leaves_nothing_running(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stubborn process ignores SIGTERM and has left the session by which honcho would kill it.
    monkeypatch.setattr(honcho_job, "STOP_GRACE_S", 1.0)
    stubborn = "setsid sh -c 'trap \"\" TERM; sleep 61 & wait'"
    procfile = write_procfile(tmp_path, stubborn=stubborn, talker="sh -c 'sleep 0.3; echo ready; sleep 60'")

    def interrupt(line: str) -> None:
        if line.endswith("| ready"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_procfile(procfile, environment, 60.0, interrupt)
    deadline_s = time.monotonic() + 120
    while left := _processes_of(environment["PERSIA_JOB_NAME"]):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def test_a_job_past_its_deadline_is_stopped(tmp_path: Path, environment: dict[str, str]) -> None:
    procfile = write_procfile(tmp_path, server="sleep 60")
    exit_code, _ = run_procfile(procfile, environment, 1.0, lambda line: None)
    assert exit_code != 0


def test_output_after_the_first_end_does_not_change_the_verdict() -> None:
    follower = OutputFollower()
    for line in (
        "12:00:00 nn_worker.1 | out of memory",
        "12:00:01 system      | nn_worker.1 stopped (rc=-9)",
        "12:00:01 nats.1      | shutting down",
        "12:00:02 system      | nats.1 stopped (rc=1)",
    ):
        follower.feed(line)
    failure = follower.failure(137)
    assert (failure.process, failure.exit_code, failure.last_lines) == ("nn_worker.1", -9, ["out of memory"])
