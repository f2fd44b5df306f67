"""Floors that are not a ratio of two rates: memory a row, and RPC beside a bare socket."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cases import STATE_FLOATS, Case
from benchmarks.runner import Result

__all__ = ["Limit", "memory_limits", "parse_rpc_bench", "rpc_limits", "run_rpc_bench"]

_MAX_OVERHEAD_BYTES = 32.0  # a row, beyond embedding and optimizer state
_MAX_REPORT_ERROR = 0.05
_MIN_JUDGED_ROWS = 1_000_000  # below, a process's other memory moves more than the rows weigh
_RPC_DEADLINE_S = 600.0
_MEBIBYTE = 1 << 20
_RPC_COLUMNS = 6  # bytes, placement, bare us, rpc us, time ratio, speed ratio


@dataclasses.dataclass(frozen=True)
class Limit:
    """A figure and its bound. `at_most`: the figure must not exceed the bound; else it must reach it."""

    name: str
    figure: float
    bound: float
    at_most: bool

    @property
    def is_kept(self) -> bool:
        return self.figure <= self.bound if self.at_most else self.figure >= self.bound


def memory_limits(results: Sequence[Result]) -> list[Limit]:
    """What our side's processes weighed after they were filled, where that is enough to be measured."""
    limits: dict[str, Limit] = {}
    for result in results:
        for case, side in (
            (result.comparison.ours, result.ours),
            (result.comparison.theirs, result.theirs),
        ):
            if side.counters.get("filled_rows", 0) >= _MIN_JUDGED_ROWS:
                for limit in _memory_limits_of(case, result.malloc, side.counters):
                    limits[limit.name] = limit
    return list(limits.values())


def _memory_limits_of(case: Case, malloc: str, counters: dict[str, float]) -> Iterator[Limit]:
    rows = counters["filled_rows"]
    where = f"{rows:.2g} rows, dim {case.dim}, {case.optimizer}, {malloc} malloc"
    needed = 4 * (case.dim * (1 + STATE_FLOATS[case.optimizer]) + (case.optimizer == "rowwise_adagrad"))
    overhead = counters["rss_growth_bytes"] / rows - needed
    yield Limit(f"bytes a row beyond embedding and state: {where}", overhead, _MAX_OVERHEAD_BYTES, True)
    if "reported_bytes" in counters:
        error = abs(counters["reported_bytes"] / counters["rss_growth_bytes"] - 1)
        yield Limit(f"reported bytes beside RSS, error: {where}", error, _MAX_REPORT_ERROR, True)


def run_rpc_bench(program: Path) -> list[Limit]:
    """Runs the native `rpc_bench`, which measures both sides in turns, and judges its figures.

    Raises:
        subprocess.SubprocessError: it failed, or took too long.
        ValueError: it printed no figures that are understood.
    """
    done = subprocess.run([program], capture_output=True, text=True, check=True, timeout=_RPC_DEADLINE_S)
    return rpc_limits(parse_rpc_bench(done.stdout))


def parse_rpc_bench(text: str) -> list[tuple[int, str, float, float]]:
    """(bytes, placement of the two ends, microseconds of the bare socket, of the RPC) per printed line.

    Raises:
        ValueError: there is no such line.
    """
    lines = []
    for line in text.splitlines():
        words = line.split()
        # The placement may be of two words; the figures stand at fixed places from the end.
        if len(words) >= _RPC_COLUMNS and words[0].isdigit():
            lines.append((int(words[0]), " ".join(words[1:-4]), float(words[-4]), float(words[-3])))
    if not lines:
        raise ValueError(f"no figures in the output of rpc_bench: {text[:200]!r}")
    return lines


def rpc_limits(lines: Sequence[tuple[int, str, float, float]]) -> list[Limit]:
    """1 MiB each way: speed over the bare echo's; 64 bytes: time over it."""
    limits = []
    for size_bytes, placement, bare_us, rpc_us in lines:
        if size_bytes == _MEBIBYTE:
            limits.append(Limit(f"RPC speed over bare, 1 MiB, {placement}", bare_us / rpc_us, 0.6, False))
        elif size_bytes == 64:
            limits.append(Limit(f"RPC time over bare, 64 B, {placement}", rpc_us / bare_us, 2.0, True))
    return limits
