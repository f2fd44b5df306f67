"""`./run` works from any folder, teaches, and refuses what it does not know; CI runs its commands."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from persia.waiting import Attempts

RUN = Path(__file__).resolve().parents[2] / "run"


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RUN, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


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


def test_skipped_tests_name_the_command_that_adds_them(tmp_path: Path) -> None:
    pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/k8s/test_server.py"],
        cwd=RUN.parent,
        env=os.environ | {"KUBEBUILDER_ASSETS": str(tmp_path), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *_, advice, _summary = finished.stdout.splitlines()
    assert re.match(r"[0-9]+ tests were skipped .* API server .*`./run extras`", advice), finished.stdout


@pytest.fixture
def kubebuilder(tmp_path: Path) -> Callable[[Path], subprocess.CompletedProcess[str]]:
    """Calls `./run kubebuilder` in a folder of its own, for a source; etcd counts as installed."""
    shutil.copy(RUN, tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "etcd").symlink_to(shutil.which("true") or "/bin/true")

    def call(source: Path) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "KUBEBUILDER_SOURCE": str(source),
        }
        command = [tmp_path / "run", "kubebuilder"]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    return call


def test_kubebuilder_takes_plain_and_packed_programs(
    tmp_path: Path, kubebuilder: Callable[[Path], subprocess.CompletedProcess[str]]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "kube-apiserver").write_text("#!/bin/sh\necho server\n", encoding="utf-8")
    (source / "kube-controller-manager.xz").write_bytes(lzma.compress(b"#!/bin/sh\necho manager\n"))
    finished = kubebuilder(source)
    assert finished.returncode == 0, finished.stderr
    assets = tmp_path / "build" / "kubebuilder"
    for name, said in {"kube-apiserver": "server\n", "kube-controller-manager": "manager\n"}.items():
        assert subprocess.run([assets / name], capture_output=True, text=True, check=True).stdout == said


def test_kubebuilder_leaves_nothing_half_done(
    tmp_path: Path, kubebuilder: Callable[[Path], subprocess.CompletedProcess[str]]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    packed = lzma.compress(b"#!/bin/sh\necho server\n")
    (source / "kube-apiserver.xz").write_bytes(packed[:-8])
    finished = kubebuilder(source)
    assert finished.returncode == 1
    assert "set KUBEBUILDER_SOURCE to a folder that has it" in finished.stderr
    assert not (tmp_path / "build" / "kubebuilder" / "kube-apiserver").exists()


def test_no_command(tmp_path: Path) -> None:
    shown = run(tmp_path)
    assert shown.returncode == 1
    assert "./run COMMAND" in shown.stdout


def test_an_unknown_command(tmp_path: Path) -> None:
    shown = run(tmp_path, "tets")
    assert shown.returncode == 1
    assert "unknown command 'tets'; ./run --help lists them" in shown.stderr


S3_PYTHON = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
    *"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *purelib*) dirname "$0" ;;
    *) exit 1 ;; # nothing can be imported
esac
"""


