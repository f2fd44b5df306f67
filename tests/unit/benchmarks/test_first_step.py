"""The time to the first step is measured on a step that happens."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import first_step


def test_a_job_comes_to_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PERSIA_NATS_URL", "PERSIA_EMBEDDING_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert first_step.first_step_s() > 0


@pytest.mark.parametrize(("allow", "code"), [("5", 0), ("1", 1)])
def test_the_slowest_round_is_judged(monkeypatch: pytest.MonkeyPatch, allow: str, code: int) -> None:
    monkeypatch.setattr(first_step, "_ROUND", "print('a line of the log'); print(1.5)")
    result = CliRunner().invoke(first_step.main, ["--rounds", "2", "--allow", allow])
    assert result.exit_code == code
    assert "1.50, 1.50 s" in result.output
