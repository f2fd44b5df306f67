"""Parquet files that a feature spec describes: slots, batches, and wrong files found before training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml

from benchmarks.raw_clicks import write_clicks
from persia.data import FeatureSpec, ParquetBatches, SplitBinaryBatches, open_batches
from persia.data.engines import LocalEngine
from persia.data.preprocessing import Preprocessing, preprocess
from persia.errors import ConfigError, CorruptionError, InvalidArgumentError, InvalidTypeError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preprocessed: 2 numbers and 3 categories with contiguous IDs, in several files."""
    folder = tmp_path_factory.mktemp("made")
    for index in range(3):
        write_clicks(folder / f"day_{index}", 600, seed=index, numerical=2, categorical=3)
    for kind in ("parquet", "split-binary"):
        settings = Preprocessing(
            str(folder / kind), kind, num_numerical=2, num_categorical=3, contiguous=True, block_bytes=8192
        )
        inputs = {"train": [folder / "day_0", folder / "day_1"], "test": [folder / "day_2"]}
        preprocess(settings, inputs, LocalEngine(1))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "parquet", tmp_path / "data"))


def test_batches_are_those_of_split_binary(made: Path) -> None:
    spec, other = FeatureSpec.load(made / "parquet"), FeatureSpec.load(made / "split-binary")
    assert spec.metadata == {"rows": {"train": 1200, "test": 600}}
    slots, wanted = (list(one.slots(4)["slots_config"].items()) for one in (spec, other))
    assert slots == [(name.removesuffix(".bin"), slot) for name, slot in wanted]
    for mapping in ("train", "test"):
        batches = open_batches(spec, mapping, batch_size=256)
        batches.check_values()
        others = open_batches(made / "split-binary", mapping, batch_size=256)
        assert [type(batches), type(others)] == [ParquetBatches, SplitBinaryBatches]
        assert len(batches) == len(others) == (5 if mapping == "train" else 3)
        for one, two in zip(batches.read(), others.read(), strict=True):
            left = batches.make(one, requires_grad=True)
            right = others.make(two, requires_grad=True)
            np.testing.assert_array_equal(left.labels[0].data, right.labels[0].data)
            dense = [batch.non_id_type_features[0].data for batch in (left, right)]
            np.testing.assert_allclose(*dense, rtol=1e-3)  # split binary has float16
            for a, b in zip(left.id_type_features, right.id_type_features, strict=True):
                assert f"{a.name}.bin" == b.name
                np.testing.assert_array_equal(a.ids, b.ids)


def test_a_spec_is_written_as_it_is_read(folder: Path) -> None:
    before = (folder / "feature_spec.yaml").read_bytes()
    FeatureSpec.load(folder).save()
    assert (folder / "feature_spec.yaml").read_bytes() == before
    with pytest.raises(
        InvalidArgumentError, match=r"source_spec\.train .* is Parquet: .*ParquetBatches\.of_spec"
    ):
        SplitBinaryBatches(folder, "train")
    assert open_batches(folder, "train", shuffle_seed=1).shuffle_seed == 1


def test_split_binary_is_refused(made: Path) -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"source_spec\.train .* is split binary: .*SplitBinaryBatches.*open_batches",
    ):
        ParquetBatches.of_spec(made / "split-binary")


def in_all_files(folder: Path, name: str, values: Any) -> list[Path]:
    files = sorted(folder.iterdir())
    for file in files:
        change(file, name, values)
    return files


@pytest.mark.parametrize("is_list", [False, True])
def test_dictionary_columns_are_read_by_their_values(is_list: bool, folder: Path) -> None:
    # pyarrow decodes dictionaries of integers as it reads, so that their IDs can be checked.
    def encoded(column: Any) -> Any:
        ids = column.combine_chunks()
        if is_list:
            return pa.ListArray.from_arrays(np.arange(len(ids) + 1), ids.dictionary_encode())
        return ids.dictionary_encode()

    plain = ParquetBatches.of_spec(folder, "test", batch_size=600)
    (wanted,) = (plain.make(rows, requires_grad=False) for rows in plain.read())
    first, *_ = in_all_files(folder / "test", "cat_1", encoded)
    batches = ParquetBatches.of_spec(folder, "test", batch_size=600)
    batches.check_values()
    (found,) = (batches.make(rows, requires_grad=False) for rows in batches.read())
    np.testing.assert_array_equal(found.id_type_features[1].ids, wanted.id_type_features[1].ids)
    in_all_files(folder / "test", "cat_1", lambda column: encoded(pa.chunked_array([[10**6] * len(column)])))
    with pytest.raises(CorruptionError, match="'cat_1' is 1000000 in row 0, must be 0 to ") as raised:
        ParquetBatches.of_spec(folder, "test").check_values()
    assert str(first) in str(raised.value)


