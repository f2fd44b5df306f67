"""The build says which distribution packages are missing instead of failing somewhere in CMake.

Nothing is uninstalled for this: a compiler that cannot see Asio stands in for a machine without it.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

SETUP = Path(__file__).resolve().parents[2] / "setup.py"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module: it builds only when it is the main program."""
    monkeypatch.delenv("CXX", raising=False)
    spec = importlib.util.spec_from_file_location("persia_setup", SETUP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "persia_setup", module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compiler_without_asio(tmp_path: Path) -> str:
    (tmp_path / "asio.hpp").write_text("#error not installed\n")
    return f"{shutil.which('c++')} -I{tmp_path}"


def test_a_complete_machine_passes(build: ModuleType) -> None:
    build.check_requirements()


def test_without_asio(build: ModuleType, compiler_without_asio: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler_without_asio)
    with pytest.raises(SystemExit) as caught:
        build.check_requirements()
    lines = str(caught.value).splitlines()
    assert "apt-get install libasio-dev" in lines[-2]
    assert "dnf install asio-devel" in lines[-1]
    assert "asio.hpp" in lines[1]


def test_without_python_headers(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=rf"apt-get install {build.PYTHON}-dev\n"):
        build.check_requirements()


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_compiler_everything_is_named(
    build: ModuleType, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    headers = f"{build.PYTHON}-dev libasio-dev libzstd-dev libxxhash-dev libssl-dev libnghttp2-dev"
    with pytest.raises(SystemExit, match=rf"apt-get install g\+\+ {headers}\n"):
        build.check_requirements()
