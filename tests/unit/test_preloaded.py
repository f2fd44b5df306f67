"""Forks of the preloaded process are as the processes that Python starts, to those that start them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from persia.waiting import Attempts
from tests.preloaded import Preloaded, start_as_always

FACTS = """
import json, os, resource, signal, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
    "folder": os.getcwd(), "given": sys.stdin.read(),
    "variable": os.environ.get("GIVEN"), "other": os.environ.get("PERSIA_JOB_SECRET"),
    "command": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)), "parent": os.getppid(),
    "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()], "open": os.listdir("/proc/self/fd"),
    "cores": sorted(os.sched_getaffinity(0)), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "mask": os.umask(0), "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
}))
print("to stderr", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    with closing(Preloaded()) as process, pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", start_as_always)
        yield process


@pytest.fixture(params=["always", "forked"])
def as_(request: pytest.FixtureRequest, preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch) -> str:
    """Processes start as always, or as forks."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", start_as_always)
    if request.param == "forked":
        preloaded.install()
    return str(request.param)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Writes a script; returns the command that runs it."""

    def write(source: str) -> list[str]:
        (tmp_path / "script.py").write_text(source, encoding="utf-8")
        return [sys.executable, str(tmp_path / "script.py")]

    return write


def test_a_process_has_what_it_was_given(
    as_: str, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    def facts(**options: Any) -> dict[str, Any]:
        command = [*script(FACTS), "--flag", "ü"]
        done = subprocess.run(command, input="text", capture_output=True, text=True, **options)
        assert (done.returncode, done.stderr) == (0, "to stderr\n")
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["command"] == command
        assert found["parent"] == os.getpid()
        return found

    before = os.umask(0o027)
    cores, limits = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        os.sched_setaffinity(0, {min(cores)})
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
        found = facts(cwd=tmp_path, env={**os.environ, "GIVEN": "a=b", "PERSIA_JOB_SECRET": ""})
    finally:
        os.umask(before)
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert found["argv"] == [str(tmp_path / "script.py"), "--flag", "ü"]
    assert (found["name"], found["file"], found["path"]) == ("__main__", found["argv"][0], str(tmp_path))
    assert (found["folder"], found["given"], found["variable"], found["other"]) == (
        str(tmp_path),
        "text",
        "a=b",
        "",
    )
    assert (found["cores"], found["files"][0], found["mask"]) == ([min(cores)], 500, 0o027)
    assert found["blocked"] == [signal.SIGUSR1]
    assert found["leads"] == [False, False]
    assert len(found["open"]) == 4  # the fourth lists them
    assert found["handlers"] == ["<built-in function default_int_handler>", "0", "1"]
    assert facts(start_new_session=True)["leads"] == [True, True]
    if sys.version_info >= (3, 11):
        assert facts(process_group=0)["leads"] == [True, False]


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import atexit, os; atexit.register(os._exit, 7)", 7, ""),
        ("import sys; sys.stdout.close()", 0, ""),
        ("import threading, time, os; threading.Timer(0.1, os._exit, [8]).start()", 8, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("import os, sys; os.execve(sys.executable, [sys.executable, '-c', 'exit(9)'], {})", 9, ""),
        ("import os, sys; os.execv('/bin/sh', ['sh', '-c', 'exit 10'])", 10, ""),
    ],
)
def test_a_process_ends_as_its_script_says(
    as_: str, script: Callable[[str], list[str]], source: str, code: int, says: str
) -> None:
    done = subprocess.run(script(source), capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert says in done.stderr


def test_what_cannot_start_is_an_error_of_the_parent(as_: str, script: Callable[[str], list[str]]) -> None:
    with pytest.raises(FileNotFoundError):
        subprocess.run(script(""), cwd="/no/such/folder")
    assert subprocess.run([sys.executable], input=b"exit(4)").returncode == 4
    assert subprocess.run(Path("/bin/true")).returncode == 0


def test_a_forked_process_starts_its_own_as_always(as_: str, script: Callable[[str], list[str]]) -> None:
    command = script("import sys; sys.exit(3)")
    if (pid := os.fork()) == 0:
        os._exit(subprocess.run(command).returncode)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_without_the_preloaded_process_all_is_started_as_always(
    script: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess.Popen, "_execute_child", start_as_always)
    with closing(Preloaded()) as own:
        own.install()
        command = script(
            "import os, sys; sys.exit('tests/preloaded' in open(f'/proc/{os.getppid()}/cmdline').read())"
        )
        assert subprocess.run(command).returncode == 0
        assert own._popen is not None
        own._popen.kill()
        own._popen.wait(30)
        for _ in range(2):
            assert subprocess.run(command).returncode == 0
    assert capfd.readouterr().err.count("has ended or hangs") == 1


def test_the_preloaded_process_ends_with_its_parent(tmp_path: Path) -> None:
    source = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from tests.preloaded import Preloaded
preloaded = Preloaded()
preloaded.install()
subprocess.run([sys.executable, sys.argv[2]], check=True)
print(preloaded._popen.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    (tmp_path / "script.py").write_text("")
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", source, root, str(tmp_path / "script.py")], capture_output=True, text=True
    )
    assert done.returncode == -9, done.stderr
    for _ in Attempts(60.0, pause_s=0.05):
        if not Path(f"/proc/{done.stdout.strip()}/cmdline").exists():
            return
    pytest.fail("it still runs")
