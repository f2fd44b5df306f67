"""The KuaiRand example's files, made from the CSV files that are published."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
import pyarrow.parquet as pq

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "kuairand"
HEADER = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,play_time_ms,duration_ms,is_rand,tab\n"


def row(user: int, video: int, date: int, time_ms: int, is_click: int = 0) -> str:
    return f"{user},{video},{date},0,{time_ms},{is_click},0,9,1000,0,1\n"


def convert(folder: Path, first: str, second: str) -> dict[str, list[dict[str, Any]]]:
    """Runs the script on two logs; returns the rows of each file."""
    (folder / "log_standard_4_08_to_4_21_pure.csv").write_text(HEADER + first)
    (folder / "log_standard_4_22_to_5_08_pure.csv").write_text(HEADER + second)
    (folder / "video_features_basic_pure.csv").write_text("video_id,author_id,tag\n10,110,1\n11,111,2\n")
    target = folder / "made" / "here"
    subprocess.run([sys.executable, str(EXAMPLE / "convert_csv.py"), str(folder), str(target)], check=True)
    return {path.stem: pq.read_table(path).to_pylist() for path in target.glob("*.parquet")}


def test_impressions_are_split_by_date_and_have_their_author(tmp_path: Path) -> None:
    made = convert(
        tmp_path,
        row(1, 10, 20220408, 5),
        # In another order than that of time; the time of day does not decide.
        row(1, 11, 20220430, 30, is_click=1) + row(2, 12, 20220425, 20) + row(1, 10, 20220501, 29),
    )
    columns = ("user_id", "video_id", "author_id", "tab", "time_ms", "duration_ms", "is_click")
    assert [tuple(line[column] for column in columns) for line in made["val"]] == [
        (2, 12, -1, 1, 20, 1000, 0),  # a video without features
        (1, 11, 111, 1, 30, 1000, 1),
    ]
    assert [(line["video_id"], line["author_id"]) for line in made["test"]] == [(10, 110)]


def test_histories_are_the_last_videos_before_training(tmp_path: Path) -> None:
    first = "".join(row(7, video, 20220409, 1000 - video) for video in range(60))  # the latest is video 0
    made = convert(
        tmp_path, first + row(3, 11, 20220410, 4), row(3, 10, 20220424, 3) + row(9, 10, 20220425, 2)
    )
    assert made["user_sequences"] == [
        {"user_id": 3, "watch_seq": [10, 11]},
        {"user_id": 7, "watch_seq": list(range(49, -1, -1))},
    ]


def test_the_example_reads_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(tmp_path, row(1, 10, 20220409, 1), row(1, 11, 20220426, 2, is_click=1) + row(2, 11, 20220427, 3))
    spec = importlib.util.spec_from_file_location("kuairand_clicks", EXAMPLE / "clicks.py")
    assert spec is not None
    assert spec.loader is not None
    clicks = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, clicks)  # its dataclasses look themselves up
    spec.loader.exec_module(clicks)
    log = clicks.read(tmp_path / "made" / "here", clicks.TRAIN)
    assert log.ids["author"].tolist() == [111, 111]
    assert log.clicks.tolist() == [[1.0], [0.0]]
    assert log.watched.to_pylist() == [[10], None]
