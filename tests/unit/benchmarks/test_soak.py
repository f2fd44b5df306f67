"""The soak run judges growth, and a short one runs."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import model_metrics, soak

MIB = 1 << 20


def test_growth_is_that_of_the_end_and_not_of_a_moment() -> None:
    warm_up = [100 * MIB] * 50 + [200 * MIB] * 150
    assert soak.growth_bytes(warm_up) == 0
    spikes = [200 * MIB + (50 * MIB if i % 7 == 0 else 0) for i in range(200)]
    assert soak.growth_bytes(spikes) == 0
    leak = [200 * MIB + i * 1000 for i in range(200)]
    assert soak.growth_bytes(leak) == 50_000


def test_a_short_run_ends_well() -> None:
    result = CliRunner().invoke(soak.main, ["--steps", "2000", "--allow-kib", "65536"])
    assert result.exit_code == 0, result.output
    assert "growth from the third to the fourth quarter" in result.output


def test_growth_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "soak", lambda *args: [i * MIB for i in range(200)])
    result = CliRunner().invoke(soak.main, [])
    assert result.exit_code == 1
    assert "memory grows" in result.output


def test_the_cost_of_metrics_is_measured() -> None:
    result = CliRunner().invoke(model_metrics.main, ["--batch", "64", "--window", "1000", "--rounds", "2"])
    assert result.exit_code == 0, result.output
    assert "compute every 1000 steps" in result.output
