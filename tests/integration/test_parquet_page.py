"""Runs docs/parquet.md from its first block to its last, in an empty folder: one process, then a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from persia.checkpoint.checkpoints import newest_of
from persia.config import parse_embedding_config
from persia.storage.location import Location

PAGE = Path(__file__).parents[2] / "docs" / "parquet.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERSIA_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def aucs(output: str) -> list[float]:
    return [float(auc) for auc in re.findall(r"step \d+: auc (\S+),", output)]


@pytest.mark.timeout(900)  # three jobs, one of them a cluster
def test_every_block_runs_in_order(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    commands = [text for language, text in blocks if language == "sh"]
    scripts = [text for language, text in blocks if language == "python"]
    (slots,) = (text for language, text in blocks if language == "yaml")
    _, roles = (text for language, text in blocks if language == "text")
    made_up, one_process, own, cluster = commands
    run(["sh", "-euc", made_up], tmp_path)
    printed = run(["sh", "-euc", one_process], tmp_path)
    assert aucs(printed)[-1] > 0.7  # as the page shows; 0.5 is what a guess gives
    assert run(["sh", "-euc", own], tmp_path).startswith(roles)
    assert "C26" in parse_embedding_config(_yaml(slots)).slots_config
    printed = run([sys.executable, "-c", "".join(scripts)], tmp_path)
    assert float(re.findall(r"best AUC (\S+) at step", printed)[0]) > 0.6
    printed = run(["sh", "-euc", cluster], tmp_path)
    found = aucs(printed)
    assert len(found) == 3, printed  # epochs, of one rank
    # The data is read once an epoch by all together: 90 batches, 3 times.
    directory = Location.of(tmp_path / "own_job" / "checkpoints")
    newest = newest_of([directory / "best", directory / "last"])
    assert newest is not None
    trained = newest.manifest.trained
    assert trained is not None
    assert trained.count_missing(0, 1, 270) == 0
    assert 270 not in trained
    assert all(0.5 < auc < 1 for auc in found)


def _yaml(text: str) -> dict[str, object]:
    import yaml

    values: dict[str, object] = yaml.safe_load(text)
    return values
