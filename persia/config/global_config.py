"""The global configuration: how the servers of a job behave, as the published `global_config.yml` has it.

Some published keys belong to features that this version lacks. Those that ask for such a feature are refused;
those that only tune one are taken and have no effect, so that published files load. docs/configuration.md
tells which is which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from persia.config.keys import UINT32_MAX, Alias, Only, Range, Section
from persia.errors import ConfigError

__all__ = [
    "CheckpointingConfig",
    "CommonConfig",
    "EmbeddingParameterServerConfig",
    "EmbeddingWorkerConfig",
    "GlobalConfig",
    "MetricsConfig",
]


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """Metrics for a push gateway; no effect yet."""

    enable_metrics: bool = True
    job_name: str = "persia_default_jobname"
    push_interval_seconds: Annotated[int, Range(1, UINT32_MAX), Alias("push_interval_sec")] = 10


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig(Section):
    """Checkpoints of embeddings; no effect yet."""

    num_workers: Annotated[int, Range(1, 1024)] = 4


@dataclass(frozen=True, kw_only=True)
class CommonConfig(Section):
    """What concerns every role."""

    metrics_config: MetricsConfig = field(default_factory=MetricsConfig)
    job_type: Annotated[str, Only("Train", "other job types are not available in this version")] = "Train"
    checkpointing_config: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    infer_config: Annotated[
        None, Only(None, "inference jobs are not available in this version; leave it out")
    ] = None


@dataclass(frozen=True, kw_only=True)
class EmbeddingWorkerConfig(Section):
    """Buffers of an embedding worker."""

    forward_buffer_size: Annotated[int, Range(1)] = 1000  # batches per data loader
    buffered_data_expired_sec: Annotated[int, Range(1, UINT32_MAX)] = 1000


@dataclass(frozen=True, kw_only=True)
class EmbeddingParameterServerConfig(Section):
    """Storage of one parameter server."""

    capacity: Annotated[int, Range(1)] = 1_000_000_000  # rows; the least recently used go first
    # Published: 100. Here a shard is one mutex, and a request groups its rows by shard: few more shards than
    # threads keep threads apart, and many only cut requests into small pieces.
    num_hashmap_internal_shards: Annotated[int, Range(1, 65536)] = 16
    full_amount_manager_buffer_size: Annotated[int, Range(1)] = 1000
    enable_incremental_update: Annotated[
        bool, Only(False, "incremental update is not available in this version")
    ] = False
    incremental_buffer_size: Annotated[int, Range(1)] = 1_000_000
    incremental_dir: str = "/workspace/incremental_dir/"
    incremental_channel_capacity: Annotated[int, Range(1)] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hashmap_internal_shards > self.capacity:
            raise ConfigError(
                f"num_hashmap_internal_shards={self.num_hashmap_internal_shards} must not be above "
                f"capacity={self.capacity}: every shard holds at least one row"
            )


@dataclass(frozen=True, kw_only=True)
class GlobalConfig(Section):
    """All of `global_config.yml`. Every key has a default."""

    common_config: CommonConfig = field(default_factory=CommonConfig)
    embedding_worker_config: EmbeddingWorkerConfig = field(default_factory=EmbeddingWorkerConfig)
    embedding_parameter_server_config: EmbeddingParameterServerConfig = field(
        default_factory=EmbeddingParameterServerConfig
    )
