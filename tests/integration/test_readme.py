"""Runs the three scripts of README.md exactly as printed, each in an empty folder, and follows its links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "examples").glob("*/README.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUM_STEPS_BETWEEN_LOSSES, NUM_BATCHES = 50, 300


def blocks(heading: str) -> list[tuple[str, str]]:
    """Language and text of each code block of a section."""
    section = README.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return BLOCK.findall(section)


def write_script(heading: str, folder: Path) -> str:
    """Writes the section's one script, which its first line names; returns the name."""
    ((language, text),) = blocks(heading)
    assert language == "python"
    name = text.split()[1]
    (folder / name).write_text(text, encoding="utf-8")
    return name


def run(command: list[str], folder: Path) -> str:
    """Runs `command` as a shell in this Python's environment would; returns what it printed."""
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
    return done.stdout + done.stderr


def assert_learned(output: str, folder: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", output)]
    assert len(losses) == NUM_BATCHES // NUM_STEPS_BETWEEN_LOSSES
    assert losses[-1] < losses[0] / 2, losses
    assert (folder / "checkpoint" / "manifest.json").is_file()


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def test_a_model_is_converted(tmp_path: Path) -> None:
    name = write_script("Convert a model", tmp_path)
    output = run(["python", name], tmp_path)
    (loss,) = re.findall(r"^loss (\S+)$", output, re.MULTILINE)
    assert float(loss) < 0.5  # 0.69 is what a guess gives
    assert zipfile.is_zipfile(tmp_path / "model.pt2")  # what it computes is tested with `export`


def test_the_script_runs_in_one_process(tmp_path: Path) -> None:
    name = write_script("One process", tmp_path)
    assert_learned(run(["python", name], tmp_path), tmp_path)


def test_the_same_script_runs_on_a_cluster(tmp_path: Path) -> None:
    write_script("One process", tmp_path)
    ((language, commands),) = blocks("Cluster")
    assert language == "sh"
    assert_learned(run(["sh", "-euc", commands], tmp_path), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if "://" not in link]
    assert links or page != README
    for link in links:
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, link


def test_the_picture_is_well_formed() -> None:
    picture = REPOSITORY / "docs" / "images" / "overview.svg"
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert picture.stat().st_size < 8192
