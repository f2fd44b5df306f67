"""docs/configuration.md lists every key with its default, and every variable that the package reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from persia.config import GlobalConfig, SlotsConfig
from persia.config.keys import Section, keys_of

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")


def documented_keys(title: str) -> dict[str, tuple[str, str]]:
    """The rows of a chapter's table: key to (type, default)."""
    chapter = DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]+) \|", chapter, flags=re.MULTILINE)
    return {key: (kind, default.strip("` ")) for key, kind, default in rows}


def default_of(section: type[Section], name: str) -> str:
    field = next(field for field in fields(section) if field.name == name)  # type: ignore[arg-type]
    if field.default is not MISSING:
        return field.default if isinstance(field.default, str) else json.dumps(field.default)
    return "required" if field.default_factory is MISSING else json.dumps(field.default_factory())


def existing_keys(section: type[Section], path: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    for key in keys_of(section):
        item: Any = get_args(key.type)[-1] if get_args(key.type) else key.type
        is_section = isinstance(item, type) and issubclass(item, Section)
        is_map = is_section or get_origin(key.type) not in (None, list)
        # A section with a fixed name and defaults needs no row of its own: its keys tell all.
        if not is_section or key.optional or key.required:
            kind = "map" if is_map else key.type.__name__.replace("NoneType", "null")
            yield f"{path}{key.name}", (kind, default_of(section, key.name))
        if is_section:
            yield from existing_keys(item, f"{path}{key.name}." + ("<slot>." if get_args(key.type) else ""))


@pytest.mark.parametrize(
    ("section", "title"), [(GlobalConfig, "global_config.yml"), (SlotsConfig, "embedding_config.yml")]
)
def test_the_tables_have_every_key_with_type_and_default(section, title):
    assert documented_keys(title) == dict(existing_keys(section))


def test_the_table_has_every_variable_that_the_package_reads():
    name = r"PERSIA_[A-Z_]+|EMBEDDING_WORKER_SERVICE|LOG_LEVEL|(?:LOCAL_)?RANK|WORLD_SIZE|REPLICA_[A-Z]+"
    read = set(re.findall(f'"({name})"', (REPOSITORY / "persia" / "env.py").read_text(encoding="utf-8")))
    for file in (REPOSITORY / "persia" / "launcher").glob("*.py"):
        read |= set(re.findall(r"envvar=\"(\w+)\"", file.read_text(encoding="utf-8")))
    chapter = DOCUMENT.split("\n## Environment variables\n")[1]
    cells = re.findall(r"^\| (`[^|]+) \|", chapter, flags=re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert documented == read
