"""docs/architecture.md lists the files that an ID feature crosses: those that a real job executes for it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import persia

ROOT = Path(persia.__file__).parents[1]
NUM_BATCHES = 400  # more than there are seconds in the job: heartbeats and checks stay below
MOST_PYTHON_FILES = 22
MOST_NATIVE_FILES = 36

# Runs in every process of the job. Counts the calls of each function of the package, per thread, from the
# first batch on.
TRACER = """
import atexit, json, os, sys, threading, time

PACKAGE = {package!r}
FIRST = {{("pipeline/send.py", "send"), ("pipeline/send.py", "__call__"), ("pipeline/receive.py", "offer")}}
local, all_counts, begun, lock = threading.local(), [], [], threading.Lock()

def profile(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(PACKAGE):
        return
    if not begun:
        if (code.co_filename[len(PACKAGE):], code.co_name) not in FIRST:
            return
        begun.append(code)
    if not hasattr(local, "counts"):
        local.counts = {{}}
        all_counts.append(local.counts)
    local.counts[code] = local.counts.get(code, 0) + 1

def write():
    total = {{}}
    for counts in list(all_counts):
        for code, count in list(counts.items()):
            key = (code.co_filename[len(PACKAGE):], f"{{code.co_name}}:{{code.co_firstlineno}}")
            total[key] = total.get(key, 0) + count
    if total:
        name = os.path.join({output!r}, str(os.getpid()))
        with lock:  # the end of the process may come while the thread writes
            with open(name, "w") as file:
                json.dump([[*key, count] for key, count in total.items()], file)
            os.replace(name, name + ".json")

def keep_writing():  # servers may be killed before their exit
    while True:
        time.sleep(0.2)
        write()

atexit.register(write)
threading.setprofile(profile)
sys.setprofile(profile)
threading.Thread(target=keep_writing, daemon=True).start()
"""


def executed_files(output: Path) -> set[str]:
    """Files with a function that a process has called for each batch, but perhaps the first."""
    calls = [call for path in output.glob("*.json") for call in json.loads(path.read_text())]
    return {f"persia/{file}" for file, _, count in calls if count >= NUM_BATCHES - 1}


def listed(heading: str) -> list[str]:
    """The files that a section of the architecture page names, in its order."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"`((?:persia|native)/[\w/]+\.(?:py|cc|h|inc))`", section)


def test_python_files_are_those_that_a_job_executes(run_job: Callable[..., Any], tmp_path: Path) -> None:
    output = tmp_path / "calls"
    output.mkdir()
    tracer = TRACER.format(package=str(ROOT / "persia") + os.sep, output=str(output))
    (tmp_path / "sitecustomize.py").write_text(tracer)
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run_job(loaders=[NUM_BATCHES], env={"PYTHONPATH": path})
    assert len(list(output.glob("*.json"))) == 3, "data loader, embedding worker, NN worker"
    on_the_way = [file for file in listed("Files of one batch") if file.endswith(".py")]
    beside = listed("Files off the path")
    assert executed_files(output) == {*on_the_way, *beside}
    assert len(on_the_way) == len(set(on_the_way)) <= MOST_PYTHON_FILES
    assert not set(on_the_way) & set(beside)


def test_native_files_are_few() -> None:
    native = [file for file in listed("Files of one batch") if file.startswith("native/")]
    assert native
    assert len(native) == len(set(native)) <= MOST_NATIVE_FILES


def test_listed_files_exist() -> None:
    files = listed("Files of one batch") + listed("Files off the path")
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
