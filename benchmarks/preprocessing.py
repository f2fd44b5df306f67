"""Preprocessing of raw clicks beside a polars script that does the same, in turns, one core each.

`python -m benchmarks.preprocessing` makes the clicks up. It needs polars. Both read tab-separated text, hash
26 categories to 64 bits, take 13 logarithms, and write Parquet with zstd. With `--frequency-limit` both
number the categories instead, the most frequent first, in two passes: 0 is a missing one, 1 a rare one.

`--engine spark` or `ray` compares one worker with two instead (`engine_workers.py`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.engine_clusters import CLUSTERS
from benchmarks.engine_workers import compare_workers
from benchmarks.raw_clicks import write_clicks

_OURS = """
from persia.data.engines import LocalEngine
from persia.data.preprocessing import Preprocessing, preprocess
settings = Preprocessing(output, contiguous=limit > 0, frequency_limit=limit)
preprocess(settings, {"train": [path]}, LocalEngine(1))
"""
_POLARS = """
import polars as pl
numbers = [f"num_{index}" for index in range(13)]
categories = [f"cat_{index}" for index in range(26)]
schema = {"label": pl.UInt8, **dict.fromkeys(numbers, pl.Int64), **dict.fromkeys(categories, pl.String)}
log = [(pl.col(name).fill_null(0) + 3.0).clip(lower_bound=1).log().cast(pl.Float32) for name in numbers]
frame = pl.scan_csv(path, separator="\\t", has_header=False, schema=schema, quote_char=None)
if limit:
    counts = [frame.select(name).drop_nulls().group_by(name).len() for name in categories]
    frequent = [
        count.filter(pl.col("len") >= limit).sort("len", descending=True).with_row_index("id", offset=2)
        for count in counts
    ]
    made = [
        pl.col(name).replace_strict(found[name], found["id"], default=1, return_dtype=pl.UInt32)
        for name, found in zip(categories, pl.collect_all(frequent, engine="streaming"))
    ]
else:
    made = [pl.col(name).hash().alias(name) for name in categories]
made = [
    pl.when(pl.col(name).is_null()).then(0).otherwise(column).alias(name)
    for name, column in zip(categories, made)
]
frame.select("label", *log, *made).sink_parquet(output, compression="zstd", compression_level=1)
"""


def main() -> None:
    """Compares with polars, or the workers of an engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frequency-limit", type=int, default=0, help="number the categories contiguously")
    parser.add_argument("--engine", choices=sorted(CLUSTERS), help="one worker beside two, no polars")
    arguments = parser.parse_args()
    if arguments.engine:
        compare_workers(arguments.engine, arguments.rows, arguments.rounds)
    else:
        compare_with_polars(arguments)


def compare_with_polars(arguments: argparse.Namespace) -> None:
    """Prints samples/s of processor time and peak memory of each."""
    rates: dict[str, list[float]] = {"persia": [], "polars": []}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day_0"
        write_clicks(path, arguments.rows)
        for turn in range(arguments.rounds):
            for name, script in (("persia", _OURS), ("polars", _POLARS)):
                given = {"path": str(path), "output": f"{folder}/{name}_{turn}"}
                given |= {"limit": arguments.frequency_limit}
                seconds, peaks[name] = _run(script, given)
                rates[name].append(arguments.rows / seconds)
    for name, values in rates.items():
        print(
            f"{name}: {statistics.median(values):,.0f} samples/s of CPU time ({min(values):,.0f} to "
            f"{max(values):,.0f}), peak {peaks[name]:.0f} MiB"
        )


def _run(script: str, values: Mapping[str, str | int]) -> tuple[float, float]:
    """CPU seconds, so that other programs of the machine change little, and the peak memory in MiB."""
    report = (
        "import resource\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)"
    )
    code = f"globals().update({dict(values)!r})\n{script}\n{report}"
    environment = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


if __name__ == "__main__":
    main()
