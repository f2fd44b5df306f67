"""From YAML files to checked configurations. A file that cannot be used fails at once, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from persia.config.global_config import GlobalConfig, InferConfig, MetricsConfig
from persia.config.keys import show
from persia.config.reader import read_section
from persia.config.slots_config import SlotsConfig
from persia.errors import ConfigError

__all__ = ["load_embedding_config", "load_global_config", "parse_embedding_config", "parse_global_config"]

_DOCUMENTED_METRICS = "PersiaMetricsConfig"
_DOCUMENTED_INFERENCE = ("servers", "initial_sparse_checkpoint")
_INFER = "Infer"
# What the documented inference job is, as it stands there: keys deeper than `job_type: Infer`.
_NESTED_IN_VALUE = "mapping values are not allowed here"


def load_global_config(path: str | os.PathLike[str]) -> GlobalConfig:
    """Reads a global configuration file. Raises ConfigError: file, key, value, remedy."""
    return parse_global_config(_read_yaml(Path(path)), source=str(path))  # type: ignore[arg-type]  # checks it


def load_embedding_config(path: str | os.PathLike[str]) -> SlotsConfig:
    """Reads an embedding configuration file. Raises ConfigError: file, key, value, remedy."""
    return parse_embedding_config(_read_yaml(Path(path)), source=str(path))  # type: ignore[arg-type]  # checks it


def parse_global_config(mapping: Mapping[str, Any], *, source: str = "global config") -> GlobalConfig:
    """The same from a mapping; `source` takes the place of the file in messages."""
    with _naming(source):
        documented = _with_documented_inference(_with_documented_metrics(_with_named_job_type(mapping)))
        return read_section(GlobalConfig, documented)


def parse_embedding_config(mapping: Mapping[str, Any], *, source: str = "embedding config") -> SlotsConfig:
    """The same from a mapping; `source` takes the place of the file in messages."""
    with _naming(source):
        return read_section(SlotsConfig, mapping)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _with_documented_metrics(value: object) -> object:
    """Moves the published documentation's top-level block of metrics to where its code read it."""
    if not isinstance(value, Mapping) or _DOCUMENTED_METRICS not in value:
        return value
    rest = {key: item for key, item in value.items() if key != _DOCUMENTED_METRICS}
    common = rest.get("common_config", {})
    if not isinstance(common, Mapping):
        return rest  # refused by its own name
    if "metrics_config" in common:
        raise ConfigError(f"{_DOCUMENTED_METRICS} is also given as common_config.metrics_config: keep one")
    metrics = read_section(MetricsConfig, value[_DOCUMENTED_METRICS], _DOCUMENTED_METRICS)
    return {**rest, "common_config": {**common, "metrics_config": metrics}}


def _with_named_job_type(value: object) -> object:
    """Takes `job_type: {Infer: {servers: ...}}`, the other correction of that documentation's indentation."""
    if not isinstance(value, Mapping) or not isinstance(common := value.get("common_config"), Mapping):
        return value
    job_type = common.get("job_type")
    if not isinstance(job_type, Mapping):
        return value
    settings = job_type.get(_INFER) or {}
    if set(job_type) != {_INFER} or not isinstance(settings, Mapping):
        raise ConfigError(
            f"common_config.job_type={show(job_type)} must be 'Train' or 'Infer'; what belongs to an "
            "inference job stands in common_config.infer_config"
        )
    if both := sorted(set(settings) & set(common)):
        raise ConfigError(f"common_config.{both[0]} is also given below job_type.{_INFER}: keep one")
    return {**value, "common_config": {**common, "job_type": _INFER, **settings}}


def _with_documented_inference(value: object) -> object:
    """The same with what the documentation of an inference job has beside `job_type`."""
    if not isinstance(value, Mapping) or not isinstance(common := value.get("common_config"), Mapping):
        return value
    found = {key: common[key] for key in _DOCUMENTED_INFERENCE if key in common}
    if not found:
        return value
    if "infer_config" in common:
        raise ConfigError(
            f"common_config.{next(iter(found))} belongs into common_config.infer_config, which is there too"
        )
    infer = read_section(InferConfig, found, "common_config")
    rest = {key: item for key, item in common.items() if key not in found}
    return {**value, "common_config": {**rest, "infer_config": infer}}


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which PyYAML would silently keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
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
