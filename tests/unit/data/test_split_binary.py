"""Feature specs and split-binary data: NVIDIA's files read unchanged, errors with file, field and offset."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from persia.config import parse_embedding_config
from persia.data import FeatureSpec, SplitBinaryBatches, SplitBinaryWriter
from persia.errors import ConfigError, CorruptionError, InvalidArgumentError, NotFoundError

ROWS = 21
SIZES = [100, 200, 40_000, 70_000]  # int8, int16, int32, int32


def columns(rows: int = ROWS, first: int = 0) -> tuple[Any, list[Any], Any]:
    """Values that tell their row and column."""
    number = np.arange(first, first + rows)
    numerical = np.stack([number, number + 0.5, -number], axis=1)
    return numerical, [number, number + 40, number + 32_000, number + 65_000], number % 3 == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As NVIDIA's tools write it, not by our writer: raw numbers in files, the YAML with anchors."""
    numerical, ids, labels = columns()
    for mapping in ("train", "test"):
        (tmp_path / mapping).mkdir()
        numerical.astype("<f2").tofile(tmp_path / mapping / "numerical.bin")
        labels.astype(bool).tofile(tmp_path / mapping / "label.bin")
        for index, (values, kind) in enumerate(zip(ids, ("i1", "<i2", "<i4", "<i4"), strict=True)):
            values.astype(kind).tofile(tmp_path / mapping / f"cat_{index}.bin")
    names = ["num_0", "num_1", "num_2"]
    kinds = ("int8", "int16", "int32", "int32")
    features = {
        f"cat_{index}.bin": {"cardinality": size, "dtype": kind}
        for index, (size, kind) in enumerate(zip(SIZES, kinds, strict=True))
    }
    content = {
        "channel_spec": {"categorical": list(features), "label": ["label"], "numerical": names},
        "feature_spec": {
            **features,
            "label": {"dtype": "bool"},
            **{name: {"dtype": "float16"} for name in names},
        },
        "metadata": {},
        "source_spec": {
            mapping: [
                {"features": names, "files": [f"{mapping}/numerical.bin"], "type": "split_binary"},
                {"features": ["label"], "files": [f"{mapping}/label.bin"], "type": "split_binary"},
                *(
                    {"features": [name], "files": [f"{mapping}/{name}"], "type": "split_binary"}
                    for name in features
                ),
            ]
            for mapping in ("test", "train")
        },
    }
    (tmp_path / "feature_spec.yaml").write_text(yaml.dump(content))
    assert "&id001" in (tmp_path / "feature_spec.yaml").read_text()
    return tmp_path


def edit(folder: Path, change: Any) -> None:
    file = folder / "feature_spec.yaml"
    content = yaml.safe_load(file.read_text())
    change(content)
    file.write_text(yaml.dump(content))


def row_numbers(batches: SplitBinaryBatches) -> list[list[int]]:
    """The rows of each batch, after a check that all columns are of the same rows."""
    found = []
    for number in batches.read():
        batch = batches.make(number, requires_grad=False)
        dense, (label,) = batch.non_id_type_features, batch.labels
        rows = batch.id_type_features[0].ids.astype(np.int64)
        numerical, ids = (
            np.stack([rows, rows + 0.5, -rows], axis=1),
            [rows, rows + 40, rows + 32_000, rows + 65_000],
        )
        assert dense[0].data.dtype == np.float32
        assert np.array_equal(dense[0].data, numerical.astype(np.float32))
        assert np.array_equal(label.data, (rows % 3 == 0).astype(np.float32).reshape(-1, 1))
        for feature, values in zip(batch.id_type_features, ids, strict=True):
            assert np.array_equal(feature.ids, values.astype(np.uint64))
        found.append(rows.tolist())
    return found


def test_reads_files_as_nvidia_writes_them(folder: Path) -> None:
    batches = SplitBinaryBatches(folder, "test", batch_size=8)
    batches.check_values()
    assert (len(batches), batches.num_rows) == (3, ROWS)
    assert row_numbers(batches) == [list(range(8)), list(range(8, 16)), list(range(16, ROWS))]
    names = [feature.name for feature in batches.make(0, requires_grad=True).id_type_features]
    assert names == ["cat_0.bin", "cat_1.bin", "cat_2.bin", "cat_3.bin"]


