"""What wheels promise: the libraries that the native module needs, the Pythons built for, refusals."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import persia._native as native

ROOT = Path(__file__).resolve().parents[2]
# Those of every Linux, and the three that a build from source takes from its distribution.
C_LIBRARIES = {"libc", "libm", "libpthread", "libdl", "librt", "ld-linux-x86-64", "ld-linux-aarch64"}
BUILT_FROM_SOURCE = {"libstdc++", "libgcc_s", "libzstd", "libssl", "libcrypto", "libpmem"}


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
