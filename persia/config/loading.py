"""Reads YAML files into checked configurations. An unusable file fails at once, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from persia.config.global_config import GlobalConfig
from persia.config.published import without_published_forms
from persia.config.slots_config import SlotsConfig
from persia.errors import ConfigError
from persia.validation import Section, read_section

_AnySection = TypeVar("_AnySection", bound=Section)

# The published inference job, as its documentation has it: keys indented below `job_type: Infer`.
_NESTED_IN_VALUE = "mapping values are not allowed here"


def load_global_config(path: str | os.PathLike[str]) -> GlobalConfig:
    """Reads the global configuration file at `path`.

    Raises ConfigError, which names file, key, value and remedy.
    """
    return parse_global_config(_read_yaml(Path(path)), source=str(path))  # type: ignore[arg-type]  # checks it


def load_embedding_config(path: str | os.PathLike[str]) -> SlotsConfig:
    """Reads the embedding configuration file at `path`.

    Raises ConfigError, which names file, key, value and remedy.
    """
    return parse_embedding_config(_read_yaml(Path(path)), source=str(path))  # type: ignore[arg-type]  # checks it


def load_section(section: type[_AnySection], path: str | os.PathLike[str]) -> _AnySection:
    """Reads the file at `path`, which is one `section`. Raises ConfigError as the others do."""
    with naming(str(path)):
        return read_section(section, _read_yaml(Path(path)))


def parse_global_config(mapping: Mapping[str, Any], *, source: str = "global config") -> GlobalConfig:
    """Checks a mapping as if it were a file; messages name `source` instead of the file."""
    with naming(source):
        return read_section(GlobalConfig, without_published_forms(mapping))


def parse_embedding_config(mapping: Mapping[str, Any], *, source: str = "embedding config") -> SlotsConfig:
    """Checks a mapping as if it were a file; messages name `source` instead of the file."""
    with naming(source):
        return read_section(SlotsConfig, mapping)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Puts the name of a file before what is wrong with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys: PyYAML would silently keep the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked on nodes: the constructed mapping has lost the first of two values.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # no key of ours; refused by name later
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value} is there twice", problem_mark=key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


def _read_yaml(path: Path) -> object:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file (seen from {Path.cwd()}): correct the path"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return yaml.load(content, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        remedy = ": a key with a value has no keys below it" if error.problem == _NESTED_IN_VALUE else ""
        raise ConfigError(f"{path}: {where}not valid YAML: {error.problem}{remedy}") from error
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # not text, a 31st of February, 1000 brackets
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
