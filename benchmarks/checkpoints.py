"""Dumps and loads through real parameter servers, beside what the disk does by itself, and what a training
loses meanwhile.

    python -m benchmarks.checkpoints --rows 2000000 --dim 32 --servers 2 --directory /data

Rows are counted as they lie in memory (embedding and Adagrad's state, 8 bytes an element), files as they are
on the disk, compressed. In turns with dumps and loads as many bytes as the files have are written and read
plainly, with as many threads; what is read was put out of the page cache first. A load reads files twice, the
second time perhaps from the cache.

The training is a client that looks up and updates rows without a pause, and does nothing else, but with
`--model`: then an MLP 256-128 turns embeddings into gradients in between. A block is a dump between two
quiet times that are as long together, and gives one ratio: of the time that a step takes. Told are the median
of the ratios and its 95 % confidence interval, the 99th percentile of all steps, and the time that training
loses by a dump in all. `--blocks 0` leaves this out; `--dump-percent 100` lets dumps go on without a rest.
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

from benchmarks.arguments import dim, folder, whole
from benchmarks.stats import median_interval
from persia import _native
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import find_servers
from persia.config import CheckpointingConfig, parse_embedding_config
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.nn import EmbeddingBagCollection
from persia.storage.manifest import EmbeddingSection
from persia.testing import LocalCluster

_BATCH = 65_536
_NUM_THREADS = 4  # common_config.checkpointing_config.num_workers
_PIECE_BYTES = 4 << 20
_NUM_MESSAGES = 32


class Training:
    """Looks up and updates rows of a cluster; a step is done when its gradients are applied."""

    def __init__(
        self, cluster: LocalCluster, num_rows: int, dim: int, batch_size: int, with_model: bool
    ) -> None:
        (worker,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, 30)
        cluster.join()
        self._client = _native.RemoteClient(1)
        self._client.set_worker(0, worker.address)
        self._client.configure(Adagrad(lr=0.1).train_config(EmbeddingConfig()))
        self._gradients = np.full((batch_size, dim), 1e-3, np.float32)
        self._model = _mlp(dim) if with_model else None
        offsets = np.arange(batch_size + 1, dtype=np.uint32)
        random = np.random.default_rng(0)
        self._messages = [
            _native.encode_id_features(
                batch_size, [("item", random.integers(0, num_rows, batch_size, np.uint64), offsets)]
            )
            for _ in range(_NUM_MESSAGES)
        ]
        self._num_steps = 0

    def step(self) -> None:
        message = self._messages[self._num_steps % len(self._messages)]
        self._num_steps += 1
        result = self._client.lookup_direct(0, message, requires_grad=True)
        gradients = self._gradients
        if self._model is not None:
            pooled = torch.from_numpy(result.slots[0].rows).requires_grad_()
            self._model(pooled).square().mean().backward()
            assert pooled.grad is not None, "the backward pass has just made it"
            gradients = pooled.grad.numpy()
        self._client.return_gradients(result.reference, [("item", gradients)])

    def run(self, goes_on: Callable[[], bool]) -> list[float]:
        """Seconds of each step."""
        seconds: list[float] = []
        while goes_on() or not seconds:
            seconds.append(timed(self.step))
        return seconds

    def run_for(self, duration_s: float) -> list[float]:
        end = time.perf_counter() + duration_s
        return self.run(lambda: time.perf_counter() < end)


def _mlp(dim: int) -> torch.nn.Module:
    torch.set_num_threads(1)
    layers = torch.nn
    return layers.Sequential(
        layers.Linear(dim, 256), layers.ReLU(), layers.Linear(256, 128), layers.ReLU(), layers.Linear(128, 1)
    )


def make_rows(slots: dict[str, Any], num_rows: int, url: Path) -> EmbeddingSection:
    """Writes a checkpoint of trained rows: each has a gradient of its own, so that little compresses."""
    bags = EmbeddingBagCollection(parse_embedding_config(slots), optimizer=Adagrad(lr=0.1))
    for first in range(0, num_rows, _BATCH):
        ids = torch.arange(first, min(first + _BATCH, num_rows))
        pooled = bags(ids, torch.ones(1, len(ids), dtype=torch.int64))
        pooled.backward(torch.randn_like(pooled))
    bags.dump(url)
    return section_of(url)


def section_of(url: Path) -> EmbeddingSection:
    section = Source(url).manifest.embeddings
    assert section is not None, "just dumped"
    return section


def timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def write_files(directory: Path, num_bytes: int) -> None:
    """What a disk can do: incompressible bytes from `_NUM_THREADS` threads, on the disk at the end."""
    piece = np.random.default_rng(0).bytes(_PIECE_BYTES)
    directory.mkdir()

    def write(index: int) -> None:
        left = num_bytes // _NUM_THREADS
        with open(directory / str(index), "wb") as file:
            while left > 0:
                left -= file.write(piece[:left])
            file.flush()
            os.fsync(file.fileno())

    _on_threads(write)


def read_files(directory: Path) -> None:
    def read(index: int) -> None:
        with open(directory / str(index), "rb", buffering=0) as file:
            while file.read(2 * _PIECE_BYTES):
                pass

    _on_threads(read)


def forget_files(directory: Path) -> None:
    """Puts what is on the disk out of the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _on_threads(function: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=function, args=(index,)) for index in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_speed(checkpoints: Checkpoints, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"dump": [], "load": [], "disk write": [], "disk read": []}
    for _ in range(arguments.repeats):
        seconds["dump"].append(timed(lambda: checkpoints.dump(DumpRequest(directory / "c"))))
        section = section_of(directory / "c")
        seconds["disk write"].append(timed(partial(write_files, directory / "raw", section.num_bytes)))
        forget_files(directory)
        seconds["load"].append(timed(lambda: checkpoints.load(Source(directory / "c"))))
        seconds["disk read"].append(timed(lambda: read_files(directory / "raw")))
        shutil.rmtree(directory / "raw")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    row_bytes = section.num_rows * arguments.dim * 8
    return {
        "rows": section.num_rows,
        "row_bytes": row_bytes,
        "file_bytes": section.num_bytes,
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "gb_of_rows_a_second": {name: round(row_bytes / 1e9 / medians[name], 3) for name in ("dump", "load")},
        "gb_of_files_a_second": {
            name: round(section.num_bytes / 1e9 / value, 3) for name, value in medians.items()
        },
    }


