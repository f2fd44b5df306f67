"""docs/configuration.md lists every key with its default, and every variable that the package reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from persia.config import GlobalConfig, SlotsConfig
from persia.validation import Section

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")


def documented_keys(title: str) -> dict[str, tuple[str, str]]:
    """The rows of a chapter's table: key to (type, default)."""
    chapter = DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]+) \|", chapter, flags=re.MULTILINE)
    return {key: (kind, default.strip("` ")) for key, kind, default in rows}


def parts_of(annotation: Any) -> list[Any]:
    """The classes in an annotation, without None; a string of a choice counts as itself."""
    if get_args(annotation) and annotation is not list:
        return [part for item in get_args(annotation) for part in parts_of(item)]
    return [] if annotation is type(None) else [annotation]


def kind_of(annotation: Any) -> str:
    for name, types in {"map": (dict, Mapping, Section), "list": (list,)}.items():
        for part in (
            annotation,
            *get_args(annotation),
            *map(get_origin, (annotation, *get_args(annotation))),
        ):
            if isinstance(part, type) and issubclass(part, types):
                return name
    (first, *_) = parts_of(annotation)
    return "str" if isinstance(first, str) else first.__name__


def default_of(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    return default if isinstance(default, str) else json.dumps(default)


def existing_keys(section: type[Section], path: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    for name, field in section.model_fields.items():
        parts = parts_of(field.annotation)
        items = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
        # A section with a fixed name and defaults needs no row of its own: its keys tell all.
        if field.annotation not in items:
            yield f"{path}{name}", (kind_of(field.annotation), default_of(field))
        for item in items:
            yield from existing_keys(item, f"{path}{name}." + ("<slot>." if len(parts) > 1 else ""))


@pytest.mark.parametrize(
    ("section", "title"), [(GlobalConfig, "global_config.yml"), (SlotsConfig, "embedding_config.yml")]
)
def test_the_tables_have_every_key_with_type_and_default(section, title):
    assert documented_keys(title) == dict(existing_keys(section))


def test_the_table_has_every_variable_that_the_package_reads():
    name = r"PERSIA_[A-Z_]+|EMBEDDING_WORKER_SERVICE|LOG_LEVEL|(?:LOCAL_)?RANK|WORLD_SIZE|REPLICA_[A-Z]+"
    read = set(re.findall(f'"({name})"', (REPOSITORY / "persia" / "env.py").read_text(encoding="utf-8")))
    for file in (REPOSITORY / "persia" / "launcher").glob("*.py"):
        read |= set(re.findall(r"(?:envvar|variable)=\"(\w+)\"", file.read_text(encoding="utf-8")))
    chapter = DOCUMENT.split("\n## Environment variables\n")[1]
    cells = re.findall(r"^\| (`[^|]+) \|", chapter, flags=re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert documented == read
