"""Preprocessing by one worker of a cluster beside two: `python -m benchmarks.preprocessing --engine spark`.

Each worker is pinned to a core of its own. Other work of the machine delays it, but does not change what it
does. So besides samples/s of wall time there are those of a second of processor time of the average worker:
an idle worker takes the next block, so that on a quiet machine both are equally busy.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from typing_extensions import Self

from benchmarks.engine_clusters import CLUSTERS
from benchmarks.raw_clicks import write_clicks

_COPIES = 8  # of the rows, as making them up is slow
_MARK = "PERSIA_BENCHMARK_WORKERS"  # in the environment of our processes: others may be pinned, too


class _CoreClock:
    """Samples the processor seconds of our processes that are pinned to one core, by core."""

    def __init__(self, interval_s: float = 0.1) -> None:
        self._samples: list[tuple[float, dict[int, float]]] = []
        self._seconds: dict[str, tuple[int, float]] = {}  # by process: its core, and what it has used
        self._interval_s, self._is_over = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> dict[int, float]:
        """The seconds of each core between two times of `time.time()`."""
        first, last = (min(self._samples, key=lambda sample: abs(sample[0] - at))[1] for at in (begin, end))
        return {core: seconds - first.get(core, 0.0) for core, seconds in last.items()}

    def _run(self) -> None:
        tick = os.sysconf("SC_CLK_TCK")
        while not self._is_over.wait(self._interval_s):
            for name in filter(str.isdecimal, os.listdir("/proc")):
                with suppress(OSError, IndexError):  # it has ended, or is of another user
                    cores = os.sched_getaffinity(int(name))
                    if len(cores) == 1 and _MARK.encode() in Path(f"/proc/{name}/environ").read_bytes():
                        words = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                        self._seconds[name] = (min(cores), (int(words[11]) + int(words[12])) / tick)
            total: dict[int, float] = {}
            for core, seconds in self._seconds.values():  # those of ended processes stay
                total[core] = total.get(core, 0.0) + seconds
            self._samples.append((time.time(), total))


def compare_workers(engine: str, num_rows: int, rounds: int) -> None:
    """Prints samples/s with one worker and with two, in turns, and their ratios."""
    os.environ |= {
        _MARK: "1",
        "OMP_NUM_THREADS": "1",
        "ARROW_NUM_THREADS": "1",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "RAY_worker_niceness": "0",  # else other work of the machine goes first
    }
    rates: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_clicks(folder / "part_0", num_rows // _COPIES)
        (folder / "day_0").write_bytes((folder / "part_0").read_bytes() * _COPIES)
        for turn in range(rounds):
            for count, found in rates.items():
                made = folder / f"{turn}_{count}"
                made.mkdir()
                with CLUSTERS[engine](made, count, pinned=True) as address, _CoreClock() as clock:
                    found.append(
                        _rates(folder / "day_0", made / "output", engine, address, num_rows, count, clock)
                    )
                wall, busy = found[-1]
                print(
                    f"{engine}, workers: {count}, samples/s: {wall:,.0f} of wall time, {busy:,.0f} of the "
                    "average worker's processor time",
                    flush=True,
                )
    for place, what in enumerate(("wall time", "the average worker's processor time")):
        ratios = [two[place] / one[place] for one, two in zip(*rates.values(), strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"two workers beside one, by {what}: {statistics.median(ratios):.2f} ({spread})")


def _rates(
    input_file: Path, output: Path, engine: str, address: str, num_rows: int, count: int, clock: _CoreClock
) -> tuple[float, float]:
    """Samples a second of wall time, and of the processor time of the average worker.

    Of the last two thirds of the blocks: an application takes seconds to start, and compiles itself for some
    more, whatever the size of the data.
    """
    command = [sys.executable, "-m", "persia.launcher", "preprocess", str(input_file), "--format", "parquet"]
    command += ["--engine", engine, "--address", address, "--output", str(output), "--block-mib", "16"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    written = sorted(path.stat().st_mtime for path in (output / "train").iterdir())
    first = len(written) // 3
    begin, end = written[first], written[-1]
    rows = num_rows * (1 - (first + 1) / len(written))
    return rows / (end - begin), rows / (sum(clock.between(begin, end).values()) / count)
