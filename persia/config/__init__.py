"""Configuration files: typed, checked completely before anything starts, refused with key and remedy."""

from __future__ import annotations

from persia.config.global_config import (
    CheckpointingConfig,
    CommonConfig,
    EmbeddingParameterServerConfig,
    EmbeddingWorkerConfig,
    GlobalConfig,
    InferConfig,
    MetricsConfig,
    StorageConfig,
)
from persia.config.loading import (
    load_embedding_config,
    load_global_config,
    parse_embedding_config,
    parse_global_config,
)
from persia.config.slots_config import HashStackConfig, SlotConfig, SlotsConfig

__all__ = [
    "CheckpointingConfig",
    "CommonConfig",
    "EmbeddingParameterServerConfig",
    "EmbeddingWorkerConfig",
    "GlobalConfig",
    "HashStackConfig",
    "InferConfig",
    "MetricsConfig",
    "SlotConfig",
    "SlotsConfig",
    "StorageConfig",
    "load_embedding_config",
    "load_global_config",
    "parse_embedding_config",
    "parse_global_config",
]
