"""What `python -m benchmarks.chaos` plans and reads; the job itself is run by test_restarts.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos import results
from benchmarks.chaos.job import ROLES, Kill, Outcome, Settings, trained_by
from benchmarks.chaos.results import Result


def test_kills_are_in_order_and_before_the_loaders_end() -> None:
    settings = Settings(batches=500, ranks=2)
    kills = chaos.plan(50, settings, ROLES, seed=1)
    steps = [kill.step for kill in kills]
    assert steps == sorted(steps)
    assert 0 < steps[0] < steps[-1] < 250 - 50
    assert {kill.role for kill in kills} == set(ROLES)
    assert kills == chaos.plan(50, settings, ROLES, seed=1)
    assert kills != chaos.plan(50, settings, ROLES, seed=2)


def test_too_few_batches_for_a_kill_are_refused() -> None:
    result = CliRunner().invoke(chaos.main, ["--ranks", "2", "--batches", "100"])
    assert result.exit_code == 2
    assert "--batches: 100 batches leave no step for a kill: use 132 or more" in " ".join(
        result.output.split()
    )
    assert chaos.plan(1, Settings(batches=132, ranks=2), ROLES, seed=0)


def test_steps_behind_a_checkpoint_are_rolled_back(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("begin 0\n1 10\n2 11\n3 12\nbegin 2\n3 12\n4 13\nbegin 4\n5 14\n")
    assert trained_by(log) == ([10, 11, 12, 13, 14], 1)
    log.write_text("begin 0\n1 10\n2 11\nbegin 1\n2 12\n")
    assert trained_by(log) == ([10, 12], 1)
    assert trained_by(tmp_path / "none.log") == ([], 0)


def test_the_table_has_a_line_for_each_role_of_a_setting(tmp_path: Path) -> None:
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    pauses = [Kill("rank", 1, at=1.0, pause_s=34.0, back_off_s=30.0), Kill("rank", 2, at=2.0, pause_s=8.0)]
    results.append(files[0], Result(seed=1, ranks=2, standbys=0, kills=pauses))
    results.append(files[0], Result(seed=2, ranks=1, standbys=1, kills=[Kill("nats", 1, pause_s=1.0)]))
    results.append(files[1], Result(seed=3, ranks=1, standbys=1, kills=[Kill("rank", 1, pause_s=3.0)] * 101))
    results.append(files[1], Result(seed=4, ranks=1, standbys=1, kills=[Kill("rank", 1, pause_s=9.0)]))
    assert results.table(results.read(files)).splitlines()[2:] == [
        "| 1 | 1 | rank | 102 | 3.0 | 3.0 | 9.0 |",
        "| 1 | 1 | nats | 1 | 1.0 | 1.0 | 1.0 |",
        "| 2 | 0 | rank | 2 | 6.0 | 8.0 | 8.0 |",
    ]


@pytest.mark.parametrize(
    ("trained", "exit_code", "problem"),
    [
        (range(100), 0, "each batch trained once"),
        (range(99), 0, "FAILED: not every batch was trained exactly once"),
        ([*range(100), 5], 0, "FAILED: not every batch was trained exactly once"),
        (range(100), 1, "FAILED: the job ended with exit code 1"),
    ],
)
def test_lost_and_repeated_batches_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: list[int], exit_code: int, problem: str
) -> None:
    def run(folder: Path, settings: Settings, kills: list[Kill] | None = None) -> Outcome:
        for kill in kills or ():
            kill.at = 1.0
        return Outcome(folder, exit_code, "", list(trained))

    monkeypatch.setattr(chaos, "run", run)
    monkeypatch.setattr(chaos, "differences", lambda one, other: [])
    file, kept = tmp_path / "runs.jsonl", tmp_path / "kept"
    command = ["--kills", "2", "--batches", "100", "--results", str(file), "--keep", str(kept)]
    result = CliRunner().invoke(chaos.main, command)
    assert problem in result.output
    failed = problem.startswith("FAILED")
    assert (result.exit_code == 0) is (not failed)
    assert (kept / "seed-0" / "output.log").exists() is failed
    assert all(text in problem for text in next(results.read([file])).problems)