def test_an_environment_for_s3_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    """And pip does not get to look for another package of the name, where persia cannot be imported."""
    shutil.copy(RUN, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(S3_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    log = tmp_path / "log"
    script = "set -- help; . ./run; install_s3"
    environment = {**os.environ, "LOG": str(log)}
    finished = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30
    )
    assert finished.returncode == 1
    assert "without moto and s3fs: tests of S3 are skipped" in finished.stderr
    calls = log.read_text(encoding="utf-8")
    assert "import persia;" in calls
    assert "pip" not in calls


def call(tmp_path: Path, function: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Calls one function of `./run`, in a folder of its own."""
    shutil.copy(RUN, tmp_path)
    command = ["sh", "-c", f"set -- help; . ./run >help; {function}"]
    return subprocess.run(
        command, cwd=tmp_path, input=given, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_build_shows_its_progress(tmp_path: Path) -> None:
    lines = ["Collecting numpy", "[notice] not/ninja", *(f"  [{n}/40] Building x.cc.o" for n in range(1, 41))]
    finished = call(tmp_path, "show_progress", "\n".join(lines) + "\n")
    assert finished.returncode == 0
    shown = [f"    compiled {n}/40 files" for n in range(4, 41, 4)]
    assert (finished.stdout, finished.stderr.splitlines()) == ("", shown)


def test_what_runs_beside_fails_and_says_so_when_it_is_awaited(tmp_path: Path) -> None:
    script = "good() { echo compiled; }; bad() { echo the reason; false; echo more; };"
    script += "beside good good; beside bad bad; echo front; await good; await bad; echo behind"
    finished = call(tmp_path, script)
    assert finished.returncode == 1
    assert (finished.stdout, finished.stderr) == ("front\n", "compiled\nthe reason\n")


def test_what_runs_beside_ends_with_the_command(tmp_path: Path) -> None:
    script = "slow() { sh -c 'echo $$ >pid; exec sleep 300'; echo more; }; "
    script += "beside slow slow; until test -s pid; do sleep 0.01; done; exit 3"
    finished = call(tmp_path, script)
    assert finished.returncode == 3
    pid = int((tmp_path / "pid").read_text(encoding="ascii"))
    for _ in Attempts(30.0, pause_s=0.01):
        if not Path(f"/proc/{pid}").exists():
            return
    pytest.fail("it still runs")


@pytest.mark.parametrize("status", [0, 3])
def test_a_failed_build_is_an_error_with_its_last_lines(tmp_path: Path, status: int) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho '[1/1] Building'\necho 'the reason' >&2\nexit {status}\n")
    python.chmod(0o755)
    finished = call(tmp_path, "compile_module")
    assert (finished.returncode != 0) == (status != 0)
    assert ("the reason" in finished.stderr) == (status != 0)
    assert "the reason" in (tmp_path / "build" / "setup.log").read_text(encoding="utf-8")


def test_a_setup_depends_on_the_engine_and_not_on_programs_beside_it(tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    for name in ("setup.py", "pyproject.toml", "k8s/pyproject.toml", "persia/_version.py", "native/shard.cc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    before = call(tmp_path, "fingerprint").stdout
    (tmp_path / "native" / "wheels.py").write_text("new")
    assert call(tmp_path, "fingerprint").stdout == before
    (tmp_path / "native" / "shard.cc").write_text("new")
    assert call(tmp_path, "fingerprint").stdout != before


def test_a_demo_installs_nothing_for_tests_and_other_commands_add_only_that(tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n", encoding="utf-8")  # every module can be imported
    python.chmod(0o755)
    for name in ("setup.py", "pyproject.toml", "k8s/pyproject.toml", "persia/_version.py", "native/shard.cc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    stages = "install_package() { echo package; }; install_test_packages() { echo tests; };"
    assert call(tmp_path, f"{stages} setup_environment demo").stdout == "package\n"
    assert call(tmp_path, f"{stages} setup_environment demo").stdout == ""
    assert call(tmp_path, f"{stages} setup_environment").stdout == "tests\n"
    assert call(tmp_path, f"{stages} setup_environment").stdout == ""
    (tmp_path / "native" / "shard.cc").write_text("new")
    failing = "install_package() { false; };"
    assert call(tmp_path, f"{stages} {failing} setup_environment").returncode != 0
    assert call(tmp_path, f"{stages} setup_environment").stdout == "package\ntests\n"


def source(folder: Path, call: str) -> subprocess.CompletedProcess[str]:
    """Calls one function of `run` in a folder of its own."""
    functions = RUN.read_text(encoding="utf-8").replace('\nmain "$@"\n', f"\n{call}\n")
    (folder / "run").write_text(functions, encoding="utf-8")
    # One core: these tests run beside others, as many as there are cores.
    (folder / "getconf").write_text("#!/bin/sh\necho 1\n", encoding="utf-8")
    (folder / "getconf").chmod(0o755)
    programs = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": programs}
    return subprocess.run(
        ["sh", folder / "run"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


ONCE = "test -e {seen} || {{ touch {seen}; echo {says}; false; }}"


@pytest.mark.parametrize(
    ("once", "always", "status", "says"),
    [
        ({"a": "a bad day"}, {}, 0, "UNSTEADY"),
        ({"a": "WARNING: ThreadSanitizer: data race"}, {}, 1, "a sanitizer has found a defect"),
        ({}, {"b": "kill -SEGV $$"}, 1, "a suite crashed"),
        ({"a": "a bad day"}, {"b": "test -e crashed || { touch crashed; kill -SEGV $$; }"}, 1, "crashed"),
        ({"a": "a bad day"}, {"b": "false"}, 8, "2 failed: once more"),
        (dict.fromkeys("abcd", "all are bad"), {}, 1, "4 tests failed"),
    ],
)
def test_a_suite_that_failed_runs_once_more(
    tmp_path: Path, once: dict[str, str], always: dict[str, str], status: int, says: str
) -> None:
    scripts = {name: ONCE.format(seen=tmp_path / name, says=text) for name, text in once.items()} | always
    (tmp_path / "native").mkdir()
    scripts["good"] = "true"
    tests = [f'add_test({name} "sh" "-c" "{script}")' for name, script in scripts.items()]
    (tmp_path / "native" / "CTestTestfile.cmake").write_text("\n".join(tests), encoding="utf-8")
    finished = source(tmp_path, "native_build() { folder=$1; }; native_test native")
    assert finished.returncode == status, finished.stdout + finished.stderr
    assert says in finished.stderr, finished.stderr


@pytest.mark.parametrize(
    ("once", "always", "status", "says"),
    [(1, 0, 0, "UNSTEADY"), (1, 1, 1, "2 failed: once more"), (4, 0, 1, "4 tests failed")],
)
def test_a_python_test_that_failed_runs_once_more(
    tmp_path: Path, once: int, always: int, status: int, says: str
) -> None:
    (tmp_path / "test_all.py").write_text(
        f"""
import pathlib, pytest
@pytest.mark.parametrize("name", range({once}))
def test_once(name):
    seen = pathlib.Path(__file__).with_name(f"seen{{name}}")
    before = seen.exists()
    seen.touch()
    assert before
def test_good(): pass
@pytest.mark.parametrize("name", range({always}))
def test_always(name): assert False
""",
        encoding="utf-8",
    )
    finished = source(tmp_path, "run_pytest test_all.py")
    assert finished.returncode == status, finished.stdout + finished.stderr
    assert says in finished.stderr, finished.stderr


def test_a_crash_of_a_python_test_is_no_bad_day(tmp_path: Path) -> None:
    once = "import os, pathlib\ndef test_once():\n    seen = pathlib.Path(__file__).with_suffix('.seen')\n"
    once += "    before = seen.exists()\n    seen.touch()\n    assert before"
    (tmp_path / "test_fails.py").write_text(once, encoding="utf-8")
    (tmp_path / "test_crashes.py").write_text(once + " or os.kill(os.getpid(), 11)", encoding="utf-8")
    finished = source(tmp_path, "run_pytest test_fails.py test_crashes.py")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "a test ended the process that ran it" in finished.stderr, finished.stderr
