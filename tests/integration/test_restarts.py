"""`persia-launcher local --max-restarts`: after kills a job continues, with an equal result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.chaos.job import Kill, Settings, alone, differences, run, trained_by, undisturbed

SETTINGS = Settings(batches=180, deadline_s=500)
FITTED = ("fitted.py", "fitted_loader.py")  # scripts with a Trainer


@pytest.mark.timeout(1200)  # three starts of a whole job, each of a minute on a busy machine
def test_killed_processes_change_nothing_in_the_result(tmp_path: Path) -> None:
    kills = [
        Kill(role="rank", step=30),
        Kill(role="parameter server", step=50, which=1),
        Kill(role="data loader", step=70),
        Kill(role="embedding worker", step=90),
        Kill(role="nats", step=105),
    ]
    outcome = run(tmp_path / "killed", SETTINGS, kills)
    assert outcome.exit_code == 0, outcome.output
    assert all(kill.at for kill in kills), kills
    assert sorted(outcome.trained) == list(range(SETTINGS.batches)), "each batch exactly once"
    expected = undisturbed(tmp_path / "undisturbed", SETTINGS)
    assert sorted(expected.trained) == list(range(SETTINGS.batches)), expected.output
    assert differences(expected, outcome) == []
    assert 0 < outcome.wasted <= 3 * (SETTINGS.every_steps + 40)
    assert "nn-worker was ended by SIGKILL; every process is started again in 0 s (restart 1 of 5)" in (
        outcome.output
    )
    assert "data-loader-0 was ended by SIGKILL; it is started again" in outcome.output
    assert re.search(r"embedding-worker-\d was ended by SIGKILL; it is started again", outcome.output)
    assert "restarts: 5 of 5 (data-loader-0 1, embedding-" in outcome.output


def test_a_trainer_in_one_process_continues_between_its_evaluations(tmp_path: Path) -> None:
    settings = Settings(batches=100, every_steps=8, deadline_s=300, scripts=FITTED)
    with alone(tmp_path / "killed", settings) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "step 52\n":
                process.kill()
    outcome = undisturbed(tmp_path / "killed", settings)  # started again, to its end
    assert outcome.exit_code == 0, outcome.output
    assert sorted(outcome.trained) == list(range(100)), "each batch exactly once"
    assert 0 < outcome.wasted <= 30, "not the steps of the whole job"
    expected = undisturbed(tmp_path / "undisturbed", settings)
    assert expected.exit_code == 0, expected.output
    assert differences(expected, outcome) == []


@pytest.mark.timeout(900)
def test_a_trainer_continues_after_kills(tmp_path: Path) -> None:
    settings = Settings(batches=120, every_steps=16, deadline_s=500, scripts=FITTED)
    kills = [Kill(role="data loader", step=40), Kill(role="rank", step=60)]
    outcome = run(tmp_path / "killed", settings, kills)
    assert outcome.exit_code == 0, outcome.output
    assert all(kill.at for kill in kills), kills
    assert sorted(outcome.trained) == list(range(settings.batches)), "each batch exactly once"
    expected = undisturbed(tmp_path / "undisturbed", settings)
    assert differences(expected, outcome) == []


@pytest.mark.timeout(900)
def test_ranks_of_a_trainer_roll_back_together_and_end_unevenly(tmp_path: Path) -> None:
    """An odd number of batches: one of two ranks gets a step more."""
    settings = Settings(batches=141, ranks=2, servers=1, deadline_s=500, scripts=FITTED)
    outcome = run(tmp_path / "killed", settings, [Kill(role="rank", step=35, which=1)])
    assert outcome.exit_code == 0, outcome.output
    assert sorted(outcome.trained) == list(range(settings.batches))
    assert outcome.wasted > 0
    assert re.search(r"\[nn-worker 1\] .* continues after step \d+", outcome.output)
    assert outcome.output.count("ended at 71") == 2, "the step is that of the longer rank"
    assert len(trained_by(tmp_path / "killed" / "rank0.log")[0]) in (70, 71)
