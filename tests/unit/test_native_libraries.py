"""The native module needs few shared libraries and no PyTorch: one wheel serves every version of it."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import persia._native as native

C_LIBRARIES = {"libc", "libm", "libpthread", "libdl", "librt", "ld-linux-x86-64", "ld-linux-aarch64"}
FROM_THE_DISTRIBUTION = {"libstdc++", "libgcc_s", "libzstd", "libssl", "libcrypto", "libnghttp2", "libpmem"}


def readelf(option: str) -> str:
    core = Path(native.__file__).parent / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    done = subprocess.run(["readelf", "--wide", option, core], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_module_needs_no_other_libraries() -> None:
    needed = set(re.findall(r"\(NEEDED\) .*\[(.+?)\.so", readelf("--dynamic")))
    assert "libc" in needed
    assert needed <= C_LIBRARIES | FROM_THE_DISTRIBUTION


def test_the_module_is_independent_of_torch() -> None:
    symbols = re.findall(r" (?:UND|[0-9]+) (\S+)$", readelf("--dyn-syms"), re.MULTILINE)
    assert any(symbol.startswith("Py") for symbol in symbols)
    assert [symbol for symbol in symbols if re.search(r"^_ZNK?(?:2at|3c10|5torch)|THP|cuda", symbol)] == []
