"""The click log as arrays: what was known before an impression, and whether it was clicked.

The log also has what is only known afterwards (`play_time_ms`, `watch_ratio`, `long_view`, `is_like` and the
like). These columns would give the answer away and are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

TRAIN, TEST, HISTORIES = "val.parquet", "test.parquet", "user_sequences.parquet"
ID_COLUMNS = {"user": "user_id", "video": "video_id", "author": "author_id", "tab": "tab"}
SINGLE_SLOTS = (*ID_COLUMNS, "hour")
SLOTS = (*SINGLE_SLOTS, "watched")  # in the order in which the model gets them
_MS_PER_HOUR = 3_600_000


class DataError(ValueError):
    """The data cannot be used; the message names the file, what is wrong with it, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Clicks:
    """Impressions in the order of time.

    ids: uint64 [rows] for each of SINGLE_SLOTS.
    watched: for each row a list of int64, the videos its user watched before the log begins; or null.
    seconds: float32 [rows, 1], log(1 + length of the video).
    clicks: float32 [rows, 1], 0 or 1.
    """

    ids: dict[str, NDArray[np.uint64]]
    watched: pa.ListArray
    seconds: NDArray[np.float32]
    clicks: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.clicks)

    def part(self, begin: int, end: int) -> Clicks:
        """Rows from `begin` up to `end`, or to the last one."""
        rows = slice(begin, end)
        return Clicks(
            ids={slot: ids[rows] for slot, ids in self.ids.items()},
            watched=self.watched.slice(begin, end - begin),
            seconds=self.seconds[rows],
            clicks=self.clicks[rows],
        )

    def num_batches(self, size: int) -> int:
        return -(-len(self) // size)

    def batch(self, index: int, size: int) -> Clicks:
        """The last one may be shorter."""
        return self.part(index * size, (index + 1) * size)

    def batches(self, size: int) -> Iterator[Clicks]:
        return (self.batch(index, size) for index in range(self.num_batches(size)))

    def to_persia_batch(self, *, requires_grad: bool) -> PersiaBatch:
        singles = [IDTypeFeatureWithSingleID(slot, self.ids[slot]) for slot in SINGLE_SLOTS]
        return PersiaBatch(
            [*singles, IDTypeFeature.from_arrow("watched", self.watched)],
            non_id_type_features=[NonIDTypeFeature(self.seconds, name="seconds")],
            labels=[Label(self.clicks, name="click")],
            requires_grad=requires_grad,
        )


def read(folder: Path, name: str, max_rows: int | None = None) -> Clicks:
    """The first `max_rows` impressions of a file, all by default. Raises DataError."""
    columns = [*ID_COLUMNS.values(), "time_ms", "duration_ms", "is_click"]
    log = _table(folder / name, columns)
    # By user and video too: many impressions share a millisecond, and runs must agree on their order.
    order = [(column, "ascending") for column in ("time_ms", "user_id", "video_id")]
    log = log.sort_by(order).slice(0, max_rows)
    ids = {slot: log[column].to_numpy().astype(np.uint64) for slot, column in ID_COLUMNS.items()}
    ids["hour"] = (log["time_ms"].to_numpy() // _MS_PER_HOUR % 24).astype(np.uint64)
    seconds = np.log1p(log["duration_ms"].to_numpy() / 1000)
    return Clicks(
        ids=ids,
        watched=_watched(folder, log["user_id"]),
        seconds=seconds.astype(np.float32).reshape(-1, 1),
        clicks=log["is_click"].to_numpy().astype(np.float32).reshape(-1, 1),
    )


def _watched(folder: Path, users: pa.ChunkedArray) -> pa.ListArray:
    histories = _table(folder / HISTORIES, ["user_id", "watch_seq"]).combine_chunks()
    rows = pc.index_in(users, value_set=histories["user_id"].combine_chunks())
    watched = histories["watch_seq"].take(rows).combine_chunks()  # null where the user has no history
    return watched.chunk(0) if isinstance(watched, pa.ChunkedArray) else watched


def _table(path: Path, columns: list[str]) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{path} cannot be read ({error}): KUAIRAND_DIR must be a folder with {TRAIN}, {TEST} and "
            f"{HISTORIES} of KuaiRand-Pure, which convert_csv.py makes"
        ) from error
