"""The UCI Adult files as published: where they live, their checksums, and their quirks.

Quirks: `adult.test` starts with a comment line and ends its labels with a full stop; both files end with a
blank line; `?` stands for a missing value. `fnlwgt` is a survey weight, not a property of the person, and
is dropped.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset import CATEGORICAL, CONTINUOUS, DataError, DatasetInfo, Split

HOME_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
# The copy of this repository (its README has the licence): training needs no network.
BUNDLED = Path(__file__).resolve().parent / "uci_adult"
FILES = ("adult.data", "adult.test")
SHA256 = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education_num",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "gender",
    "capital_gain",
    "capital_loss",
    "hours_per_week",
    "native_country",
    "income",
)
LABELS = {"<=50K": 0.0, ">50K": 1.0}


class ChecksumError(DataError):
    """A file is not the published one, byte for byte."""


class MalformedLineError(DataError):
    """A line of a file is not a record of the Adult data set."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The parsed columns of one file, not encoded yet; all lists have one entry for each record."""

    categories: dict[str, list[str]]
    dense: list[list[float]]
    labels: list[float]


def read_source(directory: Path, name: str) -> bytes:
    """The uncompressed bytes of a file in a local copy, plain or `.xz`; raises DataError without either."""
    plain, compressed = directory / name, directory / f"{name}.xz"
    if plain.is_file():
        return plain.read_bytes()
    if not compressed.is_file():
        raise DataError(
            f"neither {plain} nor {compressed} exists: give the folder that holds the UCI Adult files"
        )
    try:
        return lzma.decompress(compressed.read_bytes())
    except lzma.LZMAError as error:
        raise DataError(f"{compressed} is not a valid .xz file ({error}): copy it again") from error


def verify(name: str, content: bytes, origin: str) -> None:
    """Raises ChecksumError unless `content` (from `origin`) is the published file `name`."""
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ChecksumError(
            f"{origin}: SHA-256 is {found}, but the published {name} has {SHA256[name]} "
            f"({len(content)} bytes read); fetch the file again from {HOME_URL}{name}"
        )


def parse(content: bytes, origin: str) -> Table:
    """Raises MalformedLineError naming `origin` and the line number."""
    table = Table(categories={name: [] for name in CATEGORICAL}, dense=[], labels=[])
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), start=1):
        if line.strip() and not line.startswith("|"):
            _append_record(table, line, f"{origin}, line {number}")
    return table


def _append_record(table: Table, line: str, where: str) -> None:
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(COLUMNS):
        raise MalformedLineError(f"{where}: {len(values)} values, expected {len(COLUMNS)}: {line!r}")
    record = dict(zip(COLUMNS, values, strict=True))
    dense = [_number(record[name], name, where) for name in CONTINUOUS]
    income = record["income"].removesuffix(".")
    if income not in LABELS:
        raise MalformedLineError(
            f"{where}: income is {record['income']!r}, expected one of {', '.join(LABELS)}"
        )
    table.dense.append(dense)
    table.labels.append(LABELS[income])
    for name in CATEGORICAL:
        if not record[name]:
            raise MalformedLineError(f"{where}: {name} is empty, expected a category or '?'")
        table.categories[name].append(record[name])


def _number(text: str, name: str, where: str) -> float:
    # The published columns hold whole numbers only; float() would also take "nan" and "inf".
    if not (text.isascii() and text.isdigit()):
        raise MalformedLineError(f"{where}: {name} is {text!r}, expected a whole number")
    return float(text)


def encode(train: Table, test: Table) -> tuple[DatasetInfo, Split, Split]:
    """Numbers the categories of each column in alphabetical order, from the training file alone.

    A test value that training never saw gets the number after the last: its embedding was never trained, as
    it would be in service. (Adult has no such value.) `?` is a category like any other: that a value is
    missing tells something. Continuous columns stay as they are: the model's BatchNorm does the scaling,
    and that is how the published AUC comes about (standardised columns would give about 0.005 more).
    """
    vocabulary = {name: sorted(set(values)) for name, values in train.categories.items()}
    info = DatasetInfo(
        dataset="adult",
        train_rows=len(train.labels),
        test_rows=len(test.labels),
        num_categories={name: len(values) for name, values in vocabulary.items()},
        best_auc=None,
    )
    return info, _encode_split(train, vocabulary), _encode_split(test, vocabulary)


def _encode_split(table: Table, vocabulary: dict[str, list[str]]) -> Split:
    columns = [_encode_column(table.categories[name], vocabulary[name]) for name in CATEGORICAL]
    return Split(
        ids=np.array(columns, dtype=np.uint64).T.copy(),
        dense=np.array(table.dense, dtype=np.float32).reshape(-1, len(CONTINUOUS)),
        labels=np.array(table.labels, dtype=np.float32).reshape(-1, 1),
    )


def _encode_column(values: Iterable[str], vocabulary: Sequence[str]) -> list[int]:
    numbers = {value: number for number, value in enumerate(vocabulary)}
    return [numbers.get(value, len(vocabulary)) for value in values]
