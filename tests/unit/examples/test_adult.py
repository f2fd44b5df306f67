"""The UCI Adult files: quirks are understood, anything else is refused by file and line."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

import numpy as np
import pytest

import adult
from adult import BUNDLED, ChecksumError, MalformedLineError, encode, parse, read_source, verify
from dataset import CATEGORICAL, DataError
from recipes import PUBLISHED

RECORD = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, "
    "2174, 0, 40, United-States, <=50K"
)


def lines(*records: str) -> bytes:
    return "".join(f"{record}\n" for record in records).encode()


def test_parse_understands_the_quirks_of_both_files() -> None:
    rich = RECORD.replace("State-gov", "?").replace("<=50K", ">50K.")
    table = parse(lines("|1x3 Cross validator", RECORD, rich, ""), "adult.test")
    assert table.labels == [0.0, 1.0]
    assert table.categories["workclass"] == ["State-gov", "?"]
    assert table.categories["native_country"] == ["United-States"] * 2
    assert table.dense == [[39.0, 13.0, 2174.0, 0.0, 40.0]] * 2  # fnlwgt, 77516, is not among them.


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (RECORD + ", 1", "16 values, expected 15"),
        (RECORD.rsplit(",", 1)[0], "14 values, expected 15"),
        (RECORD.replace("39,", "old,"), "age is 'old', expected a whole number"),
        (RECORD.replace("2174", "nan"), "capital_gain is 'nan', expected a whole number"),
        (RECORD.replace("<=50K", "50K"), "income is '50K', expected one of <=50K, >50K"),
        (RECORD.replace(" Male", ""), "gender is empty"),
    ],
)
def test_parse_names_file_and_line_of_a_malformed_record(bad: str, reason: str) -> None:
    with pytest.raises(MalformedLineError) as caught:
        parse(lines(RECORD, bad), "copy/adult.data")
    assert "copy/adult.data, line 2" in str(caught.value)
    assert reason in str(caught.value)


def test_parse_survives_bytes_that_are_not_text() -> None:
    with pytest.raises(MalformedLineError, match="line 1"):
        parse(b"\xff\xfe\x00,", "adult.data")


def test_encode_numbers_categories_by_the_training_file_alone() -> None:
    train = parse(lines(RECORD, RECORD.replace("State-gov", "Private")), "train")
    test = parse(lines(RECORD.replace("State-gov", "Never-worked")), "test")
    info, train_split, test_split = encode(train, test)
    column = CATEGORICAL.index("workclass")
    assert train_split.ids[:, column].tolist() == [1, 0]
    assert test_split.ids[:, column].tolist() == [2]  # Unseen: the number after the last.
    assert info.num_categories["workclass"] == 2
    assert info.dataset == "adult"
    assert info.best_auc is None


def test_read_source_takes_plain_and_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "adult.data").write_bytes(b"plain")
    (tmp_path / "adult.test.xz").write_bytes(lzma.compress(b"compressed"))
    assert read_source(tmp_path, "adult.data") == b"plain"
    assert read_source(tmp_path, "adult.test") == b"compressed"


def test_read_source_names_what_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither .*adult\.data nor .*adult\.data\.xz exists"):
        read_source(tmp_path, "adult.data")
    (tmp_path / "adult.data.xz").write_bytes(b"not xz")
    with pytest.raises(DataError, match=r"adult\.data\.xz is not a valid \.xz file"):
        read_source(tmp_path, "adult.data")


def test_verify_names_origin_and_both_checksums() -> None:
    with pytest.raises(ChecksumError) as caught:
        verify("adult.data", b"changed", "copy/adult.data")
    message = str(caught.value)
    assert "copy/adult.data" in message
    assert hashlib.sha256(b"changed").hexdigest() in message
    assert adult.SHA256["adult.data"] in message


def test_the_real_files_give_the_documented_counts() -> None:
    tables = []
    for name in adult.FILES:
        content = read_source(BUNDLED, name)
        verify(name, content, name)
        tables.append(parse(content, name))
    info, train, test = encode(*tables)
    assert (info.train_rows, info.test_rows) == (32561, 16281)
    assert len(train.training_batches(PUBLISHED)) == 254
    assert train.labels.mean() == pytest.approx(0.24081, abs=1e-5)
    assert test.labels.mean() == pytest.approx(0.23623, abs=1e-5)
    assert list(info.num_categories.values()) == [9, 16, 7, 15, 6, 5, 2, 42]
    assert (train.ids.dtype, train.dense.dtype) == (np.uint64, np.float32)
