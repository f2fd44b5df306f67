"""The include check finds what it is there to find."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "native" / "check_layers.py"
TABLE = """# The layers:
#
#   base <- simd <- store
#   store, net <- server
#   base <- net
#
cmake_minimum_required(VERSION 3.22)
"""


@pytest.fixture(scope="module")
def check_layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def native(tmp_path: Path) -> Path:
    (tmp_path / "CMakeLists.txt").write_text(TABLE)
    for layer in ("base", "simd", "store", "net", "server"):
        (tmp_path / "src" / layer).mkdir(parents=True)
    return tmp_path


def test_the_table_is_followed_to_its_ends(check_layers: ModuleType) -> None:
    table = check_layers.read_table(TABLE)
    assert table["server"] == {"server", "store", "net", "simd", "base"}
    assert table["net"] == {"net", "base"}
    assert table["base"] == {"base"}


@pytest.mark.parametrize(
    ("layer", "include"),
    [("store", '"base/status.h"'), ("server", '"simd/kernels.h"'), ("base", "<net/if.h>")],
)
def test_allowed(check_layers: ModuleType, native: Path, layer: str, include: str) -> None:
    (native / "src" / layer / "x.cc").write_text(f"#include {include}\n")
    assert check_layers.check(native) == []


@pytest.mark.parametrize(
    ("layer", "include", "message"),
    [
        ("base", "net/server.h", "x.h:2: layer base may not include net/server.h"),
        ("net", "store/shard.h", "layer net may not include store/shard.h"),
        ("store", "shard.h", 'write the layer too, "store/shard.h"'),
        ("store", "vendor/lib.h", "may not include vendor/lib.h"),
    ],
)
def test_violations(check_layers: ModuleType, native: Path, layer: str, include: str, message: str) -> None:
    (native / "src" / layer / "x.h").write_text(f'#pragma once\n  #  include "{include}"\n')
    (found,) = check_layers.check(native)
    assert message in found


def test_a_folder_outside_the_table(check_layers: ModuleType, native: Path) -> None:
    (native / "src" / "extra").mkdir()
    (found,) = check_layers.check(native)
    assert "extra: not in the layer table" in found


def test_no_table(check_layers: ModuleType, native: Path) -> None:
    (native / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.22)\n")
    assert "no layer table" in check_layers.check(native)[0]


def test_this_repository(check_layers: ModuleType) -> None:
    assert check_layers.check(SCRIPT.parent) == []
