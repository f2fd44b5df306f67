"""`persia-launcher local --max-restarts`: after kills a job continues, with an equal result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.chaos.job import Kill, Settings, differences, run, undisturbed

SETTINGS = Settings(batches=180, deadline_s=500)


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


@pytest.mark.timeout(900)
def test_two_ranks_roll_back_together(tmp_path: Path) -> None:
    settings = Settings(batches=160, ranks=2, servers=1, deadline_s=500)
    outcome = run(tmp_path / "killed", settings, [Kill(role="rank", step=35, which=1)])
    assert outcome.exit_code == 0, outcome.output
    assert sorted(outcome.trained) == list(range(settings.batches))
    assert outcome.wasted > 0
    assert re.search(r"\[nn-worker 1\] .* continues after step \d+", outcome.output)
