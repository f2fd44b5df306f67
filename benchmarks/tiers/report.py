"""What `python -m benchmarks.tiers` prints, keeps and draws."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.tiers.turns import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["announced_line", "checkpoint_lines", "comparison_table", "draw_curve", "memory_table", "to_json"]

_MOST_SLOWER = 0.09
_FLOOR_MISSES = (0.10, 0.17)
_MOST_SLOWER_BY_CHECKPOINTS = 0.01
_FLOOR_INTERVAL_S = 60.0
_MOST_BEYOND = 0.10
_LEAST_JUDGED_BYTES = 256 << 20  # beside less, the buffers of batches are not small


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
    """Of jobs; one without a limit in bytes is there to be compared with."""
    table = Table(title="memory of rows, in MB", title_justify="left")
    for heading in ("kind", "cache", "rows", "in memory", "limit", "resident", "beyond", "store", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for memory in memories:
        limit, resident = memory["limit_bytes"], memory["resident_bytes"]
        in_memory = f"{memory['num_cached'] / memory['num_rows']:.1%}" if memory["num_cached"] else "all"
        table.add_row(
            memory["kind"],
            f"{memory['cache']:.3g}",
            f"{memory['num_rows']:,}",
            in_memory,
            f"{limit / 1e6:.1f}" if limit else "",
            f"{resident / 1e6:.1f}",
            f"{resident / limit - 1:+.1%}" if limit else "",
            f"{memory['store_bytes'] / 1e6:.1f}" if limit else "",
            _verdict_on_memory(limit, max(resident, memory["store_bytes"])),
        )
    table.caption = (
        "limit: storage.cache_bytes, for rows in memory and the index of all; resident: by what the process "
        "had grown when all rows were there; store: what it says of itself after the turns; floor: at most "
        f"{_MOST_BEYOND:.0%} beyond the limit, both"
    )
    return table


def _verdict_on_memory(limit_bytes: int, taken_bytes: int) -> str:
    if limit_bytes < _LEAST_JUDGED_BYTES:
        return "no floor"
    return "pass" if taken_bytes <= limit_bytes * (1 + _MOST_BEYOND) else "miss"


def to_json(comparisons: Sequence[Comparison], memories: Sequence[dict[str, Any]], command: str) -> str:
    report = {
        "command": command,
        "machine": describe_machine(),
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons],
        "memory": list(memories),
    }
    return json.dumps(report, indent=1)


def draw_curve(
    path: Path,
    title: str,
    comparisons: Sequence[Comparison],
    memories: Sequence[dict[str, Any]],
    batch_size: int,
) -> None:
    """Throughput and misses over the size of the cache, for the variants of `comparisons`.

    Below it, where caches have limits in bytes, what jobs took.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    limited = sorted((m for m in memories if m["limit_bytes"]), key=lambda m: m["cache"])
    heights = [3, 1.4] if limited else [1]
    figure, rows = pyplot.subplots(
        len(heights),
        squeeze=False,
        figsize=(10, 5 + 2 * bool(limited)),
        height_ratios=heights,
        sharex=True,
        layout="constrained",
    )
    _draw_throughput(rows[0][0], comparisons, batch_size)
    rows[0][0].set_title(title)
    if limited:
        _draw_memory(rows[1][0], limited)
    rows[-1][0].set_xlabel(f"cache, % of the rows{' in bytes, the index of all included' if limited else ''}")
    figure.legend(loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot.savefig(path, dpi=120)
    pyplot.close("all")


def _draw_throughput(axes: Axes, comparisons: Sequence[Comparison], batch_size: int) -> None:
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
    axes.set_ylabel("thousand samples/s, median and range")
    misses.set_ylabel("misses, % of the rows that batches name")
    axes.set_ylim(bottom=0)
    misses.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_memory(axes: Axes, memories: Sequence[dict[str, Any]]) -> None:
    caches = [100 * memory["cache"] for memory in memories]
    limits = [memory["limit_bytes"] / 1e6 for memory in memories]
    resident = [memory["resident_bytes"] / 1e6 for memory in memories]
    axes.plot(caches, limits, color="black", linestyle="--", label="configured")
    axes.plot(caches, resident, color="C2", marker="o", label="resident, grown by rows")
    axes.set_ylabel("memory, MB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
