"""The curves: rates by dim, batch size, table size, threads, and with eviction."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.runner import Result, Side

__all__ = ["draw_curves"]

_MALLOC_STYLES = {"default": ":", "tuned": "-"}
_Curves = dict[tuple[str, str], dict[float, list[float]]]  # (label, malloc) -> x -> samples


def draw_curves(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes one PNG per curve that `results` have at least one figure for; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = [
        ("dim_adagrad", "Training step by dim, Adagrad", "train/adagrad/", "dim"),
        ("dim_rowwise_adagrad", "Training step by dim, row-wise Adagrad", "train/rowwise_adagrad/", "dim"),
        ("dim_adam", "Training step by dim, Adam", "train/adam/", "dim"),
        ("batch_size", "Training step by batch size, Adagrad, dim 16", "batch-size/", "samples a batch"),
        ("rows", "Training step by rows in the table, the same traffic, Adagrad, dim 8", "rows/", "rows"),
    ]
    paths = []
    for name, title, prefix, axis in pages:
        curves = _curves(results, prefix)
        if curves:
            paths.append(_line_page(folder / f"{name}.png", title, axis, curves))
    for name, title, prefix, labels in (
        ("threads", "One thread and two", "threads/", ("2 threads", "1 thread")),
        ("eviction", "30 % new IDs a batch", "eviction/30%-new/", ("at capacity", "unbounded")),
    ):
        chosen = [result for result in _with_prefix(results, prefix) if result.ours.samples]
        if chosen:
            paths.append(_bar_page(folder / f"{name}.png", title, labels, chosen))
    return paths


def _with_prefix(results: Sequence[Result], prefix: str) -> list[Result]:
    return [result for result in results if result.comparison.name.startswith(prefix)]


def _curves(results: Sequence[Result], prefix: str) -> _Curves:
    curves: _Curves = defaultdict(lambda: defaultdict(list))

    def add(side: Side, malloc: str, x: float) -> None:
        if side.samples:
            curves[side.system, malloc][x] += side.samples

    for result in _with_prefix(results, prefix):
        add(result.ours, result.malloc, result.comparison.x)
        same = result.ours.system == result.theirs.system  # sizes: theirs is the smallest table
        add(
            result.theirs,
            result.malloc,
            sum(result.comparison.theirs.table_rows) if same else result.comparison.x,
        )
    return curves


def _line_page(path: Path, title: str, axis: str, curves: _Curves) -> Path:
    _, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    colours: dict[str, str] = {}
    for (system, malloc), points in sorted(curves.items()):
        colour = colours.setdefault(system, f"C{len(colours)}")
        xs = sorted(points)
        axes.errorbar(
            xs,
            [statistics.median(points[x]) / 1e6 for x in xs],
            yerr=_error_bars([points[x] for x in xs]),
            label=f"{system}, {malloc} malloc",
            color=colour,
            linestyle=_MALLOC_STYLES.get(malloc, "-"),
            marker="o",
            linewidth=3 if system == "persia" else 1.5,
            capsize=3,
        )
    axes.set_xscale("log")
    measured = sorted({x for points in curves.values() for x in points})
    axes.set_xticks(measured, [f"{x:.3g}" if x >= 1e6 else f"{x:g}" for x in measured])
    axes.minorticks_off()
    axes.set_xlabel(axis)
    return _finish(path, title, axes)


def _error_bars(samples: Sequence[Sequence[float]]) -> list[list[float]]:
    below = [(statistics.median(some) - min(some)) / 1e6 for some in samples]
    above = [(max(some) - statistics.median(some)) / 1e6 for some in samples]
    return [below, above]


def _bar_page(path: Path, title: str, labels: tuple[str, str], results: Sequence[Result]) -> Path:
    _, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    names = [f"dim {result.comparison.x:g}\n{result.malloc} malloc" for result in results]
    for offset, label, sides in (
        (-0.2, labels[1], [result.theirs for result in results]),
        (0.2, labels[0], [result.ours for result in results]),
    ):
        samples = [side.samples or [0.0] for side in sides]
        axes.bar(
            [index + offset for index in range(len(results))],
            [statistics.median(some) / 1e6 for some in samples],
            width=0.4,
            yerr=_error_bars(samples),
            capsize=3,
            label=label,
        )
    axes.set_xticks(range(len(results)), names)
    return _finish(path, title, axes)


def _finish(path: Path, title: str, axes: Axes) -> Path:
    axes.set_title(title)
    axes.set_ylabel("M IDs/s, median and range")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    pyplot.savefig(path, dpi=120)  # the current figure is the one of `axes`
    pyplot.close("all")
    return path
