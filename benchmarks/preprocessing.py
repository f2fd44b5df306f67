"""Preprocessing of raw clicks beside a polars script that does the same, in turns, one core each.

`python -m benchmarks.preprocessing` makes the clicks up. It needs polars. Both read tab-separated text, hash
26 categories to 64 bits, take 13 logarithms, and write Parquet with zstd.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.raw_clicks import write_clicks

_OURS = """
from persia.data.engines import LocalEngine
from persia.data.preprocessing import Preprocessing, preprocess
preprocess(Preprocessing(output), {"train": [path]}, LocalEngine(1))
"""
_POLARS = """
import polars as pl
numbers = [f"num_{index}" for index in range(13)]
categories = [f"cat_{index}" for index in range(26)]
schema = {"label": pl.UInt8, **dict.fromkeys(numbers, pl.Int64), **dict.fromkeys(categories, pl.String)}
log = [(pl.col(name).fill_null(0) + 3.0).clip(lower_bound=1).log().cast(pl.Float32) for name in numbers]
hashed = [
    pl.when(pl.col(name).is_null()).then(0).otherwise(pl.col(name).hash()).alias(name) for name in categories
]
frame = pl.scan_csv(path, separator="\\t", has_header=False, schema=schema, quote_char=None)
frame.select("label", *log, *hashed).sink_parquet(output, compression="zstd", compression_level=1)
"""


def main() -> None:
    """Prints samples/s and peak memory of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"persia": [], "polars": []}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day_0"
        write_clicks(path, arguments.rows)
        for turn in range(arguments.rounds):
            for name, script in (("persia", _OURS), ("polars", _POLARS)):
                seconds, peaks[name] = _run(script, path, Path(folder) / f"{name}_{turn}")
                rates[name].append(arguments.rows / seconds)
    for name, values in rates.items():
        print(
            f"{name}: {statistics.median(values):,.0f} samples/s of CPU time ({min(values):,.0f} to "
            f"{max(values):,.0f}), peak {peaks[name]:.0f} MiB"
        )


def _run(script: str, path: Path, output: Path) -> tuple[float, float]:
    """CPU seconds, so that other programs of the machine change little, and the peak memory in MiB."""
    report = (
        "import resource\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)"
    )
    code = f"path, output = {str(path)!r}, {str(output)!r}\n{script}\n{report}"
    environment = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


if __name__ == "__main__":
    main()
