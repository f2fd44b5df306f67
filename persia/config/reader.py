"""Makes sections of plain mappings, as YAML files hold them, and says exactly where one does not fit.

Nothing is ignored: a key that nobody knows is a typing mistake, and ignoring it would train with another
value than the one written.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin

from persia.config.keys import Key, Section, keys_of, show
from persia.errors import ConfigError

__all__ = ["read_section"]

_AnySection = TypeVar("_AnySection", bound=Section)


def read_section(section: type[_AnySection], value: object, path: str = "") -> _AnySection:
    """A `section` made of the mapping `value`, which stands at the key `path` ("": the top level).

    Raises ConfigError naming the path of the key, its value, and what it should be.
    """
    keys = keys_of(section)
    values = _read_keys(keys, _checked_mapping(value, path), path)
    for key in keys:
        if key.required and key.name not in values:
            raise ConfigError(f"{_join(path, key.name)} is missing: it has no default, so add it")
    try:
        return section(**values)
    except ConfigError as error:  # keys that do not go together; the section does not know where it stands
        raise ConfigError(_join(path, str(error))) from None


def _read_keys(keys: Iterable[Key], mapping: Mapping[object, object], path: str) -> dict[str, Any]:
    by_spelling: dict[object, Key] = {spelling: key for key in keys for spelling in key.spellings}
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        key = by_spelling.get(name)
        if key is None:
            raise _unknown_key(name, value, path, by_spelling)
        if key.name in values:
            raise ConfigError(
                f"{_join(path, key.name)} is also given as {key.alias}, another spelling of it: keep one"
            )
        values[key.name] = _read_value(key, value, _join(path, str(name)))
    return values


def _read_value(key: Key, value: object, path: str) -> object:
    if value is None and key.optional:
        return None
    if isinstance(key.type, type) and issubclass(key.type, Section) and isinstance(value, key.type):
        return value  # read before, under another spelling
    if isinstance(key.type, type) and issubclass(key.type, Section):
        return read_section(key.type, value, path)
    if get_origin(key.type) is Mapping:
        return _read_named_items(get_args(key.type)[1], value, path)
    key.check(value, path)
    return value


def _read_named_items(item_type: Any, value: object, path: str) -> dict[str, object]:
    """A mapping of names: to sections, to lists of names, or to whatever the section itself checks."""
    items: dict[str, object] = {}
    for key, item in _checked_mapping(value, path).items():
        name = _checked_name(key, path)
        if isinstance(item_type, type) and issubclass(item_type, Section):
            items[name] = read_section(item_type, item, _join(path, name))
        elif item_type is object:
            items[name] = item
        else:
            items[name] = _read_names(item, _join(path, name))
    return items


def _read_names(value: object, path: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path}={show(value)} must be a list of names")
    return tuple(_checked_name(name, path) for name in value)


def _checked_name(name: object, path: str) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"{path} has the name {show(name)}, which YAML does not read as a string: quote it")
    return name


def _checked_mapping(value: object, path: str) -> Mapping[object, object]:
    where = path or "the top level"
    if value is None:
        raise ConfigError(f"{where} is empty: give it keys, or {{}} for the defaults")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping of keys to values, not {show(value)}")
    return value


def _unknown_key(name: object, value: object, path: str, known: Iterable[object]) -> ConfigError:
    names = [str(spelling) for spelling in known]
    nearest = difflib.get_close_matches(str(name).lower(), names, n=1)
    remedy = f"did you mean {nearest[0]!r}?" if nearest else f"the keys here are {', '.join(names)}"
    return ConfigError(f"{_join(path, str(name))}={show(value)} is not a known key: {remedy}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
