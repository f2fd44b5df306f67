"""What `python -m benchmarks.tiers` prints, keeps and draws."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.tiers.turns import Comparison

__all__ = ["announced_line", "checkpoint_lines", "comparison_table", "draw_curve", "memory_table", "to_json"]

_MOST_SLOWER = 0.09
_FLOOR_MISSES = (0.10, 0.17)
_MOST_SLOWER_BY_CHECKPOINTS = 0.01
_FLOOR_INTERVAL_S = 60.0
_MOST_BEYOND = 0.10
_LEAST_JUDGED_BYTES = 256 << 20  # beside less, the buffers of batches are not small
_INDEX_BYTES_PER_ROW = 41  # at most; docs/tiers.md


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(title="rows in a pool beside rows in memory, ms a step", title_justify="left")
    for heading in ("job", "cache", "in memory", "pool", "slower", "range", "misses", "of IDs", ""):
        table.add_column(heading, justify="left" if heading == "job" else "right", no_wrap=True)
    for comparison in comparisons:
        ratio = comparison.ratio
        table.add_row(
            comparison.name,
            f"{comparison.cache:.3g}",
            f"{statistics.median(comparison.theirs):.2f}",
            f"{statistics.median(comparison.ours):.2f}",
            f"{ratio.median - 1:+.1%}",
            f"{ratio.least - 1:+.1%} to {ratio.most - 1:+.1%}",
            f"{comparison.miss_share:.1%}",
            f"{comparison.miss_share_of_ids:.1%}",
            _verdict(comparison),
        )
    table.caption = (
        "misses: rows that came from the pool, of those that batches name, each counted once; floor: at most "
        f"{_MOST_SLOWER:.0%} slower with {_FLOOR_MISSES[0]:.0%} to {_FLOOR_MISSES[1]:.0%} of misses"
    )
    return table


def _verdict(comparison: Comparison) -> str:
    least, most = _FLOOR_MISSES
    if not (least <= comparison.miss_share <= most or least <= comparison.miss_share_of_ids <= most):
        return "no floor"
    return "pass" if comparison.ratio.median - 1 <= _MOST_SLOWER else "miss"


def checkpoint_lines(comparison: Comparison) -> list[str]:
    """Of one checkpoint a turn."""
    seconds, rounds = comparison.counts["turn_seconds"], len(comparison.ours)
    slower, ratio = comparison.ratio.median - 1, comparison.ratio
    each_minute = slower * seconds / _FLOOR_INTERVAL_S
    verdict = "pass" if each_minute <= _MOST_SLOWER_BY_CHECKPOINTS else "miss"
    return [
        f"one checkpoint in {seconds:.1f} s: {slower:+.2%} ({ratio.least - 1:+.2%} to {ratio.most - 1:+.2%}) "
        f"slower, {slower * seconds * 1e3:.0f} ms each",
        f"so every {_FLOOR_INTERVAL_S:.0f} s: {each_minute:+.2%}; floor {_MOST_SLOWER_BY_CHECKPOINTS:.0%}: "
        f"{verdict}",
        f"asking took {comparison.counts['asking_seconds'] / rounds * 1e3:.1f} ms; committed before the turn "
        f"ended: {comparison.counts['num_committed']:.0f} of {rounds}",
    ]


def announced_line(comparison: Comparison) -> str:
    """Of `compare` where the first job announces nothing."""
    ratio, counts = comparison.ratio, comparison.counts
    ours, theirs = statistics.median(comparison.ours), statistics.median(comparison.theirs)
    ahead = counts["num_prefetched"] / max(counts["num_missed"], 1)
    return (
        f"{comparison.name}, cache {comparison.cache:.3g}: {ours:.1f} ms a step announced, {theirs:.1f} not: "
        f"{ratio.median:.2f} times as long ({ratio.least:.2f} to {ratio.most:.2f}); "
        f"{comparison.miss_share:.1%} of the rows came from the pool, {ahead:.0%} of them ahead"
    )


def memory_table(memories: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="memory of processes, grown by their rows, in MB", title_justify="left")
    for heading in (
        "kind",
        "cache",
        "rows",
        "cached rows",
        "index",
        "resident",
        "beyond",
        "beyond cache alone",
        "",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for memory in memories:
        cache, index = memory["cache_bytes"], memory["num_rows"] * _INDEX_BYTES_PER_ROW
        beyond = memory["resident_bytes"] / (cache + index) - 1
        table.add_row(
            memory["kind"],
            f"{memory['cache']:.3g}",
            f"{memory['num_rows']:,}",
            *(f"{size / 1e6:.1f}" for size in (cache, index, memory["resident_bytes"])),
            f"{beyond:+.1%}",
            f"{memory['resident_bytes'] / cache - 1:+.1%}",
            _verdict_on_memory(cache + index, beyond),
        )
    table.caption = (
        f"index: {_INDEX_BYTES_PER_ROW} bytes for each row, cached or not; floor: at most {_MOST_BEYOND:.0%} "
        "beyond both"
    )
    return table


def _verdict_on_memory(expected_bytes: int, beyond: float) -> str:
    if expected_bytes < _LEAST_JUDGED_BYTES:
        return "no floor"
    return "pass" if beyond <= _MOST_BEYOND else "miss"


def to_json(comparisons: Sequence[Comparison], memories: Sequence[dict[str, Any]], command: str) -> str:
    report = {
        "command": command,
        "machine": describe_machine(),
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons],
        "memory": list(memories),
    }
    return json.dumps(report, indent=1)


def draw_curve(path: Path, title: str, comparisons: Sequence[Comparison], batch_size: int) -> None:
    """Throughput and misses over the size of the cache, for the variants of `comparisons`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    misses = axes.twinx()
    for number, name in enumerate(dict.fromkeys(comparison.name for comparison in comparisons)):
        chosen = sorted((c for c in comparisons if c.name == name), key=lambda c: c.cache)
        caches = [100 * comparison.cache for comparison in chosen]
        rates = [[batch_size / ms for ms in comparison.ours] for comparison in chosen]
        middle = [statistics.median(some) for some in rates]
        spread = [
            [rate - min(some) for rate, some in zip(middle, rates, strict=True)],
            [max(some) - rate for rate, some in zip(middle, rates, strict=True)],
        ]
        colour = f"C{number}"
        axes.errorbar(caches, middle, yerr=spread, label=name, color=colour, marker="o", capsize=3)
        in_memory = statistics.median(batch_size / ms for comparison in chosen for ms in comparison.theirs)
        axes.axhline(in_memory, color=colour, linestyle=":", label=f"{name}, all rows in memory")
    misses.plot(
        caches, [100 * c.miss_share for c in chosen], color="grey", linestyle="--", marker="s", label="misses"
    )
    axes.set_xscale("log")
    axes.set_xticks(caches, [f"{cache:g}" for cache in caches])
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_xlabel("cache, % of the rows")
    axes.set_ylabel("thousand samples/s, median and range")
    misses.set_ylabel("misses, % of the rows that batches name")
    axes.set_ylim(bottom=0)
    misses.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot.savefig(path, dpi=120)
    pyplot.close("all")
