"""Compares every #include of the native sources with the layer table at the top of native/CMakeLists.txt.

Linking alone does not keep layers apart: a header that is included but whose library is not linked goes
unnoticed as long as only its inline parts are used. Run by `./run lint`; prints each violation as file:line
and exits with 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
CHAIN = re.compile(r"^# {3}(\w[\w, ]*(?:<- [\w, ]+)+)$", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
SUFFIXES = {".h", ".cc", ".inc"}


def read_table(cmake_text: str) -> dict[str, set[str]]:
    """The layers that each layer may include: those of the chains `a, b <- c`, followed to their ends."""
    below: dict[str, set[str]] = {}
    for chain in CHAIN.findall(cmake_text.split("cmake_minimum_required")[0]):
        groups = [[name.strip() for name in group.split(",")] for group in chain.split("<-")]
        for name in groups[0]:
            below.setdefault(name, set())
        for lower, upper in pairwise(groups):
            for name in upper:
                below.setdefault(name, set()).update(lower)
    return {layer: closure(layer, below) for layer in below}


def closure(layer: str, below: dict[str, set[str]]) -> set[str]:
    reached: set[str] = {layer}
    waiting = [layer]
    while waiting:
        for lower in below[waiting.pop()] - reached:
            reached.add(lower)
            waiting.append(lower)
    return reached


def violations(source: Path, layer: str, allowed: set[str]) -> Iterator[str]:
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        include = INCLUDE.match(line)
        if include is None:
            continue
        owner, slash, _ = include[1].partition("/")
        if not slash:
            yield f'{source}:{number}: #include "{include[1]}": write the layer too, "{layer}/{include[1]}"'
        elif owner not in allowed:
            names = ", ".join(sorted(allowed))
            yield f"{source}:{number}: layer {layer} may not include {include[1]}; it may include {names}"


def check(native: Path) -> list[str]:
    """All violations below `native`/src."""
    allowed = read_table((native / "CMakeLists.txt").read_text(encoding="utf-8"))
    found = [] if allowed else [f"{native / 'CMakeLists.txt'}: no layer table at its top"]
    for folder in sorted(path for path in (native / "src").iterdir() if path.is_dir()):
        if folder.name not in allowed:
            found.append(f"{folder}: not in the layer table of {native / 'CMakeLists.txt'}")
            continue
        for source in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
            found += violations(source, folder.name, allowed[folder.name])
    return found


if __name__ == "__main__":
    problems = check(NATIVE)
    print("\n".join(problems) or "native layers: no include against the table")
    sys.exit(1 if problems else 0)
