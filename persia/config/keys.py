"""What a key of a configuration section may hold, told once in the section's annotations.

A section is a frozen dataclass below `Section`. Its annotations carry the rules (`Annotated[int, Range(1)]`),
so that a file, a mapping and a constructor call are all judged by the same ones.
"""

from __future__ import annotations

import json
import reprlib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from persia.errors import ConfigError

__all__ = ["UINT32_MAX", "UINT64_MAX", "Alias", "Key", "Only", "Range", "Section", "keys_of", "show"]

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1

_NOUNS: Mapping[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Mapping: "a mapping",
}


@dataclass(frozen=True)
class Range:
    """Both ends may be used."""

    minimum: int
    maximum: int = UINT64_MAX


@dataclass(frozen=True)
class Alias:
    """A second published spelling of the key."""

    name: str


@dataclass(frozen=True)
class Only:
    """The key is published, but this version has a single answer to it; `reason` tells why."""

    value: object
    reason: str


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a section; `type` is the annotation without rules and without `| None`."""

    name: str
    type: Any
    optional: bool
    required: bool
    alias: str | None = None
    range: Range | None = None
    only: Only | None = None

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names that a file may use for it."""
        return (self.name,) if self.alias is None else (self.name, self.alias)

    def check(self, value: object, path: str) -> None:
        """Raises ConfigError, naming `path`, when the key may not hold `value`."""
        if self.only is not None and not _is_same(value, self.only.value):
            raise ConfigError(f"{path}={show(value)} must be {show(self.only.value)}: {self.only.reason}")
        if value is None and self.optional:
            return
        kind = get_origin(self.type) or self.type
        # bool is an int to Python, but a switch where a number belongs is a mistake.
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (kind in (int, float) and isinstance(value, bool)):
            raise ConfigError(f"{path}={show(value)} must be {_NOUNS.get(kind, kind.__name__)}")
        if self.range is not None and isinstance(value, int):
            self._check_range(value, self.range, path)

    def _check_range(self, value: int, limits: Range, path: str) -> None:
        if not limits.minimum <= value <= limits.maximum:
            raise ConfigError(f"{path}={value} must be an integer from {limits.minimum} to {limits.maximum}")


class Section:
    """Base of all sections: checks every key on construction. ConfigError names key, value and remedy."""

    def __post_init__(self) -> None:
        for key in keys_of(type(self)):
            key.check(getattr(self, key.name), key.name)


_keys: dict[type[Section], tuple[Key, ...]] = {}  # reading annotations is slow, and a job may have many slots


def keys_of(section: type[Section]) -> tuple[Key, ...]:
    """The keys of a section, in the order of its fields."""
    if section not in _keys:
        _keys[section] = _read_annotations(section)
    return _keys[section]


def _read_annotations(section: type[Section]) -> tuple[Key, ...]:
    hints = get_type_hints(section, include_extras=True)
    keys = []
    for field in fields(section):  # type: ignore[arg-type]  # every subclass is a dataclass
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        keys.append(_make_key(field.name, hints[field.name], required=not has_default))
    return tuple(keys)


def _make_key(name: str, hint: Any, *, required: bool) -> Key:
    rules: tuple[object, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *found = get_args(hint)
        rules = tuple(found)
    optional = isinstance(hint, types.UnionType)
    if optional:
        # The first is what files have; others are what a section makes that of on construction.
        hint = next(part for part in get_args(hint) if part is not types.NoneType)
    return Key(
        name=name,
        type=hint,
        optional=optional,
        required=required,
        alias=next((rule.name for rule in rules if isinstance(rule, Alias)), None),
        range=next((rule for rule in rules if isinstance(rule, Range)), None),
        only=next((rule for rule in rules if isinstance(rule, Only)), None),
    )


def _is_same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # 0 is not false


def show(value: object) -> str:
    """A value for a message: cut to a length that fits, on one line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(value)
