"""The study's one command, quick: real jobs through the proxy, results kept and found again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow")

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280


def study(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.consistency", "--output", str(output), *arguments]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_quick_study_runs_real_jobs_and_does_not_run_them_again(tmp_path: Path) -> None:
    arguments = ("--quick", "--dataset", "adult")
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: begin -->\n<!-- figures: end -->\n")
    first = study(tmp_path, *arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    folder = tmp_path / "quick"
    results = json.loads((folder / "results.json").read_text())["results"]
    found = {(one["mode"], one["delay_ms"]): one for one in results}
    assert set(found) == {("plain PyTorch", 0.0), ("synchronous", 2.0), ("hybrid 8", 2.0)}
    assert all(one["test_auc"] > 0.88 for one in results)  # Adult is not cut down
    # Lookup and update of a step take 2 ms longer each.
    assert found["synchronous", 2.0]["samples_per_second"] < 256 / 0.004
    assert found["synchronous", 2.0]["measured_staleness"] == 0
    assert found["hybrid 8", 2.0]["measured_staleness"] > 0
    assert (folder / "adult.png").is_file()

    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").iterdir()}
    again = study(tmp_path, *arguments, "--write", str(page))
    assert again.returncode == 0, again.stdout + again.stderr
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs").iterdir()} == before
    assert "| adult | hybrid 8 |" in page.read_text()
    assert str(tmp_path) not in page.read_text()  # figures do not depend on folders


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    empty = study(tmp_path, "--report-only")
    assert empty.returncode == 1
    assert "run the study first" in empty.stderr
    missing = study(tmp_path, "--dataset", "adult", "--adult-source", str(tmp_path))
    assert missing.returncode == 1
    assert "give the folder that holds the UCI Adult files" in missing.stderr
