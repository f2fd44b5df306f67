"""Every key of the global config: default, wrong types, limits, and what this version refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from persia.config import (
    CommonConfig,
    EmbeddingParameterServerConfig,
    GlobalConfig,
    InferConfig,
    StorageConfig,
    parse_global_config,
)
from persia.errors import ConfigError

METRICS = "common_config.metrics_config"
CHECKPOINTS = "common_config.checkpointing_config"
WORKER = "embedding_worker_config"
SERVER = "embedding_parameter_server_config"
STORAGE = f"{SERVER}.storage"

DEFAULTS = {
    f"{METRICS}.enable_metrics": True,
    f"{METRICS}.job_name": "persia_default_jobname",
    f"{METRICS}.push_interval_seconds": 10,
    "common_config.job_type": "Train",
    f"{CHECKPOINTS}.num_workers": 4,
    f"{CHECKPOINTS}.dump_percent": 3,
    "common_config.infer_config": None,
    f"{WORKER}.forward_buffer_size": 1000,
    f"{WORKER}.buffered_data_expired_sec": 1000,
    f"{SERVER}.capacity": 1_000_000_000,
    f"{SERVER}.num_hashmap_internal_shards": 16,
    f"{SERVER}.row_dtype": "float32",
    f"{SERVER}.standbys": 0,
    f"{SERVER}.standby_deadline_sec": 10,
    f"{SERVER}.full_amount_manager_buffer_size": 1000,
    f"{SERVER}.enable_incremental_update": False,
    f"{SERVER}.incremental_buffer_size": 1_000_000,
    f"{SERVER}.incremental_dir": "/workspace/incremental_dir/",
    f"{SERVER}.incremental_channel_capacity": 1000,
    f"{SERVER}.incremental_interval_ms": 200,
    f"{SERVER}.incremental_dense_interval_sec": 10,
    f"{SERVER}.incremental_keep_packets": 9000,
    f"{STORAGE}.kind": "dram",
    f"{STORAGE}.path": None,
    f"{STORAGE}.size_bytes": 1 << 40,
    f"{STORAGE}.cache_rows": None,
    f"{STORAGE}.cache_bytes": None,
    f"{STORAGE}.syncs": True,
}

# Least and largest values; None: the largest is that of 64 bits.
LIMITS = {
    f"{METRICS}.push_interval_seconds": (1, 2**32 - 1),
    f"{CHECKPOINTS}.num_workers": (1, 1024),
    f"{CHECKPOINTS}.dump_percent": (1, 100),
    f"{WORKER}.forward_buffer_size": (1, 2**64 - 1),
    f"{WORKER}.buffered_data_expired_sec": (1, 2**32 - 1),
    f"{SERVER}.capacity": (1, 2**64 - 1),
    f"{SERVER}.num_hashmap_internal_shards": (1, 65536),
    f"{SERVER}.standbys": (0, 1),
    f"{SERVER}.standby_deadline_sec": (2, 3600),
    f"{SERVER}.full_amount_manager_buffer_size": (1, 2**64 - 1),
    f"{SERVER}.incremental_buffer_size": (1, 2**64 - 1),
    f"{SERVER}.incremental_channel_capacity": (1, 2**64 - 1),
    f"{SERVER}.incremental_interval_ms": (10, 86_400_000),
    f"{SERVER}.incremental_dense_interval_sec": (0, 2**32 - 1),
    f"{SERVER}.incremental_keep_packets": (1, 2**32 - 1),
    f"{STORAGE}.size_bytes": (32 << 20, 1 << 50),
    f"{STORAGE}.cache_rows": (1, 2**64 - 1),
    f"{STORAGE}.cache_bytes": (1024, 2**64 - 1),
}

SWITCHES = [f"{METRICS}.enable_metrics", f"{SERVER}.enable_incremental_update", f"{STORAGE}.syncs"]
TEXTS = [f"{METRICS}.job_name", "common_config.job_type", f"{SERVER}.incremental_dir", f"{STORAGE}.kind"]
TEXTS.append(f"{SERVER}.row_dtype")


def with_key(path: str, value: object) -> dict[str, Any]:
    """A config with the one key at `path`."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value  # type: ignore[return-value]


