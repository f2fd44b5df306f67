"""Files: the published examples load, and what cannot be read says so at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from persia.config import SlotsConfig, load_embedding_config, load_global_config
from persia.errors import ConfigError

LOADERS = [load_global_config, load_embedding_config]

PUBLISHED_GLOBAL = """
common_config:
  metrics_config:
    enable_metrics: true
    push_interval_sec: 10
  job_type: Train
  checkpointing_config:
    num_workers: 8
embedding_parameter_server_config:
  capacity: 1000000
  num_hashmap_internal_shards: 1
  enable_incremental_update: false
  incremental_buffer_size: 5000000
  incremental_channel_capacity: 1000
embedding_worker_config:
  forward_buffer_size: 1000
"""

PUBLISHED_EMBEDDING = """
feature_index_prefix_bit: 8
slot_config:
  workclass:
    dim: 8
    embedding_summation: true
  education:
    dim: 8
    embedding_summation: true
  marital_status:
    dim: 8
    embedding_summation: true
  occupation:
    dim: 8
    embedding_summation: true
  relationship:
    dim: 8
    embedding_summation: true
  race:
    dim: 8
    embedding_summation: true
  gender:
    dim: 8
    embedding_summation: true
  native_country:
    dim: 8
    embedding_summation: true
feature_groups:
  group1:
    - workclass
    - education
    - race
  group2:
    - marital_status
    - occupation
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "config.yml"


def refusal_of(load, file) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    return message.removeprefix(f"{file}: ")


def test_the_published_global_config_loads(file):
    file.write_text(PUBLISHED_GLOBAL)
    config = load_global_config(file)
    assert config.common_config.metrics_config.push_interval_seconds == 10
    assert config.common_config.checkpointing_config.num_workers == 8
    assert config.embedding_parameter_server_config.capacity == 1_000_000
    assert config.embedding_parameter_server_config.num_hashmap_internal_shards == 1
    assert config.embedding_parameter_server_config.incremental_buffer_size == 5_000_000
    assert config.embedding_worker_config.buffered_data_expired_sec == 1000


PUBLISHED_INFERENCE = """
common_config:
  job_type: Infer
    servers:
      - emb_server_1:8000
      - emb_server_2:8000
    initial_sparse_checkpoint: /your/sparse/model/dir
"""


def test_the_published_inference_config_loads_once_its_columns_are_right(file):
    file.write_text(PUBLISHED_INFERENCE)
    with pytest.raises(ConfigError, match="line 4, .*not valid YAML.*a value has no keys below it"):
        load_global_config(file)
    file.write_text(PUBLISHED_INFERENCE.replace("    servers", "  servers").replace("    init", "  init"))
    infer = load_global_config(file).common_config.infer_config
    assert infer.servers == ["emb_server_1:8000", "emb_server_2:8000"]
    assert infer.embedding_checkpoint == "/your/sparse/model/dir"


def test_the_published_embedding_config_loads(file):
    file.write_text(PUBLISHED_EMBEDDING)
    config = load_embedding_config(str(file))
    assert list(config.slots_config) == [
        *("workclass", "education", "marital_status", "occupation"),
        *("relationship", "race", "gender", "native_country"),
    ]
    in_groups = {"workclass": 1, "education": 1, "race": 1, "marital_status": 2, "occupation": 2}
    assert config.group_numbers() == in_groups | {"relationship": 3, "gender": 4, "native_country": 5}
    assert len(config.native_slots()) == 8


@pytest.mark.parametrize("load", LOADERS)
class TestUnusableFiles:
    def test_a_missing_one(self, load, file):
        assert refusal_of(load, file).startswith("there is no such file")

    def test_a_directory(self, load, tmp_path):
        assert refusal_of(load, tmp_path).startswith("cannot be read: ")

    @pytest.mark.parametrize("content", ["", "# a comment\n", "---\n"])
    def test_an_empty_one(self, load, file, content):
        file.write_text(content)
        assert refusal_of(load, file).startswith("the top level is empty")

    @pytest.mark.parametrize("content", ["- slots_config\n", "slots_config\n", "3\n"])
    def test_no_mapping(self, load, file, content):
        file.write_text(content)
        assert refusal_of(load, file).startswith("the top level must be a mapping")

    @pytest.mark.parametrize(
        ("content", "line"),
        [
            ("a: 1\nb: [1, 2\nc: 3\n", 3),
            ("a: 1\n\tb: 2\n", 2),
            ("a: b: c\n", 1),
            ("a: 1\nb: 2\na: 3\n", 3),
            ("a: !!python/object:os.system {}\n", 1),
            ("a: *nowhere\n", 1),
        ],
    )
    def test_wrong_yaml(self, load, file, content, line):
        file.write_text(content)
        message = refusal_of(load, file)
        assert message.startswith(f"line {line}, column ")
        assert "not valid YAML" in message

    @pytest.mark.parametrize(
        "content", [b"\xff\xfe\x00", b"a: \x00\n", b"\x80\n", b"a: 2024-02-31\n", b"[" * 10_000]
    )
    def test_what_no_reader_of_yaml_can_take(self, load, file, content):
        file.write_bytes(content)
        assert "not valid YAML" in refusal_of(load, file)


def test_a_slot_that_is_there_twice_is_refused(file):
    file.write_text("slots_config:\n  user: {dim: 8}\n  item: {dim: 8}\n  user: {dim: 16}\n")
    assert (
        refusal_of(load_embedding_config, file)
        == "line 4, column 3: not valid YAML: the key user is there twice"
    )


def test_anchors_and_merges_may_be_used(file):
    file.write_text(
        "slots_config:\n"
        "  user: &slot {dim: 8, sqrt_scaling: true}\n"
        "  item: {<<: *slot, dim: 16}\n"
        "  shop: *slot\n"
    )
    slots = load_embedding_config(file).slots_config
    assert [(slot.dim, slot.sqrt_scaling) for slot in slots.values()] == [(8, True), (16, True), (8, True)]


def test_errors_of_keys_name_the_file(file):
    file.write_text("slots_config: {user: {dimm: 8}}\n")
    assert refusal_of(load_embedding_config, file).startswith("slots_config.user.dimm=8 is not a known key")
    file.write_text("slots_config: {yes: {dim: 8}}\n")
    assert "quote it" in refusal_of(load_embedding_config, file)


def test_a_mistyped_key_is_told_with_file_path_value_and_the_key_that_was_meant(file):
    file.write_text("slots_config:\n  user:\n    dim: 8\n    embedding_sumation: false\n")
    with pytest.raises(ConfigError) as caught:
        load_embedding_config(file)
    assert str(caught.value) == (
        f"{file}: slots_config.user.embedding_sumation=false is not a known key: "
        "did you mean 'embedding_summation'?"
    )


def test_text_beyond_ascii_does_not_depend_on_the_locale(file):
    file.write_bytes('slots_config: {"größe": {dim: 8}}\n'.encode())
    config = load_embedding_config(file)
    assert isinstance(config, SlotsConfig)
    assert list(config.slots_config) == ["größe"]


def test_importing_it_brings_neither_torch_nor_the_compiled_module():
    code = "import sys, persia.config; sys.exit(bool({'torch', 'numpy', 'persia._core'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
