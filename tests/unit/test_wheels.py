"""What wheels promise: the libraries that the native module needs, the Pythons built for, refusals."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import persia._native as native

ROOT = Path(__file__).resolve().parents[2]
# Those of every Linux, and the three that a build from source takes from its distribution.
C_LIBRARIES = {"libc", "libm", "libpthread", "libdl", "librt", "ld-linux-x86-64", "ld-linux-aarch64"}
BUILT_FROM_SOURCE = {"libstdc++", "libgcc_s", "libzstd", "libssl", "libcrypto", "libnghttp2", "libpmem"}


@pytest.fixture
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("persia_wheels", ROOT / "native" / "wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def readelf(option: str) -> str:
    core = Path(native.__file__).parent.glob("_core.*.so")
    return subprocess.run(
        ["readelf", "--wide", option, *core], capture_output=True, text=True, check=True
    ).stdout


def test_the_module_needs_no_other_libraries() -> None:
    needed = set(re.findall(r"\(NEEDED\) .*\[(.+?)\.so", readelf("--dynamic")))
    assert "libc" in needed
    assert needed <= C_LIBRARIES | BUILT_FROM_SOURCE


def test_the_module_is_independent_of_torch() -> None:
    """One module serves every version of torch."""
    symbols = re.findall(r" (?:UND|[0-9]+) (\S+)$", readelf("--dyn-syms"), re.MULTILINE)
    assert any(symbol.startswith("Py") for symbol in symbols)
    assert [symbol for symbol in symbols if re.search(r"^_ZNK?(?:2at|3c10|5torch)|THP|cuda", symbol)] == []


def test_the_same_pythons_are_built_for_everywhere(wheels: ModuleType) -> None:
    classifiers = re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert tuple(classifiers) == wheels.VERSIONS
    assert re.findall(r"^ {12}(3\.\d+)$", release, re.MULTILINE) == classifiers
    (named,) = re.findall(r"^ +PYTHONS: ([^#\n]+?) *(?:#|$)", release, re.MULTILINE)
    assert named.split() == [f"python{version}" for version in classifiers]


def test_a_named_interpreter_must_be_installed(wheels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONS", f"{sys.executable} python3.999")
    with pytest.raises(SystemExit, match=r"PYTHONS names python3\.999"):
        wheels.interpreters()


def test_other_interpreters_may_be_missing(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "python3.12").symlink_to(sys.executable)
    (found,) = wheels.interpreters()
    assert found.is_file()
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[4] for line in said] == ["python3.10:", "python3.11:", "python3.13:"]


def test_a_library_of_another_architecture_is_named_with_its_package(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(wheels.Path, "glob", lambda path, pattern: iter([]))
    with pytest.raises(SystemExit, match=r"--add-architecture arm64 .*apt-get install libzstd-dev:arm64$"):
        wheels.static_zstd("aarch64")
    with pytest.raises(SystemExit, match=r"Install it:\n  apt-get install libzstd-dev:amd64$"):
        wheels.static_zstd("x86_64")
    with pytest.raises(SystemExit, match=r"apt-get install gcc-aarch64-linux-gnu$"):
        wheels.static_libgcc("aarch64")


def test_a_program_of_another_architecture_runs_under_its_own_name(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A virtual environment finds its packages beside the name that Python was called by."""
    emulator, program, name = tmp_path / "qemu", tmp_path / "a program", tmp_path / "name"
    emulator.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    emulator.chmod(0o755)
    program.write_bytes(b"\x7fELF")
    monkeypatch.setattr(wheels, "EMULATOR", emulator)
    wheels.emulate_in_place(program)
    name.symlink_to(program)
    said = subprocess.run([name, "-c", "two words"], capture_output=True, text=True, check=True).stdout
    moved = tmp_path / "a program.aarch64"
    assert said.splitlines() == ["-L", str(wheels.EMULATED), "-0", str(name), str(moved), "-c", "two words"]
    assert moved.read_bytes() == b"\x7fELF"


