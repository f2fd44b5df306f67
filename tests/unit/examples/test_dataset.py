"""Splits, batches, and the files between preparation and training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dataset import DataError, DatasetInfo, Split, load_info, load_split, save_dataset
from recipes import Recipe


def make_split(rows: int) -> Split:
    return Split(
        ids=np.arange(rows * 8, dtype=np.uint64).reshape(rows, 8),
        dense=np.arange(rows * 5, dtype=np.float32).reshape(rows, 5),
        labels=np.ones((rows, 1), dtype=np.float32),
    )


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 24])
def test_batches_cover_every_row_once_in_order(rows: int) -> None:
    split = make_split(rows)
    batches = split.batches(8)
    assert np.array_equal(np.concatenate([np.empty((0, 8), np.uint64), *(b.ids for b in batches)]), split.ids)
    assert all(len(batch) > 0 for batch in batches)


@pytest.mark.parametrize(("rows", "num_full"), [(0, 0), (7, 0), (8, 1), (23, 2)])
def test_training_takes_full_batches_in_every_pass(rows: int, num_full: int) -> None:
    split = make_split(rows)
    recipe = Recipe(batch_size=8, num_passes=3, dense_rate=1.0, embedding_rate=1.0)
    found = [batch.ids[0, 0] for batch in split.training_batches(recipe)]
    assert found == [8 * 8 * number for number in range(num_full)] * 3  # each row has 8 IDs


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    train, test = make_split(300), make_split(7)
    info = DatasetInfo(
        dataset="adult", train_rows=300, test_rows=7, num_categories={"race": 5}, best_auc=None
    )
    save_dataset(tmp_path / "new", info, train, test)
    assert load_info(tmp_path / "new") == info
    for name, split in (("train", train), ("test", test)):
        loaded = load_split(tmp_path / "new", name)
        assert np.array_equal(loaded.ids, split.ids)
        assert np.array_equal(loaded.dense, split.dense)
        assert np.array_equal(loaded.labels, split.labels)


def test_an_interrupted_save_leaves_no_description_of_other_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = make_split(7)
    info = DatasetInfo(dataset="adult", train_rows=7, test_rows=7, num_categories={}, best_auc=None)
    save_dataset(tmp_path, info, split, split)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_dataset(tmp_path, info, split, split)
    with pytest.raises(DataError, match=r"dataset\.json does not exist"):
        load_info(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"dataset": "adult"}'])
def test_a_description_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"dataset\.json does not describe a data set"):
        load_info(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04cut short"])
def test_damaged_arrays_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"train\.npz holds no data of this example"):
        load_split(tmp_path, "train")


def test_data_not_prepared_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.npz does not exist: run prepare_data\.py"):
        load_split(tmp_path, "train")
    with pytest.raises(DataError, match=r"dataset\.json does not exist"):
        load_info(tmp_path)