def test_written_files_are_equal_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    spec = FeatureSpec.make(tmp_path / "own", SIZES, num_numerical=3)
    with SplitBinaryWriter(spec, "train") as writer:
        for first in range(0, ROWS, 6):
            writer.write(*columns(min(6, ROWS - first), first))
    for file in sorted((folder / "train").iterdir()):
        assert (tmp_path / "own" / "train" / file.name).read_bytes() == file.read_bytes(), file.name
    assert FeatureSpec.load(tmp_path / "own").features == FeatureSpec.load(folder).features
    assert FeatureSpec.load(tmp_path / "own").sources["train"] == FeatureSpec.load(folder).sources["train"]


def test_a_writer_that_fails_leaves_no_files(tmp_path: Path) -> None:
    spec = FeatureSpec.make(tmp_path, SIZES, num_numerical=3)
    numerical, ids, labels = columns()
    refused = pytest.raises(
        InvalidArgumentError, match=r"'cat_0.bin' is 200 in row 0 of this call, must be 0 to 99"
    )
    with refused, SplitBinaryWriter(spec, "train") as writer:
        writer.write(numerical, [ids[0] + 200, *ids[1:]], labels)
    assert not list((tmp_path / "train").iterdir())


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("label", 3, 5, r"'label' is 5\.0 in row 3 of this call, must be 0 or 1"),
        ("label", 2, np.nan, r"'label' is nan in row 2 of this call, must be 0 or 1"),
        ("label", 2, 0.5, r"'label' is 0\.5 in row 2"),
        ("num_1", 4, 1e6, r"'num_1' is 1000000\.0 in row 4 of this call, must be finite in float16"),
        ("num_2", 4, np.nan, r"'num_2' is nan in row 4"),
        ("cat_1.bin", 1, 2.7, r"'cat_1.bin' has dtype float64 \(first value 40\.0\): pass integers"),
        ("cat_1.bin", 1, 200, r"'cat_1.bin' is 200 in row 1 of this call, must be 0 to 199, by its"),
        ("cat_1.bin", 1, -1, r"'cat_1.bin' is -1 in row 1"),
    ],
)
def test_a_refused_write_changes_no_file(
    tmp_path: Path, name: str, row: int, value: float, message: str
) -> None:
    """The writer goes on after the error, so that columns of different lengths would be committed."""
    spec = FeatureSpec.make(tmp_path, SIZES, num_numerical=3)
    numerical, ids, labels = columns()
    wrong = [numerical.copy(), [array.copy() for array in ids], labels.astype(float)]
    if name == "label":
        wrong[2][row] = value
    elif name.startswith("num"):
        wrong[0][row, int(name[-1])] = value
    else:
        wrong[1][1] = wrong[1][1].astype(type(value))
        wrong[1][1][row] = value
    with SplitBinaryWriter(spec, "train") as writer:
        with pytest.raises(InvalidArgumentError, match=message):
            writer.write(*wrong)
        writer.write(numerical, ids, labels)
    batches = SplitBinaryBatches(tmp_path, batch_size=ROWS)
    assert row_numbers(batches) == [list(range(ROWS))]


def test_another_number_of_arrays_is_refused(tmp_path: Path) -> None:
    spec = FeatureSpec.make(tmp_path, SIZES, num_numerical=3)
    numerical, ids, labels = columns()
    with SplitBinaryWriter(spec, "train") as writer:
        for wrong in (ids[:3], [*ids, ids[0]]):
            with pytest.raises(InvalidArgumentError, match=rf"categorical has {len(wrong)} arrays, .* has 4"):
                writer.write(numerical, wrong, labels)
        with pytest.raises(InvalidArgumentError, match=r"numerical is None, the spec has 3 numerical"):
            writer.write(None, ids, labels)
        with pytest.raises(InvalidArgumentError, match=r"'num_0' has shape \(21, 2\), must have \(21, 3\)"):
            writer.write(numerical[:, :2], ids, labels)
    without = FeatureSpec.make(tmp_path / "without", SIZES, num_numerical=0)
    refused = pytest.raises(InvalidArgumentError, match=r"array of shape \(21, 3\), the spec has 0 numerical")
    with SplitBinaryWriter(without, "train") as writer, refused:
        writer.write(numerical, ids, labels)


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_shuffled_by_block_in_another_order_each_epoch(folder: Path, block_size: int) -> None:
    batches = SplitBinaryBatches(folder, batch_size=8, shuffle_seed=5, block_size=block_size)
    orders = [row_numbers(batches.of_epoch(epoch)) for epoch in range(3)]
    again = SplitBinaryBatches(folder, batch_size=8, shuffle_seed=5, block_size=block_size)
    assert row_numbers(again.of_epoch(1)) == orders[1]
    for order in orders:
        rows = [row for batch in order for row in batch]
        assert sorted(rows) == list(range(ROWS))
        for begin in range(0, ROWS - block_size + 1, block_size):
            block = rows[begin : begin + block_size]
            assert block == list(range(block[0], block[0] + block_size)), "a block stays together"
        assert [len(batch) for batch in order] == [8, 8, 5]
    if block_size == 1:
        assert orders[0] != orders[1] != orders[2]
        assert orders[0] != row_numbers(
            SplitBinaryBatches(folder, batch_size=8, shuffle_seed=6, block_size=1)
        )