def value_at(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def refusal_of(mapping: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_global_config(mapping, source="job.yml")  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith("job.yml: ")
    assert "\n" not in message
    return message.removeprefix("job.yml: ")


@pytest.mark.parametrize("path", DEFAULTS)
def test_every_key_has_its_default(path):
    assert value_at(GlobalConfig(), path) == DEFAULTS[path]
    assert type(value_at(GlobalConfig(), path)) is type(DEFAULTS[path])


def test_no_key_and_the_defaults_written_out_are_the_same():
    written: dict[str, Any] = {}
    for path, value in DEFAULTS.items():
        section = written
        *sections, name = path.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    assert parse_global_config(written) == parse_global_config({}) == GlobalConfig()


@pytest.mark.parametrize("path", LIMITS)
def test_numbers_are_taken_up_to_their_limits_and_not_beyond(path):
    least, largest = LIMITS[path]
    others = with_key(path, least)
    if path == f"{SERVER}.capacity":
        others[SERVER]["num_hashmap_internal_shards"] = 1
    assert value_at(parse_global_config(others), path) == least
    assert value_at(parse_global_config(with_key(path, largest)), path) == largest
    assert refusal_of(with_key(path, least - 1)) == f"{path}={least - 1} must be at least {least}"
    assert refusal_of(with_key(path, largest + 1)) == f"{path}={largest + 1} must be at most {largest}"


@pytest.mark.parametrize("path", LIMITS)
@pytest.mark.parametrize(
    ("value", "shown"), [(True, "true"), (1.5, "1.5"), ("8", "'8'"), (None, "null"), ([8], "[8]")]
)
def test_numbers_must_be_integers(path, value, shown):
    if value is None and DEFAULTS[path] is None:
        assert value_at(parse_global_config(with_key(path, value)), path) is None
        return
    assert refusal_of(with_key(path, value)) == f"{path}={shown} must be a valid integer"


@pytest.mark.parametrize("path", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, "false", None])
def test_switches_must_be_booleans(path, value):
    message = refusal_of(with_key(path, value))
    assert message.startswith(f"{path}={'null' if value is None else repr(value)} must be ")


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize("value", [1, True, None, ["a"]])
def test_texts_must_be_strings(path, value):
    assert f"{path}=" in refusal_of(with_key(path, value))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (
            "common_config.job_type",
            "Eval",
            "must be 'Train' or 'Infer': evaluation is part of a training job",
        ),
        ("common_config.job_type", "train", "must be 'Train' or 'Infer'"),
    ],
)
def test_what_this_version_lacks_is_refused(path, value, reason):
    message = refusal_of(with_key(path, value))
    assert message.startswith(f"{path}=")
    assert reason in message


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("incremental_buffer_size", 2**29 + 1, "must not be above 536870912 when enable_incremental"),
        ("incremental_dir", "", "name a directory or a URL"),
    ],
)
def test_incremental_updates_need_keys_that_fit(key, value, reason):
    settings = {key: value}
    assert value_at(parse_global_config(with_key(SERVER, settings)), f"{SERVER}.{key}") == value
    message = refusal_of(with_key(SERVER, {**settings, "enable_incremental_update": True}))
    assert message.startswith(f"{SERVER}.{key}=")
    assert reason in message


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ({"kind": "nvme"}, f"{STORAGE}.kind='nvme' must be 'dram', 'file' or 'pmem'"),
        ({"path": "/mnt"}, f"{STORAGE}.path='/mnt' with kind='dram', which has no tier file"),
        ({"kind": "file"}, f"{STORAGE}.path is missing: kind='file' needs the directory"),
        (
            {"kind": "pmem", "path": "/mnt", "cache_rows": 8},
            f"{SERVER}.storage.cache_rows=8 must not be below 16: the num_hashmap_internal_shards=16",
        ),
        (
            {"kind": "pmem", "path": "/mnt", "cache_rows": 100, "cache_bytes": 1 << 20},
            f"{STORAGE}.cache_rows=100 and cache_bytes=1048576 are both given",
        ),
    ],
)
def test_storage_needs_keys_that_fit(storage, message):
    assert refusal_of(with_key(STORAGE, storage)).startswith(message)


def test_every_shard_needs_a_part_of_the_cache():
    storage = {"kind": "file", "path": "/mnt", "cache_bytes": 1 << 20}
    message = refusal_of(with_key(SERVER, {"num_hashmap_internal_shards": 2000, "storage": storage}))
    assert message.startswith(f"{SERVER}.storage.cache_bytes=1048576 must not be below 2048000")
    settings = {"num_hashmap_internal_shards": 1024, "capacity": 1024, "storage": storage}
    parse_global_config(with_key(SERVER, settings))