def slow_down(training: Training, checkpoints: Checkpoints, url: Path, num_blocks: int) -> dict[str, Any]:
    """Of a training while its rows are dumped."""
    checkpoints.dump(DumpRequest(url))  # so that all dumps measured replace one
    duration_s = timed(lambda: checkpoints.dump(DumpRequest(url)))
    ratios: list[float] = []
    quiet_s: list[float] = []
    during_s: list[float] = []
    longest_s: list[float] = []
    durations_s: list[float] = []
    lost_s: list[float] = []
    for _ in range(num_blocks):
        before = training.run_for(duration_s / 2)
        dump = threading.Thread(target=checkpoints.dump, args=(url,))
        dump.start()
        during = training.run(dump.is_alive)
        dump.join()
        duration_s = sum(during)
        durations_s.append(duration_s)
        after = training.run_for(duration_s / 2)
        quiet_s += before + after
        during_s += during
        longest_s.append(max(during))
        ratios.append(statistics.fmean(during) / statistics.fmean(before + after))
        lost_s.append(duration_s * (1 - 1 / ratios[-1]))
    median, low, high = median_interval(ratios)
    return {
        "blocks": num_blocks,
        "seconds_a_dump": round(statistics.median(durations_s), 2),
        "seconds_lost_a_dump": round(statistics.median(lost_s), 2),
        "step_ms_quiet": round(1e3 * statistics.median(quiet_s), 3),
        "99_percent_of_steps_ms": {
            name: round(1e3 * statistics.quantiles(values, n=100)[-1], 1)
            for name, values in (("quiet", quiet_s), ("dump", during_s))
        },
        "longest_step_ms_of_a_dump": round(1e3 * statistics.median(longest_s), 1),
        "more_time_a_step_percent": {
            name: round(100 * (value - 1), 1)
            for name, value in (("median", median), ("from", low), ("to", high))
        },
    }


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    slots = {"slots_config": {"item": {"dim": arguments.dim}}}
    sizes = []
    for num_rows in (arguments.rows // 100, arguments.rows // 10, arguments.rows):
        section = make_rows(slots, num_rows, directory / "rows")
        sizes.append({"rows": num_rows, "bytes_a_row": round(section.num_bytes / num_rows, 1)})
    checkpointing = {"dump_percent": arguments.dump_percent}
    with LocalCluster(
        embedding_config=slots,
        global_config={"common_config": {"checkpointing_config": checkpointing}},
        parameter_servers=arguments.servers,
    ) as cluster:
        checkpoints = Checkpoints(lambda: find_servers(cluster.session, 30), deadline_s=120)
        checkpoints.load(Source(directory / "rows"))
        result = {"size_on_disk": sizes, **measure_speed(checkpoints, directory, arguments)}
        if arguments.blocks:
            training = Training(cluster, arguments.rows, arguments.dim, arguments.batch_size, arguments.model)
            training.run_for(1.0)
            result["training_during_dumps"] = slow_down(
                training, checkpoints, directory / "c", arguments.blocks
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=whole(100), default=2_000_000)
    parser.add_argument("--dim", type=dim, default=32)
    parser.add_argument("--servers", type=whole(1), default=2)
    parser.add_argument("--repeats", type=whole(1), default=3, help="dumps and loads")
    parser.add_argument("--blocks", type=whole(0), default=10, help="dumps beside a training; 0: none")
    parser.add_argument("--batch-size", type=whole(1), default=4096, help="rows of a step of that training")
    parser.add_argument("--model", action="store_true", help="an MLP between lookup and update")
    parser.add_argument(
        "--dump-percent",
        type=whole(1, 100),
        default=CheckpointingConfig().dump_percent,
        help="common_config.checkpointing_config.dump_percent of the servers",
    )
    parser.add_argument("--directory", type=folder, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        print(json.dumps(measure(arguments, Path(directory)), indent=1))


if __name__ == "__main__":
    main()