def test_several_ids_a_sample(tmp_path: Path) -> None:
    spec = FeatureSpec.make(tmp_path, [50, 300], num_numerical=0, hotness=[3, 1])
    ids = np.arange(24).reshape(8, 3)
    with SplitBinaryWriter(spec, "train") as writer:
        writer.write(None, [ids, np.arange(8)], np.zeros(8))
    batches = SplitBinaryBatches(tmp_path, batch_size=5)
    batch = batches.make(1, requires_grad=False)
    feature = batch.id_type_features[0]
    assert (feature.ids.tolist(), feature.offsets.tolist()) == (list(range(15, 24)), [0, 3, 6, 9])
    assert not batch.non_id_type_features
    assert FeatureSpec.load(tmp_path).features["cat_0.bin"].hotness == 3


def test_hashed_ids(tmp_path: Path) -> None:
    spec = FeatureSpec.make(tmp_path, [None], num_numerical=0)
    ids = np.array([2**63 - 1, -1, 0], np.int64)
    with SplitBinaryWriter(spec, "train") as writer:
        writer.write(None, [ids], np.ones(3))
    batch = SplitBinaryBatches(tmp_path).make(0, requires_grad=False)
    assert batch.id_type_features[0].ids.tolist() == [2**63 - 1, 2**64 - 1, 0]


def test_slots_of_a_spec(folder: Path) -> None:
    config = parse_embedding_config(FeatureSpec.load(folder).slots(16))
    assert {name: slot.dim for name, slot in config.slots_config.items()} == {
        f"cat_{index}.bin": 16 for index in range(4)
    }
    many = FeatureSpec.make(folder, [10] * 300, mappings=[])
    assert len(parse_embedding_config(many.slots(4)).slots_config) == 300


def truncate(folder: Path, name: str, size: int) -> None:
    with open(folder / "train" / name, "r+b") as file:
        file.truncate(size)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda folder: truncate(folder, "cat_2.bin", 4 * 20 + 3),
            CorruptionError,
            r"cat_2.bin: field 'cat_2.bin' ends in the middle of a row at offset 80 of 83",
        ),
        (
            lambda folder: truncate(folder, "numerical.bin", 6 * 20),
            CorruptionError,
            r"numerical.bin: field 'num_0' ends at offset 120, after 20 rows of float16; .* have 21",
        ),
        (
            lambda folder: (folder / "train" / "cat_1.bin").unlink(),
            NotFoundError,
            r"no file .*cat_1.bin of 'cat_1.bin', which source_spec.train names",
        ),
        (
            lambda folder: edit(folder, lambda spec: spec["feature_spec"]["cat_2.bin"].update(dtype="int64")),
            CorruptionError,
            r"field 'cat_2.bin' ends in the middle of a row at offset 80 of 84: a row has 8 bytes",
        ),
        (
            lambda folder: edit(folder, lambda spec: spec["feature_spec"]["cat_1.bin"].update(dtype="int32")),
            CorruptionError,
            r"field 'cat_1.bin' ends in the middle of a row at offset 40 of 42",
        ),
        (
            lambda folder: truncate(folder, "label.bin", 0),
            InvalidArgumentError,
            r"label.bin of 'label' has no rows",
        ),
    ],
)
def test_wrong_files_are_found_when_opened(folder: Path, spoil: Any, error: Any, message: str) -> None:
    spoil(folder)
    with pytest.raises(error, match=message):
        SplitBinaryBatches(folder, batch_size=8)


