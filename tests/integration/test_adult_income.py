"""The adult-income example as a newcomer runs it: the demo, with every real process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("honcho", reason="needs honcho (the 'examples' extra)")
pytest.importorskip("matplotlib", reason="needs matplotlib (the 'examples' extra)")

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "adult_income"
TIMEOUT_S = 240


def demo_command(output: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLE / "demo.py"), "--output", str(output), *arguments]


def demo_environment(**changes: str) -> dict[str, str]:
    settings = ("ADULT_SOURCE", "REPRODUCIBLE", "EMBEDDING_STALENESS", "SEED", "PERSIA_NATS_URL")
    return {name: value for name, value in os.environ.items() if name not in settings} | changes


def run_demo(output: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        demo_command(output, *arguments),
        env=demo_environment(**environment),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def job_processes(output: Path) -> list[str]:
    """Processes that were started for this output directory, by their environment."""
    tag = f"ADULT_OUTPUT={output}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if tag in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    deadline = time.monotonic() + 60
    while left := job_processes(tmp_path):  # one that was killed takes a moment to end
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def check_summary(output: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert summary["samples_per_second"] > 0
    assert 1 <= summary["max_staleness"] <= summary["embedding_staleness"]
    for path in summary["paths"].values():
        assert Path(path).exists(), path
    assert {"dense.pt", "jit_dense.pt"} <= {path.name for path in (output / "checkpoint").iterdir()}
    return summary


@pytest.fixture(scope="module")
def reproducible_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The summary and the output of `./run demo` in reproducible mode."""
    output = tmp_path_factory.mktemp("reproducible")
    finished = run_demo(output, REPRODUCIBLE="1", EMBEDDING_STALENESS="1", OMP_NUM_THREADS="1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert job_processes(output) == []
    return check_summary(output), finished.stdout


def test_demo_reaches_the_published_auc(reproducible_demo: tuple[dict[str, Any], str]) -> None:
    summary, printed = reproducible_demo
    assert summary["dataset"] == "adult"
    assert summary["test_auc"] >= 0.892
    assert summary["embedding_staleness"] == 1
    assert summary["num_embeddings"] == 102  # All categories of the eight columns.
    assert f"{summary['test_auc']:.7f}" in printed
    row = re.search(r"^\W+test AUC .*", printed, re.MULTILINE)
    assert row is not None
    assert row.group().count(f"{summary['test_auc']:.5f}") == 2, "one process and cluster, side by side"


def test_one_process_computes_the_same_bits(reproducible_demo: tuple[dict[str, Any], str]) -> None:
    summary = reproducible_demo[0]
    output = Path(summary["paths"]["picture"]).parent / "one_process"
    assert "embedded mode" in (output / "train.log").read_text(encoding="utf-8")
    check_summary(output)
    # Not a constant: its last digits depend on the instruction set that torch uses.
    assert summary["one_process"]["test_auc"] == summary["test_auc"]
    assert summary["one_process"]["num_embeddings"] == 102


def test_demo_on_generated_data_does_not_pretend(output: Path) -> None:
    finished = run_demo(output, "--generate")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary = check_summary(output)
    best_auc = json.loads((output / "data" / "dataset.json").read_text(encoding="utf-8"))["best_auc"]
    assert summary["dataset"] == "generated"
    assert best_auc - 0.02 < summary["test_auc"] < best_auc + 0.005
    assert "not Adult" in finished.stdout
    assert "published" not in finished.stdout


def test_demo_shows_the_error_of_the_process_that_failed(output: Path) -> None:
    stale = [output / "curves.png", output / "checkpoint" / "dense.pt", output / "history.jsonl"]
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text("of an earlier run", encoding="utf-8")
    finished = run_demo(output, "--generate", SEED="none")
    assert finished.returncode == 1
    _, _, report = finished.stderr.partition("the demo failed")
    assert "SEED is 'none'" in report
    assert not (output / "summary.json").exists()
    assert [path for path in stale if path.exists()] == []


def test_an_interrupted_demo_leaves_nothing_running(output: Path) -> None:
    demo = subprocess.Popen(
        demo_command(output, "--generate"),
        env=demo_environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if "started (pid=" in line:
            break
    time.sleep(1.0)  # Somewhere in the start of the others: any moment must do.
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=240)
    assert demo.returncode == 130
    assert "every process of the job has been stopped" in errors
