"""Dumps and loads through real parameter servers, beside what the disk does by itself, in turns.

    python -m benchmarks.checkpoints --rows 2000000 --dim 32 --servers 2

Rows are counted as they lie in memory (embedding and Adagrad's state, 8 bytes an element), files as they are
on the disk, compressed. `disk` writes and reads as many bytes as the files have, with as many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia.checkpoint.checkpoints import Checkpoints, Source
from persia.checkpoint.peers import find_servers
from persia.config import parse_embedding_config
from persia.embedding.optim import Adagrad
from persia.nn import EmbeddingBagCollection
from persia.testing import LocalCluster

_BATCH = 65_536
_NUM_THREADS = 4  # common_config.checkpointing_config.num_workers
_PIECE_BYTES = 4 << 20


def make_rows(slots: dict[str, Any], num_rows: int, url: Path) -> None:
    """Writes a checkpoint of trained rows: each has a gradient of its own, so that little compresses."""
    bags = EmbeddingBagCollection(parse_embedding_config(slots), optimizer=Adagrad(lr=0.1))
    lengths = torch.ones(1, _BATCH, dtype=torch.int64)
    for first in range(0, num_rows, _BATCH):
        pooled = bags(torch.arange(first, first + _BATCH), lengths)
        pooled.backward(torch.randn_like(pooled))
    bags.dump(url)


def timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def write_files(directory: Path, num_bytes: int) -> None:
    """What a disk can do: incompressible bytes from `_NUM_THREADS` threads, on the disk at the end."""
    piece = np.random.default_rng(0).bytes(_PIECE_BYTES)
    directory.mkdir()

    def write(index: int) -> None:
        with open(directory / str(index), "wb") as file:
            for _ in range(num_bytes // _NUM_THREADS // _PIECE_BYTES + 1):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    _on_threads(write)


def read_files(directory: Path) -> None:
    """As loading does, twice; from the page cache, where it still has them."""

    def read(index: int) -> None:
        for _ in range(2):
            with open(directory / str(index), "rb", buffering=0) as file:
                while file.read(2 * _PIECE_BYTES):
                    pass

    _on_threads(read)


def _on_threads(function: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=function, args=(index,)) for index in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    slots = {"slots_config": {"item": {"dim": arguments.dim}}}
    make_rows(slots, arguments.rows, directory / "rows")
    seconds: dict[str, list[float]] = {"dump": [], "load": [], "disk write": [], "disk read": []}
    with LocalCluster(embedding_config=slots, parameter_servers=arguments.servers) as cluster:
        checkpoints = Checkpoints(lambda: find_servers(cluster.session, 30), deadline_s=120)
        checkpoints.load(Source(directory / "rows"))
        for _ in range(arguments.repeats):
            seconds["dump"].append(timed(lambda: checkpoints.dump(directory / "c")))
            section = Source(directory / "c").manifest.embeddings
            assert section is not None, "just dumped"
            num_bytes, num_rows = section.num_bytes, section.num_rows
            seconds["disk write"].append(timed(partial(write_files, directory / "raw", num_bytes)))
            seconds["load"].append(timed(lambda: checkpoints.load(Source(directory / "c"))))
            seconds["disk read"].append(timed(lambda: read_files(directory / "raw")))
            shutil.rmtree(directory / "raw")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    row_bytes = num_rows * arguments.dim * 8
    return {
        "rows": num_rows,
        "row_bytes": row_bytes,
        "file_bytes": num_bytes,
        "bytes_a_row_on_disk": num_bytes / num_rows,
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "gb_of_rows_a_second": {name: round(row_bytes / 1e9 / medians[name], 3) for name in ("dump", "load")},
        "gb_of_files_a_second": {name: round(num_bytes / 1e9 / value, 3) for name, value in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        print(json.dumps(measure(arguments, Path(directory)), indent=1))


if __name__ == "__main__":
    main()