@pytest.mark.parametrize(
    ("name", "kind", "value", "message"),
    [
        (
            "cat_1.bin",
            "<i2",
            200,
            r"cat_1.bin: field 'cat_1.bin' is 200 at offset 34 \(row 17\), must be 0 to 199",
        ),
        ("cat_1.bin", "<i2", -1, r"field 'cat_1.bin' is -1 at offset 34 \(row 17\)"),
        ("label.bin", "u1", 2, r"label.bin: field 'label' is 2 at offset 17 \(row 17\), must be 0 or 1"),
        (
            "numerical.bin",
            "<f2",
            np.nan,
            r"field 'num_2' is nan at offset 34 \(row 5\), must be a finite number",
        ),
    ],
)
@pytest.mark.parametrize("seed", [None, 3])
def test_wrong_values_name_their_place(
    folder: Path, name: str, kind: str, value: float, message: str, seed: int | None
) -> None:
    values = np.fromfile(folder / "train" / name, kind)
    values[17] = value
    values.tofile(folder / "train" / name)
    batches = SplitBinaryBatches(folder, batch_size=8, shuffle_seed=seed, block_size=2)
    with pytest.raises(CorruptionError, match=message):
        batches.check_values()
    with pytest.raises(CorruptionError, match=message):
        row_numbers(batches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda spec: spec["feature_spec"]["cat_0.bin"].update(cardinality=129),
            r"feature_spec.yaml: feature 'cat_0.bin': cardinality 129 does not fit int8, whose largest",
        ),
        (
            lambda spec: spec["feature_spec"]["cat_0.bin"].update(cardinality="auto"),
            r"feature_spec.yaml: feature_spec.cat_0.bin.cardinality='auto' must be a valid integer",
        ),
        (
            lambda spec: spec["feature_spec"]["cat_0.bin"].pop("cardinality"),
            r"'cat_0.bin' has no cardinality",
        ),
        (lambda spec: spec["feature_spec"]["cat_0.bin"].update(dtype="int33"), r"numpy has no dtype 'int33'"),
        (
            lambda spec: spec["feature_spec"]["num_1"].update(dtype="int8"),
            r"'num_1': dtype int8 is none of float16",
        ),
        (
            lambda spec: spec["feature_spec"].pop("num_1"),
            r"feature_spec lacks 'num_1', which channel_spec names",
        ),
        (
            lambda spec: spec["source_spec"]["train"].pop(),
            r"source_spec.train has feature 'cat_3.bin' 0 times",
        ),
        (
            lambda spec: spec["source_spec"]["test"][0].update(type="csv"),
            r"source_spec.test.0.type='csv' must be 'split_binary' or 'parquet'",
        ),
        (
            lambda spec: spec["source_spec"]["train"][0]["features"].reverse(),
            r"source_spec.test\[0\] has the features num_2, num_1, num_0: a chunk has one",
        ),
        (
            lambda spec: spec.update(feature_specs={}),
            r"feature_specs=\{\} is not a known key: did you mean 'feature_spec'",
        ),
        (
            lambda spec: spec["channel_spec"].update(label=["label", "num_0"]),
            r"channel_spec.label has 2 features",
        ),
    ],
)
def test_wrong_specs(folder: Path, change: Any, message: str) -> None:
    def without_anchors(spec: Any) -> None:
        spec["channel_spec"]["numerical"] = list(spec["channel_spec"]["numerical"])
        change(spec)

    edit(folder, without_anchors)
    with pytest.raises(ConfigError, match=message):
        FeatureSpec.load(folder)


def test_other_wrong_arguments(folder: Path) -> None:
    with pytest.raises(NotFoundError, match="no feature spec .*absent"):
        FeatureSpec.load(folder / "absent")
    with pytest.raises(InvalidArgumentError, match="no mapping 'valid': it has test, train"):
        SplitBinaryBatches(folder, "valid")
    with pytest.raises(InvalidArgumentError, match="block_size=3 does not divide batch_size=8"):
        SplitBinaryBatches(folder, batch_size=8, block_size=3)


def test_a_spec_of_synthetic_data_has_no_files(folder: Path) -> None:
    edit(folder, lambda spec: spec.update(source_spec=None))
    spec = FeatureSpec.load(folder)
    assert len(spec.categorical) == 4
    with pytest.raises(InvalidArgumentError, match="no mapping 'train': it has none"):
        SplitBinaryBatches(spec)


def test_every_row_once_over_an_epoch_of_shuffled_rows(folder: Path) -> None:
    batches = SplitBinaryBatches(folder, batch_size=4, shuffle_seed=1, block_size=2)
    assert Counter(row for rows in row_numbers(batches) for row in rows) == Counter(range(ROWS))


def test_chosen_batches_are_ascending(folder: Path) -> None:
    batches = SplitBinaryBatches(folder, batch_size=8)
    assert list(batches.read_some([0, 2])) == [0, 2]
    assert [batches.rows_decoded(count) for count in (1, 3)] == [8, ROWS]
    for numbers, message in (([2, 1], "1, which follows 2"), ([3], "3, which is the first: .* 3 batches")):
        with pytest.raises(InvalidArgumentError, match=f"numbers has {message}"):
            list(batches.read_some(numbers))
