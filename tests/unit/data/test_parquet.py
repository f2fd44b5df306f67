"""ParquetBatches: rows in order, whatever their files and row groups, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia.data import ParquetBatches
from persia.embedding.data import PersiaBatch, hash_strings
from persia.errors import InvalidArgumentError, InvalidTypeError, NotFoundError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NUM_ROWS = 103


def write(path: Path, begin: int, end: int, **columns: Any) -> None:
    rows = range(begin, end)
    table = {
        "click": [row % 2 for row in rows],
        "age": [None if row == 5 else row / 4 for row in rows],
        "price": [float("nan") if row == 6 else float(row) for row in rows],
        "user": list(rows),
        "country": [None if row == 7 else f"c{row % 9}" for row in rows],
        "tags": [[row, row + 1][: row % 3] for row in rows],
        **columns,
    }
    parquet.write_table(pa.table(table), path, row_group_size=17)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clicks")
    for number, (begin, end) in enumerate([(0, 40), (40, 41), (41, NUM_ROWS)]):
        write(made / f"{number}.parquet", begin, end)
    return made


def open_all(files: Any, **changes: Any) -> ParquetBatches:
    columns = {"labels": ["click"], "dense": ["age", "price"], "ids": ["user", "country", "tags"]}
    return ParquetBatches(files, **{**columns, "batch_size": 10, **changes})


def made(batches: ParquetBatches, first: int = 0) -> list[PersiaBatch]:
    return [batches.make(rows, requires_grad=True) for rows in batches.read(first)]


def users_of(batches: list[PersiaBatch]) -> list[list[int]]:
    return [batch.id_type_features[0].ids.tolist() for batch in batches]


def slices(begin: int, end: int, size: int = 10) -> list[list[int]]:
    return [list(range(first, min(first + size, end))) for first in range(begin, end, size)]


def test_batches_are_the_rows_in_order(folder: Path) -> None:
    batches = open_all(folder)
    found = made(batches)
    assert len(batches) == len(found) == 11
    assert users_of(found) == slices(0, NUM_ROWS)
    first = found[0]
    (label,), (dense,), (user, country, tags) = (
        first.labels,
        first.non_id_type_features,
        first.id_type_features,
    )
    assert label.data.dtype == dense.data.dtype == np.float32
    np.testing.assert_array_equal(label.data, [[row % 2] for row in range(10)])
    ages = [0.0 if row == 5 else row / 4 for row in range(10)]
    prices = [0.0 if row == 6 else row for row in range(10)]
    np.testing.assert_array_equal(dense.data, np.stack([ages, prices], axis=1))
    assert [user.name, country.name, tags.name] == ["user", "country", "tags"]
    names = [f"c{row % 9}" for row in range(10) if row != 7]
    np.testing.assert_array_equal(country.ids, hash_strings(names))
    assert np.diff(country.offsets).tolist() == [1, 1, 1, 1, 1, 1, 1, 0, 1, 1]
    assert tags.ids.tolist() == [i for row in range(10) for i in [row, row + 1][: row % 3]]


@pytest.mark.parametrize("first", [0, 1, 4, 10])
def test_reading_begins_at_any_batch(folder: Path, first: int) -> None:
    assert users_of(made(open_all(folder), first)) == slices(0, NUM_ROWS)[first:]


@pytest.mark.parametrize("numbers", [[0, 3, 10], [3, 4], [9], []])
def test_chosen_batches_are_read_in_one_pass(
    folder: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, decoded = open_all(folder), []
    listed = list(batches._row_groups())

    class Group:
        def __init__(self, group: Any) -> None:
            self._group, self.row_groups, self.path = group, group.row_groups, group.path

        def to_batches(self, **options: Any) -> Any:
            decoded.append(self)
            return self._group.to_batches(**options)

    monkeypatch.setattr(batches, "_row_groups", lambda: map(Group, listed))
    chosen = [batches.make(rows, requires_grad=True) for rows in batches.read_some(numbers)]
    assert users_of(chosen) == [slices(0, NUM_ROWS)[number] for number in numbers]
    assert len(set(decoded)) == len(decoded) < len(listed), "groups without such rows are skipped"


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([5, 1], "numbers has 1, which follows 5: pass each number once, in ascending order, from 0 to 10"),
        ([3, 3], "numbers has 3, which follows 3"),
        ([3, 99], "numbers has 99, which follows 3: .* as there are 11 batches"),
        ([-1], "numbers has -1, which is the first"),
    ],
)
def test_chosen_batches_are_ascending(folder: Path, numbers: list[int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        list(open_all(folder).read_some(numbers))


@pytest.mark.parametrize(("count", "rows"), [(1, 17), (2, 34), (4, 40), (5, 58), (11, 103)])
def test_rows_that_are_decoded_for_the_first_batches(folder: Path, count: int, rows: int) -> None:
    assert open_all(folder).rows_decoded(count) == rows


def test_rows_that_are_decoded_for_a_part(folder: Path) -> None:
    _, valid = open_all(folder).split(0.2)
    assert valid.rows_decoded(1) == 17 + 11  # the row groups from 75 to 92 and to 103


@pytest.mark.parametrize("size", [1, 7, 17, 1000])
def test_any_batch_size(folder: Path, size: int) -> None:
    batches = open_all(folder, batch_size=size)
    assert len(batches) == len(slices(0, NUM_ROWS, size))
    assert users_of(made(batches)) == slices(0, NUM_ROWS, size)


def test_split_parts_cover_everything_once(folder: Path) -> None:
    train, valid = open_all(folder).split(0.2)
    assert (len(train), len(valid)) == (9, 2)
    assert users_of(made(train) + made(valid)) == slices(0, NUM_ROWS)
    assert users_of(made(train, 7)) == slices(70, 90)
    assert users_of(made(valid, 1)) == [[100, 101, 102]]


def test_row_groups_are_shuffled_in_another_order_each_epoch(folder: Path) -> None:
    shuffled = open_all(folder, shuffle_seed=1)
    epochs = [users_of(made(shuffled.of_epoch(epoch))) for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    for batches in epochs:
        rows = [row for batch in batches for row in batch]
        assert [len(batch) for batch in batches] == [10] * 10 + [3]
        assert sorted(rows) == list(range(NUM_ROWS)) != rows
        # Groups of 17 rows, or to the end of their file, stay together.
        assert all(b == a + 1 for a, b in pairwise(rows) if b not in (0, 17, 34, 40, 41, 58, 75, 92))
    again = open_all(folder, shuffle_seed=1).of_epoch(1)
    for first in (0, 1, 4, 10):
        assert users_of(made(again, first)) == epochs[1][first:]
    assert users_of(made(open_all(folder, shuffle_seed=2))) != epochs[0]
    with pytest.raises(InvalidArgumentError, match="shuffle_seed=1: each epoch would split other rows off"):
        shuffled.split(0.2)


def test_files_by_pattern_and_by_list(folder: Path) -> None:
    assert len(open_all(f"{folder}/[02].parquet")) == 11  # 102 rows
    assert users_of(made(open_all([folder / "2.parquet", folder / "1.parquet"])))[-1] == [102 - 1, 102, 40]


def test_dense_columns_may_be_absent(folder: Path) -> None:
    assert made(open_all(folder, dense=[]))[0].non_id_type_features == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ids": ["usr"]}, InvalidArgumentError, "no column 'usr': did you mean 'user'"),
        ({"ids": []}, InvalidArgumentError, "name at least one column of each"),
        ({"labels": ["country"]}, InvalidTypeError, "'country' is of string: .* name it in ids"),
        ({"ids": ["age"]}, InvalidTypeError, "'age' is of double: .* name it in dense"),
        ({"ids": ["user", "country", "user"]}, InvalidArgumentError, "ids has 'user' more than once"),
        ({"labels": "click"}, InvalidTypeError, r"labels='click' is a string: pass a list"),
        ({"ids": "user"}, InvalidTypeError, r"pass a list, ids=\['user'\]"),
        ({"batch_size": 100_000}, InvalidArgumentError, "batch_size=100000 is above 65535"),
    ],
)
def test_wrong_columns_are_refused_by_name(
    folder: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_all(folder, **changes)


def test_absent_files_and_single_batches_are_refused(folder: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no files .*/absent/\*\.parquet"):
        open_all(f"{folder}/absent/*.parquet")
    with pytest.raises(InvalidArgumentError, match="of 1 batches"):
        open_all(folder, batch_size=1000).split(0.1)


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_labels_must_be_there(tmp_path: Path, missing: float | None) -> None:
    write(tmp_path / "a.parquet", 0, 3, click=[0.0, missing, 1.0])
    with pytest.raises(InvalidArgumentError, match="'click' has 1 nulls or NaN among 3 rows"):
        made(open_all(tmp_path))


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize("name", ["price", "click"])
def test_numbers_that_float32_cannot_hold_are_refused(tmp_path: Path, name: str, value: float) -> None:
    write(tmp_path / "a.parquet", 0, 3, **{name: [0.0, value, 1.0]})
    message = f"'{name}' has 1 values that are Inf or too large .* 3 rows in a batch .*a.parquet: replace"
    with pytest.raises(InvalidArgumentError, match=message):
        made(open_all(tmp_path))


def test_files_with_other_columns_are_refused_before_training(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 3)
    parquet.write_table(parquet.read_table(tmp_path / "a.parquet").drop(["age"]), tmp_path / "b.parquet")
    with pytest.raises(InvalidArgumentError, match=r"b.parquet has no column 'age'"):
        open_all(tmp_path)
    write(tmp_path / "b.parquet", 3, 6, user=["x", "y", "z"])
    with pytest.raises(
        InvalidTypeError, match=r"'user' is of string in .*b.parquet, and of int64 in .*a.par"
    ):
        open_all(tmp_path)


def test_types_that_can_be_read_as_those_of_the_first_file_are_taken(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 3)
    narrow = {"user": pa.array([3, 4], pa.int32()), "age": [1, 2], "tags": [[], []], "country": [None, None]}
    write(tmp_path / "b.parquet", 3, 5, **narrow)
    write(tmp_path / "c.parquet", 5, 6, country=pa.array(["c"], pa.large_string()))
    assert users_of(made(open_all(tmp_path))) == [list(range(6))]


def test_a_directory_stands_for_its_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("notes")
    with pytest.raises(NotFoundError, match="names that end in .parquet"):
        open_all(tmp_path)
    (tmp_path / "day=1").mkdir()
    write(tmp_path / "day=1" / "a.parquet", 0, 3)
    assert users_of(made(open_all(tmp_path))) == [[0, 1, 2]]


def test_unusable_files_are_refused_by_path(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 3)
    (tmp_path / "b.parquet").write_text("no Parquet file")
    for files in (tmp_path, tmp_path / "b.parquet"):
        with pytest.raises(InvalidArgumentError, match=r"b.parquet cannot be read as a Parquet file"):
            open_all(files)
    with pytest.raises(NotFoundError, match=r"no file .*absent.parquet .*correct the path"):
        open_all([tmp_path / "a.parquet", tmp_path / "absent.parquet"])
    twice = pa.table([[1], [2]], names=["user", "user"])
    parquet.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(InvalidArgumentError, match=r"b.parquet has more than one column 'user'"):
        open_all(tmp_path / "b.parquet")


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 1)
    parquet.write_table(parquet.read_table(tmp_path / "a.parquet").slice(1), tmp_path / "a.parquet")
    with pytest.raises(InvalidArgumentError, match=r"the files have no rows: .*a.parquet"):
        open_all(tmp_path)
