"""Forms of the global config that only the published documentation has, rewritten to the keys of its code.

They are refused under the names that the file gave them. Second spellings of a single key are aliases of the
sections themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia.config.global_config import InferConfig, MetricsConfig
from persia.errors import ConfigError
from persia.validation import read_section, show

_METRICS = "PersiaMetricsConfig"  # a block at the top level: common_config.metrics_config
_INFERENCE = ("servers", "initial_sparse_checkpoint")  # beside job_type: keys of common_config.infer_config


def without_published_forms(config: object) -> object:
    """`config` with the keys of `GlobalConfig`. What has another form is left for the check to refuse."""
    if not isinstance(config, Mapping):
        return config
    # A rewritten form keeps its name in errors, so that the user finds it in the file.
    rest = {key: value for key, value in config.items() if key != _METRICS}
    common = rest.get("common_config", {})
    if not isinstance(common, Mapping):
        return rest
    common = _without_nested_inference(dict(common))
    if _METRICS in config:
        if "metrics_config" in common:
            raise ConfigError(f"{_METRICS} is also given as common_config.metrics_config: keep one")
        common["metrics_config"] = read_section(MetricsConfig, config[_METRICS], _METRICS)
    if found := {key: common.pop(key) for key in _INFERENCE if key in common}:
        if "infer_config" in common:
            raise ConfigError(
                f"common_config.{next(iter(found))} belongs in common_config.infer_config, which is given too"
            )
        common["infer_config"] = read_section(InferConfig, found, "common_config")
    return {**rest, "common_config": common} if common else rest


def _without_nested_inference(common: dict[Any, Any]) -> dict[Any, Any]:
    """Accepts `job_type: {Infer: {servers: ...}}`, one correction of the documentation's indentation."""
    job_type = common.get("job_type")
    if not isinstance(job_type, Mapping):
        return common
    settings = job_type.get("Infer") or {}
    # Anything else below job_type is a mistake of the file, not one of the documentation.
    if set(job_type) != {"Infer"} or not isinstance(settings, Mapping):
        raise ConfigError(
            f"common_config.job_type={show(job_type)} must be 'Train' or 'Infer'; the settings of an "
            "inference job belong in common_config.infer_config"
        )
    if both := sorted(set(settings) & set(common)):
        raise ConfigError(f"common_config.{both[0]} is also given below job_type.Infer: keep one")
    return {**common, "job_type": "Infer", **settings}
