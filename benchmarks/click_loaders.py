"""Samples a second of processor time from files to batches of 26 slots and 13 numbers, on one core.

`python -m benchmarks.click_loaders` makes clicks up, writes them as split binary and Parquet, and reads each
with batches that are encoded, as data loaders do before they send them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from persia.data import FeatureSpec, ParquetBatches, SplitBinaryBatches, SyntheticClicks


def main() -> None:
    """Prints the median of the rounds for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    size = arguments.batch_size
    clicks = SyntheticClicks(num_batches=arguments.rows // size, batch_size=size)
    with tempfile.TemporaryDirectory() as folder:
        clicks.write_split_binary(folder)
        clicks.write_parquet(str(Path(folder) / "clicks.parquet"))
        spec = FeatureSpec.load(folder)
        sources: dict[str, Any] = {
            "split binary": SplitBinaryBatches(spec, "train", batch_size=size),
            "Parquet": ParquetBatches(
                str(Path(folder) / "clicks.parquet"),
                labels=["label"],
                dense=[f"I{index + 1}" for index in range(13)],
                ids=[f"C{index + 1}" for index in range(26)],
                batch_size=size,
            ),
        }
        for name, batches in sources.items():
            rates = [_rate(batches, size) for _ in range(arguments.rounds)]
            print(
                f"{name}: {statistics.median(rates):,.0f} samples/s of a core ({min(rates):,.0f} to ", end=""
            )
            print(f"{max(rates):,.0f})")


def _rate(batches: Any, size: int) -> float:
    begin, num_batches = time.process_time(), 0
    for rows in batches.read():
        batch = batches.make(rows, requires_grad=True)
        batch.encode_id_features()
        batch.encode_dense()
        num_batches += 1
    return num_batches * size / (time.process_time() - begin)


if __name__ == "__main__":
    main()
