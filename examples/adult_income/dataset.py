"""The prepared data set on disk and in memory, shared by every script of the example.

Preparing once and training from `.npz` keeps the CSV quirks out of the data loader, and lets real and
generated data take the same path: only `dataset.json` says which of the two a directory holds.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from recipes import Recipe

CATEGORICAL = (
    "workclass",
    "education",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "gender",
    "native_country",
)
CONTINUOUS = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_DIRECTORY = REPOSITORY / "build" / "adult_income"


class DataError(ValueError):
    """The data cannot be used; the message names the file, what is wrong with it, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Samples in training order.

    ids: uint64 [rows, 8], one column for each name in CATEGORICAL, numbered from 0 within a column.
    dense: float32 [rows, 5], one column for each name in CONTINUOUS.
    labels: float32 [rows, 1], 1.0 for an income above 50K.
    """

    ids: NDArray[np.uint64]
    dense: NDArray[np.float32]
    labels: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, begin: int, end: int) -> Split:
        """The rows from `begin` to before `end`, as far as there are any."""
        rows = slice(begin, end)
        return Split(ids=self.ids[rows], dense=self.dense[rows], labels=self.labels[rows])

    def batches(self, size: int = 128) -> list[Split]:
        """Every row, as evaluation needs; the last batch may be shorter than `size`."""
        return [self.part(begin, begin + size) for begin in range(0, len(self), size)]

    def training_batches(self, recipe: Recipe) -> list[Split]:
        """The recipe's passes in file order, of full batches only, as in the published example: 254."""
        full = [batch for batch in self.batches(recipe.batch_size) if len(batch) == recipe.batch_size]
        return full * recipe.num_passes


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What `dataset.json` says about the `.npz` files beside it."""

    dataset: Literal["adult", "generated"]
    train_rows: int
    test_rows: int
    num_categories: dict[str, int]
    best_auc: float | None  # AUC of the true probabilities on the test labels: known for generated data only.


def save_dataset(directory: Path, info: DatasetInfo, train: Split, test: Split) -> None:
    """Writes each file aside and renames it, so that a reader never meets half a file.

    `dataset.json` comes last, and an earlier one goes first: it is what readers take as the sign of a
    complete data set, and it must not describe the arrays of another.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "dataset.json").unlink(missing_ok=True)
    for name, split in (("train", train), ("test", test)):
        aside = directory / f"{name}.partial.npz"
        np.savez(aside, ids=split.ids, dense=split.dense, labels=split.labels)
        os.replace(aside, directory / f"{name}.npz")
    aside = directory / "dataset.partial.json"
    aside.write_text(json.dumps(dataclasses.asdict(info), indent=2) + "\n", encoding="utf-8")
    os.replace(aside, directory / "dataset.json")


def load_split(directory: Path, name: Literal["train", "test"]) -> Split:
    """Raises DataError when the data set has not been prepared, or is damaged."""
    path = _existing(directory / f"{name}.npz")
    try:
        # Opened here, as np.load leaves a file open that it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return Split(ids=arrays["ids"], dense=arrays["dense"], labels=arrays["labels"])
    except (BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} holds no data of this example ({error}): run prepare_data.py --output {directory} again"
        ) from error


def load_info(directory: Path) -> DatasetInfo:
    """Raises DataError when the data set has not been prepared, or not by this version of the example."""
    path = _existing(directory / "dataset.json")
    try:
        return DatasetInfo(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path} does not describe a data set ({error}): run prepare_data.py --output {directory} again"
        ) from error


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"{path} does not exist: run prepare_data.py --output {path.parent} first")
    return path