def test_a_cache_of_bytes_has_room_for_the_index():
    def settings(capacity, cache_bytes):
        storage = {"kind": "file", "path": "/mnt", "cache_bytes": cache_bytes}
        return with_key(SERVER, {"capacity": capacity, "storage": storage})

    message = refusal_of(settings(1_000_000, 32_000_000))
    assert message.startswith(
        f"{SERVER}.storage.cache_bytes=32000000 has no room for the index of capacity=1000000 rows, 40 bytes"
    )
    assert "make it at least 45714293, or capacity at most 700000" in message
    parse_global_config(settings(1_000_000, 45_714_293))
    parse_global_config(settings(700_000, 32_000_000))


def test_a_cache_has_rows_or_bytes():
    assert StorageConfig().num_cache_rows == 1_000_000
    assert StorageConfig(cache_rows=7).num_cache_rows == 7
    assert StorageConfig(cache_bytes=1 << 20).num_cache_rows == 0


def test_standbys_have_their_rows_in_memory_and_train():
    storage = {"kind": "file", "path": "/mnt/tier"}
    message = refusal_of({SERVER: {"standbys": 1, "storage": storage}})
    assert "standbys=1 with storage.kind='file'" in message
    message = refusal_of({SERVER: {"standbys": 1, "enable_incremental_update": True}})
    assert "standbys=1 with enable_incremental_update=true" in message
    message = refusal_of({"common_config": {"job_type": "Infer"}, SERVER: {"standbys": 1}})
    assert "standbys=1 with job_type='Infer'" in message


def test_row_dtype_is_one_of_three_and_float32_in_pools():
    path = f"{SERVER}.row_dtype"
    for dtype in ("float32", "float16", "bfloat16"):
        assert value_at(parse_global_config(with_key(path, dtype)), path) == dtype
    assert refusal_of(with_key(path, "fp16")) == f"{path}='fp16' must be 'float32', 'float16' or 'bfloat16'"
    storage = {"kind": "file", "path": "/mnt"}
    message = refusal_of({SERVER: {"row_dtype": "bfloat16", "storage": storage}})
    assert message.startswith(f"{path}='bfloat16' with storage.kind='file'")
    assert parse_global_config({SERVER: {"row_dtype": "float32", "storage": storage}})


def test_inference_jobs_keep_rows_in_memory():
    storage = with_key(STORAGE, {"kind": "file", "path": "/mnt"})
    assert parse_global_config(storage).embedding_parameter_server_config.storage.has_pool
    message = refusal_of({**storage, "common_config": {"job_type": "Infer"}})
    assert message.startswith(f"{STORAGE}.kind='file' with job_type='Infer'")


def test_inference_jobs_have_their_own_settings():
    infer = {"embedding_checkpoint": "model/", "servers": ["a:1", "b:2"]}
    config = parse_global_config({"common_config": {"job_type": "Infer", "infer_config": infer}})
    assert config.common_config.infer_config == InferConfig(**infer)
    assert "infer_config is given with job_type='Train'" in refusal_of(
        with_key("common_config.infer_config", infer)
    )
    for servers in (["a"], [1], "a:1"):
        message = refusal_of({"common_config": {"job_type": "Infer", "infer_config": {"servers": servers}}})
        assert message.startswith("common_config.infer_config.servers")


def infer_job(**keys: Any) -> dict[str, Any]:
    return {"common_config": {"job_type": "Infer", **keys}}


def test_documented_keys_of_inference_are_taken():
    documented = {"servers": ["a:1", "b:2"], "initial_sparse_checkpoint": "model/"}
    expected = InferConfig(servers=["a:1", "b:2"], embedding_checkpoint="model/")
    below = {"common_config": {"job_type": {"Infer": documented}}}
    for job in (infer_job(**documented), infer_job(infer_config=documented), below):
        assert parse_global_config(job).common_config.infer_config == expected


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (infer_job(servers=["a"]), "common_config.servers.0='a' must be a text like 'host:port'"),
        (
            infer_job(initial_sparse_checkpoint=3),
            "common_config.initial_sparse_checkpoint=3 must be a valid string",
        ),
        (infer_job(server=["a:1"]), "common_config.server=['a:1'] is not a known key"),
        (
            {"common_config": {"job_type": {"Infer": {"servers": ["a:1"]}, "Train": None}}},
            "must be 'Train' or 'Infer'; the settings of an inference",
        ),
        (
            {"common_config": {"job_type": {"Infer": ["a:1"]}}},
            "must be 'Train' or 'Infer'; the settings of an inference",
        ),
        (
            {"common_config": {"job_type": {"Infer": {"servers": ["a:1"]}}, "servers": ["b:1"]}},
            "common_config.servers is also given below job_type.Infer: keep one",
        ),
        (
            infer_job(servers=["a:1"], infer_config={}),
            "common_config.servers belongs in common_config.infer_",
        ),
        ({"common_config": {"servers": ["a:1"]}}, "(servers and initial_sparse_checkpoint are part of it)"),
        (
            infer_job(infer_config={"initial_sparse_checkpoint": "x", "embedding_checkpoint": "x"}),
            "embedding_checkpoint is also given as initial_sparse_checkpoint",
        ),
    ],
)
def test_documented_keys_of_inference_are_checked_under_their_names(mapping, message):
    assert message in refusal_of(mapping)


