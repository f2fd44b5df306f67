"""Makes the Parquet files of this example from the published CSV files of KuaiRand-Pure.

    python convert_csv.py KuaiRand-Pure/data DIR

Writes val.parquet (impressions of 25 to 30 April 2022, for training), test.parquet (1 to 8 May) and
user_sequences.parquet: the last 50 videos that each user was shown before 25 April.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

LOGS = ("log_standard_4_08_to_4_21_pure.csv", "log_standard_4_22_to_5_08_pure.csv")
VIDEOS = "video_features_basic_pure.csv"
COLUMNS = ["user_id", "video_id", "date", "time_ms", "duration_ms", "tab", "is_click"]
TRAIN_DATE, TEST_DATE = 20220425, 20220501
HISTORY_LENGTH = 50


def read_csv(path: Path, columns: list[str]) -> pa.Table:
    return pa.csv.read_csv(path, convert_options=pa.csv.ConvertOptions(include_columns=columns))


def histories(log: pa.Table) -> pa.Table:
    """The last videos of each user, the oldest first; `log` is sorted by time."""
    users, videos = log["user_id"].to_numpy(), log["video_id"].to_numpy()
    order = np.argsort(users, kind="stable")
    users, begins, counts = np.unique(users[order], return_index=True, return_counts=True)
    from_end = np.repeat(begins + counts, counts) - np.arange(len(order))
    offsets = np.append(0, np.cumsum(np.minimum(counts, HISTORY_LENGTH))).astype(np.int32)
    watched = pa.ListArray.from_arrays(offsets, videos[order][from_end <= HISTORY_LENGTH])
    return pa.table({"user_id": users, "watch_seq": watched})


def convert(source: Path, target: Path) -> None:
    log = pa.concat_tables([read_csv(source / name, COLUMNS) for name in LOGS])
    log = log.sort_by([(column, "ascending") for column in ("time_ms", "user_id", "video_id")])
    videos = read_csv(source / VIDEOS, ["video_id", "author_id"]).combine_chunks()
    authors = videos["author_id"].take(pc.index_in(log["video_id"], value_set=videos["video_id"]))
    log = log.append_column("author_id", pc.fill_null(authors, -1))
    is_history, is_test = pc.less(log["date"], TRAIN_DATE), pc.greater_equal(log["date"], TEST_DATE)
    target.mkdir(parents=True, exist_ok=True)
    pq.write_table(log.filter(pc.invert(pc.or_(is_history, is_test))), target / "val.parquet")
    pq.write_table(log.filter(is_test), target / "test.parquet")
    pq.write_table(histories(log.filter(is_history)), target / "user_sequences.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Converts the CSV files of KuaiRand-Pure to Parquet.")
    parser.add_argument("source", type=Path, help="folder with the CSV files, such as KuaiRand-Pure/data")
    parser.add_argument("target", type=Path, help="folder for the Parquet files")
    convert(**vars(parser.parse_args()))
