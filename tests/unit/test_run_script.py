"""`./run` works from any folder, teaches, and refuses what it does not know; CI runs its commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "run"


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUN, *arguments], cwd=cwd, capture_output=True, text=True, timeout=30, check=False)


def test_it_is_a_posix_script() -> None:
    assert RUN.read_text(encoding="utf-8").startswith("#!/bin/sh\n")
    subprocess.run(["sh", "-n", RUN], check=True)


@pytest.mark.parametrize("option", ["--help", "-h", "help"])
def test_help(tmp_path: Path, option: str) -> None:
    shown = run(tmp_path, option)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: ./run COMMAND")


def test_help_names_every_command(tmp_path: Path) -> None:
    listed = set(re.findall(r"^  ([a-z][a-z-]+) ", run(tmp_path, "--help").stdout, re.MULTILINE))
    source = RUN.read_text(encoding="utf-8")
    defined = {name.replace("_", "-") for name in re.findall(r"^cmd_(\w+)\(\)", source, re.MULTILINE)}
    assert listed == defined | {"setup"}


def test_no_command(tmp_path: Path) -> None:
    shown = run(tmp_path)
    assert shown.returncode == 1
    assert "./run COMMAND" in shown.stdout


def test_an_unknown_command(tmp_path: Path) -> None:
    shown = run(tmp_path, "tets")
    assert shown.returncode == 1
    assert "unknown command 'tets'; ./run --help lists them" in shown.stderr
