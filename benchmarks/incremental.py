"""What packets of changes cost training, and how old a change is once it can be followed.

    python -m benchmarks.incremental --rows 1000000 --dim 32 --seconds 10

Three ways in turns, with one store in this process: changes not remembered ("off"), remembered but never
taken ("tracking"), and written as packets at the default settings ("packets"). A step looks a batch of IDs
up, popular ones more often, and updates their rows. Ages are those of the oldest change of each packet, at
the moment when its manifest is seen: what is left until a prediction is the follower's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import dim, folder, number, whole
from persia import _native
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.server_job import ServerShare
from persia.checkpoint.service import CheckpointService
from persia.config import GlobalConfig, SlotsConfig, parse_embedding_config, parse_global_config
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.packets.changes import IncrementalSettings, ServerChanges
from persia.packets.log import PacketLog
from persia.packets.writer import PacketWriter

_BATCH = 16_384
_NUM_BATCHES = 64  # made before, so that making them is not measured
_WAYS = ("off", "tracking", "packets")


class Trainer:
    """A store, trained on one thread."""

    def __init__(self, slots: SlotsConfig, num_rows: int, dim: int) -> None:
        self.bags = _native.EmbeddingBags(
            slots=slots.native_slots(), feature_index_prefix_bit=slots.feature_index_prefix_bit
        )
        self.bags.configure(Adagrad(lr=0.1).train_config(EmbeddingConfig()))
        generator = np.random.default_rng(0)
        self._gradients = generator.standard_normal((_BATCH, dim), dtype=np.float32)
        self._lengths = np.ones((1, _BATCH), np.int64)
        for first in range(0, num_rows, _BATCH):
            self._step(np.arange(first, first + _BATCH, dtype=np.uint64))
        skewed = generator.random((_NUM_BATCHES, _BATCH)) ** 4
        self._batches = (skewed * num_rows).astype(np.uint64)

    def run(self, seconds: float, steps_a_second: float) -> float:
        """Milliseconds of a step, without the pauses between steps."""
        began, steps, busy_s = time.perf_counter(), 0, 0.0
        while (now := time.perf_counter()) - began < seconds:
            self._step(self._batches[steps % _NUM_BATCHES])
            busy_s += time.perf_counter() - now
            steps += 1
            time.sleep(max(0.0, began + steps / steps_a_second - time.perf_counter()))
        return busy_s / steps * 1000

    def _step(self, ids: NDArray[np.uint64]) -> None:
        _, batch = self.bags.lookup(ids, self._lengths, train=True)
        self.bags.update(batch, self._gradients)


class Watcher:
    """Notes when packets appear."""

    def __init__(self, log: PacketLog) -> None:
        self.ages: list[float] = []
        self.rows: list[int] = []
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        seen = None
        while not self._stop.wait(0.02):
            newest = self._log.newest()
            if newest is None or newest == seen:
                continue
            now, seen, packet = time.time(), newest, self._log.read(newest)
            if packet.num_rows > 0:
                self.ages.append(now - packet.changed_after)
                self.rows.append(packet.num_rows)


def run_with_packets(
    trainer: Trainer, config: GlobalConfig, seconds: float, steps_a_second: float
) -> tuple[float, Watcher]:
    settings = IncrementalSettings.of(config)
    assert settings is not None, "enabled"
    share = ServerShare(store=trainer.bags.store, index=0, replicas=1, schema=None, num_threads=2)
    peers = [LocalPeer(CheckpointService(share, ServerChanges.of(trainer.bags.store, settings)))]
    writer = PacketWriter(lambda: peers, deadline_s=60, step=lambda: 0)
    writer.offer_dense(0, lambda: b"")
    watcher = Watcher(PacketLog(settings.directory))
    writer.start()
    step_ms = trainer.run(seconds, steps_a_second)
    watcher.close()
    writer.close(None)
    return step_ms, watcher


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    slots = parse_embedding_config({"slots_config": {"item": {"dim": arguments.dim}}})
    trainer = Trainer(slots, arguments.rows, arguments.dim)
    steps_ms: dict[str, list[float]] = {way: [] for way in _WAYS}
    pace = (arguments.seconds, arguments.steps_per_second)
    ages: list[float] = []
    rows: list[int] = []
    for repeat in range(arguments.repeats):
        for way in _WAYS:
            if way == "packets":
                keys = {"enable_incremental_update": True, "incremental_dir": str(directory / str(repeat))}
                config = parse_global_config({"embedding_parameter_server_config": keys})
                step_ms, watcher = run_with_packets(trainer, config, *pace)
                ages, rows = ages + watcher.ages, rows + watcher.rows
            else:
                trainer.bags.store.track_changes(0 if way == "off" else 2_000_000)
                step_ms = trainer.run(*pace)
            steps_ms[way].append(step_ms)
    medians = {way: statistics.median(values) for way, values in steps_ms.items()}
    return {
        "store_ms_of_a_step": {way: round(value, 3) for way, value in medians.items()},
        "packets": len(ages),
        "rows_a_packet": round(statistics.median(rows)) if rows else None,
        "age_s": {"median": round(statistics.median(ages), 2), "max": round(max(ages), 2)} if ages else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=whole(1), default=1_000_000)
    parser.add_argument("--dim", type=dim, default=32)
    parser.add_argument("--seconds", type=number(above=0), default=10.0, help="of each run")
    parser.add_argument(
        "--steps-per-second", type=number(above=0), default=50.0, help=f"of {_BATCH} IDs each"
    )
    parser.add_argument("--repeats", type=whole(1), default=3)
    parser.add_argument("--directory", type=folder, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        print(json.dumps(measure(arguments, Path(directory)), indent=1))


if __name__ == "__main__":
    main()