def test_lists_must_have_the_ids_of_the_hotness(folder: Path) -> None:
    path = folder / "feature_spec.yaml"
    content = yaml.safe_load(path.read_text())
    content["feature_spec"]["cat_0"]["hotness"] = 2
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(CorruptionError, match="'cat_0' has 1 IDs in row 0, must have 2, by its hotness"):
        ParquetBatches.of_spec(folder, "test").check_values()
    in_all_files(folder / "test", "cat_0", lambda c: pa.array([[i, 0] for i in c.to_pylist()]))
    ParquetBatches.of_spec(folder, "test").check_values()
    change(sorted((folder / "test").iterdir())[-1], "cat_0", with_value([0, 0, 0]))
    with pytest.raises(CorruptionError, match="'cat_0' has 3 IDs in row 7, must have 2"):
        ParquetBatches.of_spec(folder, "test").check_values()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rows": 5}, "metadata.rows is 5, must be a mapping such as"),
        ([5], "metadata must be a mapping of keys"),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "split-binary"])
def test_wrong_metadata(kind: str, metadata: Any, message: str, made: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((made / kind / "feature_spec.yaml").read_text())
    (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(content | {"metadata": metadata}))
    with pytest.raises(ConfigError, match=message):
        FeatureSpec.load(tmp_path)


def change(path: Path, name: str, values: Any) -> None:
    table = parquet.read_table(path)
    parquet.write_table(table.set_column(table.schema.get_field_index(name), name, values(table[name])), path)


def with_value(value: Any, row: int = 7) -> Callable[[Any], Any]:
    def values(column: Any) -> Any:
        changed = column.to_pylist()
        changed[row] = value
        return pa.array(changed, column.type)

    return values


@pytest.mark.parametrize(
    ("name", "values", "error", "message"),
    [
        ("cat_1", with_value(10**6), CorruptionError, "'cat_1' is 1000000 in row 7, must be 0 to "),
        ("cat_1", with_value(-1), CorruptionError, "'cat_1' is -1 in row 7, must be 0 to "),
        (
            "cat_2",
            lambda c: pa.array(map(str, c.to_pylist())),
            InvalidTypeError,
            "'cat_2' is of string, and its",
        ),
        (
            "cat_0",
            lambda c: pa.array([[i, 9**9] for i in c.to_pylist()]),
            CorruptionError,
            "is 387420489 in row 0",
        ),
        ("num_0", with_value(float("inf")), InvalidArgumentError, "'num_0' has 1 values that are Inf"),
        ("label", with_value(None), InvalidArgumentError, "'label' has 1 nulls"),
    ],
)
def test_wrong_values_name_file_column_and_row(
    name: str, values: Any, error: Any, message: str, folder: Path
) -> None:
    file = sorted((folder / "test").iterdir())[-1]
    change(file, name, values)
    if name == "cat_0":  # the types of the files must agree
        for other in sorted((folder / "test").iterdir())[:-1]:
            change(other, name, lambda column: pa.array([[value] for value in column.to_pylist()]))
    if name == "cat_2":
        for other in sorted((folder / "test").iterdir())[:-1]:
            change(other, name, values)
        file = sorted((folder / "test").iterdir())[0]
    batches = ParquetBatches.of_spec(folder, "test")
    with pytest.raises(error, match=message) as raised:
        batches.check_values()
    assert str(file) in str(raised.value)


def test_a_missing_file_is_found_by_the_number_of_rows(folder: Path) -> None:
    sorted((folder / "train").iterdir())[1].unlink()
    with pytest.raises(
        CorruptionError, match=r"train has \d+ rows, metadata\.rows\.train .* says 1200: a file"
    ):
        ParquetBatches.of_spec(folder)


def test_a_missing_column_is_named(folder: Path) -> None:
    path = folder / "feature_spec.yaml"
    path.write_text(path.read_text().replace("num_1", "age"))
    with pytest.raises(
        InvalidArgumentError,
        match=r"the files have no column 'age': .* \(in .*train/0000-day_0-000000\.parquet\)",
    ):
        ParquetBatches.of_spec(folder)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (
            {"type": "parquet", "features": ["label"], "files": ["train"]},
            "has feature 'cat_0' 0 times, must once",
        ),
        (
            {"type": "csv", "features": ["label"], "files": ["train"]},
            "type='csv' must be 'split_binary' or 'parquet'",
        ),
    ],
)
def test_wrong_chunks(chunk: Any, message: str, folder: Path) -> None:
    path = folder / "feature_spec.yaml"
    content = yaml.safe_load(path.read_text())
    content["source_spec"]["train"] = [chunk]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=message):
        FeatureSpec.load(folder)
    content["source_spec"]["train"] = [chunk | {"type": "parquet"}] * 2
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="has 2 chunks: of Parquet, one has all features"):
        FeatureSpec.load(folder)
