"""Runs what README.md prints in "A training script": alone, and on a cluster with the files it names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def printed(tmp_path: Path) -> list[str]:
    """Writes the section's files, each named by its first line, and returns the words of its command."""
    section = README.read_text().split("## A training script\n", 1)[1].split("\n## ", 1)[0]
    commands = []
    for found in BLOCK.finditer(section):
        language, text = found.groups()
        if language == "sh":
            commands.append(shlex.split(text))
        else:
            (tmp_path / text.split()[1].rstrip(":")).write_text(text)
    names = ["data_loader.py", "embedding_config.yml", "global_config.yml", "train.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    (command,) = commands
    return command


def run(command: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERSIA_")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_learned(output: str, folder: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", output)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2
    assert {"manifest.json", "jit_dense.pt"} <= {path.name for path in (folder / "checkpoint").iterdir()}


def test_the_script_runs_alone_as_printed(printed: list[str], tmp_path: Path) -> None:
    (tmp_path / "data_loader.py").unlink()
    for config in tmp_path.glob("*.yml"):
        config.unlink()
    assert_learned(run([sys.executable, "train.py"], tmp_path), tmp_path)


def test_the_same_script_runs_on_a_cluster(printed: list[str], tmp_path: Path) -> None:
    assert printed[0] == "persia-launcher"
    assert_learned(run([sys.executable, "-m", "persia.launcher", *printed[1:]], tmp_path), tmp_path)
