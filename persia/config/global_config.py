"""The global configuration: how the servers of a job behave, as the published `global_config.yml` has it.

Some published keys belong to features that this version lacks. Those that ask for such a feature are refused;
those that only tune one are taken and have no effect, so that published files load. docs/configuration.md
tells which is which.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from persia.errors import ConfigError
from persia.validation import UINT32_MAX, UINT64_MAX, Positive, Positive32, Section, complaint, show


class MetricsConfig(Section):
    """Metrics of every process; where they are shown is told by the environment."""

    enable_metrics: bool = True
    job_name: str = "persia_default_jobname"
    push_interval_seconds: Annotated[
        Positive32, Field(validation_alias=AliasChoices("push_interval_seconds", "push_interval_sec"))
    ] = 10


class CheckpointingConfig(Section):
    """Checkpoints of embeddings."""

    num_workers: Annotated[int, Field(ge=1, le=1024)] = 4  # files written, or read, at a time by a server
    # CPU share of a server's dump while its rows are trained, of the whole machine; 100: not throttled.
    dump_percent: Annotated[int, Field(ge=1, le=100)] = 3


def _check_address(address: str) -> str:
    # Not parsed further: names are resolved by the worker that connects, perhaps on another machine.
    if not re.fullmatch(r".+:\d{1,5}", address):
        raise complaint("must be a text like 'host:port'")
    return address


class InferConfig(Section):
    """Start settings of the servers of an inference job."""

    # Loaded by parameter servers.
    embedding_checkpoint: Annotated[
        str | None, Field(validation_alias=AliasChoices("embedding_checkpoint", "initial_sparse_checkpoint"))
    ] = None
    # Addresses of the parameter servers by index; embedding workers need them.
    servers: list[Annotated[str, AfterValidator(_check_address)]] | None = None
    # For parameter servers that follow the packets in incremental_dir (enable_incremental_update).
    incremental_poll_ms: Annotated[int, Field(ge=10, le=3_600_000)] = 250
    incremental_max_behind: Positive32 = 1000  # packets


def _refuse_evaluation(job_type: object) -> object:
    if job_type == "Eval":
        raise complaint(
            "must be 'Train' or 'Infer': evaluation is part of a training job, persia.ctx.eval_ctx"
        )
    return job_type


class CommonConfig(Section):
    """Settings of every role."""

    metrics_config: MetricsConfig = MetricsConfig()
    job_type: Annotated[Literal["Train", "Infer"], BeforeValidator(_refuse_evaluation)] = "Train"
    checkpointing_config: CheckpointingConfig = CheckpointingConfig()
    infer_config: InferConfig | None = None

    def check(self) -> None:
        if self.job_type == "Train" and self.infer_config is not None:
            raise ConfigError(
                "infer_config is given with job_type='Train' (servers and initial_sparse_checkpoint are part "
                "of it): set job_type: Infer, or leave it out"
            )


class EmbeddingWorkerConfig(Section):
    """Buffers of an embedding worker."""

    forward_buffer_size: Positive = 1000  # batches per data loader
    buffered_data_expired_sec: Positive32 = 1000


_LEAST_TIER_BYTES = 32 << 20  # a header and one extent
_DEFAULT_CACHE_ROWS = 1_000_000
# For a few rows with their index: a shard that can keep none would read every row from the tier.
_LEAST_SHARD_CACHE_BYTES = 1024
_INDEX_ROW_BYTES = 40  # at most, of each row, in memory or not: index, place in the tier file, order


class StorageConfig(Section):
    """Storage of the rows of one parameter server."""

    # dram: in memory alone; file, pmem: in a tier file, with a cache in memory.
    kind: Literal["dram", "file", "pmem"] = "dram"
    path: str | None = None  # the directory of the servers' tier files
    size_bytes: Annotated[int, Field(ge=_LEAST_TIER_BYTES, le=1 << 50)] = (
        1 << 40
    )  # that a tier file may grow to
    cache_rows: Positive | None = None  # in memory; see num_cache_rows
    # Instead of cache_rows: memory of the cached rows and of the index of all rows.
    cache_bytes: Annotated[int, Field(ge=1024, le=UINT64_MAX)] | None = None
    syncs: bool = True  # kind file: checkpoints wait for the device

    def check(self) -> None:
        # A path that nothing uses: its author believes that rows survive a restart, and they would not.
        if self.kind == "dram" and self.path is not None:
            raise ConfigError(
                f"path={show(self.path)} with kind='dram', which has no tier file: set kind: file or pmem, "
                "or leave it out"
            )
        if self.kind != "dram" and not self.path:
            raise ConfigError(
                f"path is missing: kind={show(self.kind)} needs the directory of the tier files"
            )
        if self.cache_rows is not None and self.cache_bytes is not None:
            raise ConfigError(
                f"cache_rows={self.cache_rows} and cache_bytes={self.cache_bytes} are both given: drop one"
            )

    @property
    def num_cache_rows(self) -> int:
        """0: the cache is as large as `cache_bytes` says."""
        if self.cache_bytes is not None:
            return 0
        return _DEFAULT_CACHE_ROWS if self.cache_rows is None else self.cache_rows

    @property
    def has_pool(self) -> bool:
        """Whether servers keep their rows in a tier file."""
        return self.kind != "dram"


_MAX_INCREMENTAL_BUFFER = 1 << 29  # twice as many changed rows are remembered at most, 2**30 natively


class EmbeddingParameterServerConfig(Section):
    """Storage of one parameter server."""

    capacity: Positive = 1_000_000_000  # rows; the least recently used go first
    # Published: 100. Here a shard is one mutex, and a request groups its rows by shard: few more shards than
    # threads keep threads apart, and many only cut requests into small pieces.
    num_hashmap_internal_shards: Annotated[int, Field(ge=1, le=65536)] = 16
    # Embeddings in memory; the optimizer's state is always float32.
    row_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    # Taken from published files without effect: a dump here reads a snapshot, and fills no such buffer.
    full_amount_manager_buffer_size: Positive = 1000
    enable_incremental_update: bool = False
    incremental_buffer_size: Positive = 1_000_000  # changed rows that are written at once
    incremental_dir: str = "/workspace/incremental_dir/"  # or a URL that fsspec knows
    # As above: packets are files of a storage, not messages of a channel.
    incremental_channel_capacity: Positive = 1000
    incremental_interval_ms: Annotated[int, Field(ge=10, le=86_400_000)] = 200  # at most between packets
    incremental_dense_interval_sec: Annotated[int, Field(ge=0, le=UINT32_MAX)] = 10  # 0: in every packet
    incremental_keep_packets: Positive32 = 9000
    storage: StorageConfig = StorageConfig()
    standbys: Annotated[int, Field(ge=0, le=1)] = 0  # processes with a second copy of the rows
    # Without an answer for so long, a primary or its standby is given up. Below 2 s a busy host looks dead.
    standby_deadline_sec: Annotated[int, Field(ge=2, le=3600)] = 10

    def check(self) -> None:
        if self.num_hashmap_internal_shards > self.capacity:
            raise ConfigError(
                f"num_hashmap_internal_shards={self.num_hashmap_internal_shards} must not be above "
                f"capacity={self.capacity}: every shard holds at least one row"
            )
        if self.storage.has_pool:
            self._check_cache()
            if self.row_dtype != "float32":
                raise ConfigError(
                    f"row_dtype={show(self.row_dtype)} with storage.kind={show(self.storage.kind)}: rows in "
                    "a storage tier are float32; leave row_dtype out, or set kind: dram"
                )
        if self.standbys and self.storage.has_pool:
            raise ConfigError(
                f"standbys={self.standbys} with storage.kind={show(self.storage.kind)}: standbys have their "
                "rows in memory; set kind: dram, or leave standbys out"
            )
        if self.standbys and self.enable_incremental_update:
            raise ConfigError(
                f"standbys={self.standbys} with enable_incremental_update=true: a standby does not know "
                "which packets its primary has written; leave one of them out"
            )
        # Only where they have an effect: published files have values for features that they do not use.
        if self.enable_incremental_update:
            self._check_incremental()

    def _check_cache(self) -> None:
        # The shards divide the cache evenly, so each must have room for at least one row.
        key, size, least = "cache_rows", self.storage.num_cache_rows, self.num_hashmap_internal_shards
        if self.storage.cache_bytes is not None:
            key, size, least = "cache_bytes", self.storage.cache_bytes, least * _LEAST_SHARD_CACHE_BYTES
        if size < least:
            each = "" if least == self.num_hashmap_internal_shards else " and need 1 KiB each"
            raise ConfigError(
                f"storage.{key}={size} must not be below {least}: the num_hashmap_internal_shards="
                f"{self.num_hashmap_internal_shards} divide it{each}"
            )
        if self.storage.cache_bytes is not None:
            self._check_room_for_index(self.storage.cache_bytes)

    def _check_room_for_index(self, cache_bytes: int) -> None:
        # The index grows with all rows, cached or not. Refused here, because a server that is full of index
        # would cache nothing.
        room = cache_bytes - cache_bytes // 8
        if self.capacity * _INDEX_ROW_BYTES > room:
            raise ConfigError(
                f"storage.cache_bytes={cache_bytes} has no room for the index of capacity={self.capacity} "
                f"rows, {_INDEX_ROW_BYTES} bytes each, and an eighth for rows: make it at least "
                f"{self.capacity * _INDEX_ROW_BYTES * 8 // 7 + 8}, or capacity at most "
                f"{room // _INDEX_ROW_BYTES}"
            )

    def _check_incremental(self) -> None:
        if self.incremental_buffer_size > _MAX_INCREMENTAL_BUFFER:
            raise ConfigError(
                f"incremental_buffer_size={self.incremental_buffer_size} must not be above "
                f"{_MAX_INCREMENTAL_BUFFER} when enable_incremental_update=true: make it smaller"
            )
        if not self.incremental_dir:
            raise ConfigError(
                "incremental_dir='' with enable_incremental_update=true: name a directory or a URL"
            )


class GlobalConfig(Section):
    """The whole of `global_config.yml`. Every key has a default."""

    common_config: CommonConfig = CommonConfig()
    embedding_worker_config: EmbeddingWorkerConfig = EmbeddingWorkerConfig()
    embedding_parameter_server_config: EmbeddingParameterServerConfig = EmbeddingParameterServerConfig()

    def check(self) -> None:
        # An inference server loads a checkpoint at its start, so a tier would only hold a second copy of it.
        storage = self.embedding_parameter_server_config.storage
        if self.common_config.job_type != "Train" and storage.has_pool:
            raise ConfigError(
                f"embedding_parameter_server_config.storage.kind={show(storage.kind)} with "
                f"job_type={show(self.common_config.job_type)}: servers of an inference job keep their rows "
                "in memory; set kind: dram"
            )
        standbys = self.embedding_parameter_server_config.standbys
        if self.common_config.job_type != "Train" and standbys:
            raise ConfigError(
                f"embedding_parameter_server_config.standbys={standbys} with "
                f"job_type={show(self.common_config.job_type)}: servers of an inference job load a "
                "checkpoint; leave standbys out"
            )