def test_metrics_may_be_asked_for_and_tuned():
    config = parse_global_config(with_key(METRICS, {"enable_metrics": True, "job_name": "clicks"}))
    assert config.common_config.metrics_config.job_name == "clicks"


def test_push_interval_has_two_spellings_of_which_one_may_be_used():
    config = parse_global_config(with_key(f"{METRICS}.push_interval_sec", 7))
    assert config.common_config.metrics_config.push_interval_seconds == 7
    assert refusal_of(with_key(f"{METRICS}.push_interval_sec", 0)).startswith(
        f"{METRICS}.push_interval_sec=0 must"
    )
    both = with_key(METRICS, {"push_interval_sec": 7, "push_interval_seconds": 7})
    assert "push_interval_sec, another spelling" in refusal_of(both)


def test_the_documented_block_of_metrics_is_taken():
    metrics = {"enable_metrics": False, "job_name": "mine"}
    config = parse_global_config({"PersiaMetricsConfig": metrics, "common_config": {"job_type": "Train"}})
    assert config == parse_global_config(with_key(METRICS, metrics))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"PersiaMetricsConfig": {"jobname": "x"}},
            "PersiaMetricsConfig.jobname='x' is not a known key: did you mean 'job_name'?",
        ),
        ({"PersiaMetricsConfig": None}, "PersiaMetricsConfig is empty"),
        ({"PersiaMetricsConfig": {}, **with_key(METRICS, {})}, f"is also given as {METRICS}: keep one"),
        ({"PersiaMetricsConfig": {}, "common_config": 3}, "common_config must be a mapping"),
    ],
)
def test_the_documented_block_of_metrics_is_checked_under_its_name(mapping, message):
    assert message in refusal_of(mapping)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"common": {}}, "common={} is not a known key: did you mean 'common_config'?"),
        (
            {"common_config": {"job_typ": "Train"}},
            "common_config.job_typ='Train' is not a known key: did you mean 'job_type'?",
        ),
        (
            with_key(f"{SERVER}.Capacity", 1),
            f"{SERVER}.Capacity=1 is not a known key: did you mean 'capacity'?",
        ),
        (with_key(f"{WORKER}.x", 1), "the keys here are forward_buffer_size, buffered_data_expired_sec"),
        ({True: {}}, "True={} is not a known key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(mapping, message):
    assert message in refusal_of(mapping)


@pytest.mark.parametrize("path", ["common_config", METRICS, CHECKPOINTS, WORKER, SERVER])
def test_sections_must_be_mappings(path):
    assert refusal_of(with_key(path, None)) == f"{path} is empty: give it keys, or {{}} for the defaults"
    assert refusal_of(with_key(path, [1])) == f"{path} must be a mapping of keys to values, not [1]"
    assert parse_global_config(with_key(path, {})) == GlobalConfig()


def test_the_top_level_must_be_a_mapping():
    assert refusal_of(["common_config"]).startswith("the top level must be a mapping")
    assert refusal_of(None).startswith("the top level is empty")


def test_more_internal_shards_than_capacity_are_refused_with_both():
    message = refusal_of({SERVER: {"capacity": 4, "num_hashmap_internal_shards": 5}})
    assert message.startswith(f"{SERVER}.num_hashmap_internal_shards=5 must not be above capacity=4")


def test_a_long_value_is_cut():
    assert len(refusal_of(with_key(f"{SERVER}.capacity", "9" * 10_000))) < 200


def test_sections_made_in_python_obey_the_same_rules():
    with pytest.raises(ConfigError, match=re.escape("capacity=0 must be at least 1")):
        EmbeddingParameterServerConfig(capacity=0)
    with pytest.raises(ConfigError, match="embedding_worker_config is empty"):
        GlobalConfig(embedding_worker_config=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="job_type='Eval'"):
        CommonConfig(job_type="Eval")


def test_sections_are_frozen_and_take_names_only():
    with pytest.raises(AttributeError):
        GlobalConfig().common_config = CommonConfig()  # type: ignore[misc]
    with pytest.raises(TypeError):
        GlobalConfig(CommonConfig())  # type: ignore[misc]
