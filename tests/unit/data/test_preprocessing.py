"""Raw logs to data sets: against a plain computation, resumed, damaged, in any number of partitions."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from benchmarks.raw_clicks import write_clicks
from persia.data import ParquetBatches, SplitBinaryBatches
from persia.data.engines import LocalEngine
from persia.data.preprocessing import Preprocessing, preprocess
from persia.embedding.data import hash_strings
from persia.errors import CorruptionError, FailedPreconditionError, InvalidArgumentError, NotFoundError

SMALL = {"num_numerical": 2, "num_categorical": 3, "block_bytes": 4096}


@pytest.fixture
def day(tmp_path: Path) -> Path:
    path = tmp_path / "day_0"
    write_clicks(path, 3000, numerical=2, categorical=3)
    return path


def settings(output: Path, **more: object) -> Preprocessing:
    return Preprocessing(str(output), **{**SMALL, **more})  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fields(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def hashed(text: str) -> int:
    return int(hash_strings([text])[0]) if text else 0


def test_hashed_ids_and_numbers_are_those_of_a_plain_computation(day: Path, tmp_path: Path) -> None:
    result = preprocess(settings(tmp_path / "out"), {"train": [day]}, LocalEngine(1))
    assert result.num_rows == {"train": 3000}
    assert not result.num_bad
    names = ["label", "num_0", "num_1", "cat_0", "cat_1", "cat_2"]
    table = parquet.read_table(tmp_path / "out" / "train")
    assert table.column_names == names
    assert len(list((tmp_path / "out" / "train").iterdir())) > 5
    rows = list(zip(*(table[name].to_pylist() for name in names), strict=True))
    for row, text in zip(rows, fields(day), strict=True):
        assert row[0] == int(text[0])
        wanted = [math.log(max(int(number or 0) + 3, 1)) for number in text[1:3]]
        assert row[1:3] == pytest.approx(wanted, rel=1e-6)
        assert list(row[3:]) == [hashed(value) for value in text[3:]]
    batches = ParquetBatches(
        str(tmp_path / "out" / "train"), labels=["label"], dense=["num_0", "num_1"], ids=names[3:]
    )
    assert len(batches) == 3


@pytest.mark.parametrize("contiguous", [False, True])
def test_rare_values_by_exact_counts(day: Path, tmp_path: Path, contiguous: bool) -> None:
    test_day = tmp_path / "day_1"
    write_clicks(test_day, 500, numerical=2, categorical=3, seed=5)
    out = tmp_path / "out"
    made = settings(out, format="split-binary", frequency_limit=4, contiguous=contiguous)
    preprocess(made, {"train": [day], "test": [test_day]}, LocalEngine(1), partitions=3)
    for mapping, path in {"train": day, "test": test_day}.items():
        batches = SplitBinaryBatches(out, mapping, batch_size=100)
        batches.check_values()
        for column in range(3):
            counts = Counter(text[3 + column] for text in fields(day) if text[3 + column])
            kept = {text: count for text, count in counts.items() if count >= 4}
            order = sorted(kept, key=lambda text: (-kept[text], hashed(text)))
            ids = {text: 2 + i if contiguous else hashed(text) for i, text in enumerate(order)}
            wanted = [ids.get(text[3 + column], 1 if text[3 + column] else 0) for text in fields(path)]
            name = f"cat_{column}.bin"
            feature = batches.spec.features[name]
            assert feature.cardinality == (len(kept) + 2 if contiguous else None)
            found = np.fromfile(batches.spec.file(mapping, name), feature.dtype)
            assert found.astype(np.uint64).tolist() == wanted
    assert not (out / ".preprocess").exists()


def test_partitions_processes_and_compression_change_no_byte(day: Path, tmp_path: Path) -> None:
    made = {"frequency_limit": 3, "contiguous": True}
    preprocess(settings(tmp_path / "a", **made), {"train": [day]}, LocalEngine(1), partitions=1)
    preprocess(settings(tmp_path / "b", **made), {"train": [day]}, LocalEngine(2), partitions=7)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    for suffix, kind in {".gz": "gzip", ".zst": "zstd"}.items():
        with pa.CompressedOutputStream(str(tmp_path / f"day_0{suffix}"), kind) as file:
            file.write(day.read_bytes())
        out = tmp_path / f"of{suffix}"
        preprocess(settings(out, **made), {"train": [tmp_path / f"day_0{suffix}"]}, LocalEngine(1))
        assert content(out) == content(tmp_path / "a")


@pytest.mark.parametrize("format", ["parquet", "split-binary"])
def test_an_interrupted_run_resumes_with_what_it_has(day: Path, tmp_path: Path, format: str) -> None:
    made = {"format": format, "frequency_limit": 2}
    whole = tmp_path / "whole"
    preprocess(settings(whole, **made), {"train": [day]}, LocalEngine(1))

    class InterruptedRunError(Exception):
        pass

    def stopping(after: int) -> object:
        def engine(tasks: list[str]) -> Iterator[str]:
            for index, result in enumerate(LocalEngine(1)(tasks)):
                if index == after and json.loads(tasks[0])["step"] == "transform":
                    raise InterruptedRunError
                yield result

        return engine

    out = tmp_path / "out"
    for after in (3, 6):
        with pytest.raises(InterruptedRunError):
            preprocess(settings(out, **made), {"train": [day]}, stopping(after))  # type: ignore[arg-type]
    tables = {p: p.stat().st_mtime_ns for p in (out / ".preprocess" / "transform").glob("*.table")}
    assert len(tables) >= 6
    with pytest.raises(FailedPreconditionError, match="other settings or files"):
        preprocess(settings(out, **made, log_offset=2.0), {"train": [day]}, LocalEngine(1))

    def checking(tasks: list[str]) -> Iterator[str]:
        yield from LocalEngine(1)(tasks)
        for path, written in tables.items():
            assert path.stat().st_mtime_ns == written  # finished blocks were not transformed again

    preprocess(settings(out, **made), {"train": [day]}, checking)
    assert content(out) == content(whole)
    with pytest.raises(FailedPreconditionError, match="is not empty"):
        preprocess(settings(out, **made), {"train": [day]}, LocalEngine(1))


BAD = {
    7: ("0\t1", "it has 2 fields, must have 6"),
    700: ("1\t1\tx7\ta\tb\tc", "num_1 is 'x7', must be an integer"),
    1500: ("2\t1\t2\ta\tb\tc", "the label is 2, must be 0 or 1"),
    1501: ("", "it has 1 fields, must have 6"),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("frequency_limit", [0, 2])
def test_bad_records_are_skipped_up_to_a_limit(
    day: Path, tmp_path: Path, compressed: bool, frequency_limit: int
) -> None:
    good = tmp_path / "good"
    lines = day.read_text(encoding="utf-8").split("\n")
    for number, (text, _) in BAD.items():
        lines.insert(number - 1, text)
    path = tmp_path / ("bad.gz" if compressed else "bad")
    text = b"\xef\xbb\xbf" + "\n".join(lines).encode()  # as some editors begin a file
    path.write_bytes(gzip.compress(text) if compressed else text)
    made = {"format": "split-binary", "frequency_limit": frequency_limit}
    result = preprocess(settings(tmp_path / "out", **made), {"train": [path]}, LocalEngine(1))
    assert result.num_bad == 4
    assert result.bad == [f"{path}:{number}: {reason}" for number, (_, reason) in BAD.items()]
    preprocess(settings(good, **made), {"train": [day]}, LocalEngine(1))
    files = {name: digest for name, digest in content(good).items() if name.endswith(".bin")}
    assert {name: digest for name, digest in content(tmp_path / "out").items() if name in files} == files
    made["max_bad_records"] = 1
    with pytest.raises(InvalidArgumentError) as raised:
        preprocess(settings(tmp_path / "limit", **made), {"train": [path]}, LocalEngine(1))
    assert "more than 1 bad records" in str(raised.value)
    assert f"{path}:700: num_1 is 'x7'" in str(raised.value)
    made["max_bad_records"] = 4  # a higher limit resumes
    preprocess(settings(tmp_path / "limit", **made), {"train": [path]}, LocalEngine(1))


def test_what_cannot_be_read_is_named(day: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        preprocess(settings(tmp_path / "out"), {"train": [tmp_path / "nowhere"]}, LocalEngine(1))
    short = tmp_path / "short.gz"
    short.write_bytes(gzip.compress(day.read_bytes())[:-2000])
    with pytest.raises(CorruptionError, match=r"short\.gz cannot be read or decompressed"):
        preprocess(settings(tmp_path / "a"), {"train": [short]}, LocalEngine(1))
    long = tmp_path / "long"
    long.write_bytes(b"1" * (2 << 20))
    with pytest.raises(CorruptionError, match="long has a line of more than"):
        preprocess(settings(tmp_path / "b"), {"train": [long]}, LocalEngine(1))
    with pytest.raises(InvalidArgumentError, match="format='csv'"):
        settings(tmp_path / "c", format="csv")


@pytest.mark.parametrize(
    ("train", "test", "missing"),
    [
        (["day_0", "day_1", "day_3", "day_10"], [], "day_2 between numbers 1 and 3"),
        (["day_08.gz", "day_10.gz"], [], r"day_09\.gz between numbers 08 and 10"),
        (["day_0", "day_1"], ["day_3"], "day_2 between numbers 1 and 3"),
        (["day_0", "day_1", "day_2"], ["day_3"], None),
        (["clicks_20260131", "clicks_20260202", "other_7"], [], None),
        (["log-2024-01-05.gz", "log-2024-01-08.gz", "log_2024_01_05", "log_2024_01_09"], [], None),
        (["data2/train.txt", "data4/train.txt"], [], None),
        (["data2/day_1", "data2/day_3"], [], "data2/day_2 between numbers 1 and 3"),
    ],
)
def test_a_missing_day_is_named(
    train: list[str], test: list[str], missing: str | None, day: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in (*train, *test):
        text = day.read_bytes()[:5000].rpartition(b"\n")[0] + b"\n"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    inputs = {"train": [folder / name for name in train], "test": [folder / name for name in test]}
    inputs = {mapping: paths for mapping, paths in inputs.items() if paths}
    if missing is not None:
        with pytest.raises(
            NotFoundError,
            match=rf"there is no file .*{missing}: copy it, or pass allow_gaps=True \(--allow-gaps\)",
        ):
            preprocess(settings(tmp_path / "out"), inputs, LocalEngine(1))
        assert not (tmp_path / "out").exists()
    found = preprocess(settings(tmp_path / "out"), inputs, LocalEngine(1), allow_gaps=missing is not None)
    assert len(found.num_rows) == len(inputs)


def test_without_pyarrow_preprocessing_is_what_needs_it(
    day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    wanted = settings(tmp_path / "out", format="split-binary")
    with pytest.raises(FailedPreconditionError, match="^preprocessing needs pyarrow, .*pip install 'persia"):
        preprocess(wanted, {"train": [day]}, LocalEngine(1))
    assert not (tmp_path / "out").exists()
