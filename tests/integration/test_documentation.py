"""Runs the code blocks of the site's Get started, Concepts and How-to pages, in their order.

The Python of a page runs in one namespace, in an empty folder. Shell commands run in the same folder. YAML is
one of the two configuration files. `tests/documented.py` has the marks of blocks that are tested otherwise.
What stands for something longer in a page, `...` or a name of the reader's script, is something small here.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

import tests.documented_pages  # registers what is around blocks
import tests.documented_services  # noqa: F401 - the same
from persia import env
from tests.documented import Block, blocks, check, check_config, exec_code, pages
from tests.documented_stage import AROUND, TIMEOUT_S, Stage

PAGES = pages("Get started", "Concepts", "How-to")
WHOLE = {"parquet.md": "test_parquet_page.py"}  # pages that a test of their own runs from end to end

# --- how a block runs ---------------------------------------------------------------------------------------


def play(block: Block, stage: Stage) -> None:
    if not block.runs:
        check(block)
    elif block.language == "python":
        names = dict(stage.names) if block.mark == "apart" else stage.names
        stage.sources.append(block.text)
        with warnings.catch_warnings():
            if "torchrec" in block.text or "torch.jit" in block.text:
                warnings.simplefilter("ignore")  # those of its import, or of what torch deprecates
            exec_code(block, names, stage.source(block))
    elif block.language == "sh":
        check(block)
        run_shell(block, stage)
    elif block.language == "yaml":
        check_config(block)
    elif block.language != "text":  # output, or a drawing
        raise AssertionError(f"nothing runs {block.language or 'a block without a language'}: mark it")


def run_shell(block: Block, stage: Stage) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERSIA_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= stage.job
    environment["OMP_NUM_THREADS"] = "1"
    command = ["sh", "-euc", stage.source(block)]
    if block.mark == "background":
        # In place of the shell, so that ending it ends the server.
        command[2] = f"exec {command[2]}"
        with (stage.folder / "background.log").open("w") as log:
            stage.background.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
            )
        return
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"):
        monkeypatch.delenv(name, raising=False)
    env.reload_env()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    made = Stage(tmp_path, request.getfixturevalue)
    yield made
    for process in made.background:
        process.terminate()
        process.wait(TIMEOUT_S)
    monkeypatch.undo()
    env.reload_env()


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WHOLE])
def test_every_block_runs_or_says_why_not(page: str, stage: Stage) -> None:
    marks = [mark for place, mark in AROUND if place == page and mark]
    found = list(blocks(page))
    for mark in marks:
        assert sum(mark in block.text for block in found) == 1, f"{page}: {mark!r} must be in one block"
    with AROUND.get((page, ""), no_set_up)(stage):
        for block in found:
            if missing(block):
                continue
            own = [AROUND[page, mark] for mark in marks if mark in block.text]
            try:
                with (own[0] if own else no_set_up)(stage):
                    play(block, stage)
            except Exception as error:
                raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error


def missing(block: Block) -> bool:
    """Whether it needs torchrec, which is made for one release of torch, where that is not installed."""
    return "import KeyedJaggedTensor" in block.text and importlib.util.find_spec("torchrec") is None


def no_set_up(stage: Stage) -> AbstractContextManager[None]:
    return nullcontext()


def test_a_block_without_a_mark_or_a_language_fails(stage: Stage) -> None:
    for language, text in (("", "1 + 1\n"), ("yaml", "nothing: 1\n"), ("console", "$ ls\n")):
        with pytest.raises(AssertionError, match="mark"):
            play(Block("page.md", 1, language, text, ""), stage)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("sh", "persia-launcher serve model/ --no-such-option 1"),
        ("sh", "echo && persia-launcher local --nn-worker train.py --parameter-servers two"),
        ("sh", "./run nothing"),
        ("sh", "kubectl apply -f examples/nothing.yml"),
        ("python", "def f(:\n"),
        ("yaml", "a: [\n"),
        ("console", ""),
    ],
)
def test_a_block_that_does_not_run_is_checked(language: str, text: str) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        check(Block("page.md", 1, language, text, "not run, a test"))
    assert not isinstance(caught.value, AttributeError | ImportError)


def test_pages_with_a_test_of_their_own_have_it() -> None:
    for page, test in WHOLE.items():
        assert page not in PAGES or Path(__file__).with_name(test).is_file(), page


def test_installations_do_not_run() -> None:
    assert not Block("page.md", 1, "sh", "apt-get install g++\npip install persia-*.whl\n", "").runs
    assert Block("page.md", 1, "sh", "pip list && persia-launcher --help\n", "").runs