def test_a_wheel_is_tried_with_a_python_that_fits(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONS", sys.executable)
    monkeypatch.setattr(wheels, "emulated_python", lambda: Path(sys.executable))
    monkeypatch.setattr(wheels.platform, "machine", lambda: "x86_64")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for architecture in wheels.ARCHITECTURES:
        wheel = Path(f"persia-1-{tag}-{tag}-manylinux_2_28_{architecture}.whl")
        assert wheels.python_for(wheel).samefile(sys.executable)
        assert wheels.is_emulated(wheel) == (architecture == "aarch64")
    with pytest.raises(SystemExit, match=r"not installed: name it in PYTHONS$"):
        wheels.python_for(Path("persia-1-cp399-cp399-manylinux_2_28_x86_64.whl"))
    with pytest.raises(SystemExit, match=r"not installed: the distribution's Python is another$"):
        wheels.python_for(Path("persia-1-cp399-cp399-manylinux_2_28_aarch64.whl"))


def test_a_release_uploads_the_wheels_that_it_has_tried() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    jobs = release["jobs"]
    assert jobs["wheels"]["strategy"]["matrix"] == {"os": ["ubuntu-22.04", "ubuntu-22.04-arm"]}
    commands = [step.get("run", step.get("uses", "")) for step in jobs["wheels"]["steps"]]
    order = [
        next(position for position, command in enumerate(commands) if command.startswith(start))
        for start in (
            "./run wheels",
            "./run try-wheels",
            "python3.10 native/wheels.py",
            "actions/upload-artifact",
        )
    ]
    assert order == sorted(order)
    uploads = [
        step["with"]["path"]
        for job in jobs.values()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact")
    ]
    assert uploads == ["build/dist/*.whl", "build/dist/*.tar.gz"]
    assert set(jobs["publish"]["needs"]) == {"wheels", "archive"}
    # Each Python with its oldest PyTorch.
    (oldest,) = [command for command in commands if command.startswith("python3.10 native/wheels.py")]
    tried = [
        re.findall(r"torch==(\S+) build/dist/persia-\*-(\S+)-\*\.whl$", line) for line in oldest.splitlines()
    ]
    assert tried == [[("2.4.0", "cp31[012]")], [("2.6.0", "cp313")]]


def test_the_first_step_is_timed_while_the_script_trains(wheels: ModuleType, tmp_path: Path) -> None:
    def train(script: str) -> str:
        command = (sys.executable, "-c", script)
        return str(wheels.train(command, {"PATH": ""}, tmp_path, wheels.Clock()))

    steps = "print('step 0: loss 0.7'); print('step 50: loss 0.1')"
    assert re.fullmatch(r"\d+ s \(\d+ s of processor time\)", train(steps))
    with pytest.raises(SystemExit, match=r"(?s)a traceback.*ended with 1"):
        train(f"{steps}; raise SystemExit('a traceback')")
    with pytest.raises(SystemExit, match="ended with 0"):
        train("print('no step')")


@pytest.mark.skipif(
    not Path("/usr/lib", f"{platform.machine()}-linux-gnu", "libnghttp2.a").exists(),
    reason="needs the static library of libnghttp2-dev, as Debian and Ubuntu install it",
)
def test_a_shared_library_can_link_nghttp2(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The distribution's own library takes the address of `stderr`, which linkers refuse in a shared one."""
    monkeypatch.setattr(wheels, "WORK", tmp_path)
    library = tmp_path / "libprobe.so"
    (tmp_path / "exports.map").write_text("{ local: *; };", encoding="utf-8")
    command = [
        "c++",
        "-shared",
        "-o",
        library,
        "-Wl,--whole-archive",
        wheels.static_nghttp2(platform.machine()),
    ]
    command += ["-Wl,--no-whole-archive", "-Wl,-z,defs", f"-Wl,--version-script={tmp_path / 'exports.map'}"]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library))
