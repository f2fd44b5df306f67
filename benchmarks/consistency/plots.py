"""AUC by mode, with its spread, and throughput by delay; one picture a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # the pictures go to files, also where there is no display

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.consistency.plan import MODES, PLAIN
from benchmarks.consistency.results import Result
from benchmarks.consistency.verdicts import Cell, Key, cells

__all__ = ["draw"]

_ORDER = (PLAIN, *MODES)


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes DATASET.png for every data set with results; their paths."""
    table = cells(results)
    paths = []
    for dataset in dict.fromkeys(key[0] for key in table):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
        _draw_auc(left, dataset, table)
        _draw_speed(right, dataset, table)
        figure.suptitle(dataset, fontweight="bold")
        paths.append(folder / f"{dataset}.png")
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def _draw_auc(axes: Axes, dataset: str, table: dict[Key, Cell]) -> None:
    delays = sorted({key[2] for key in table if key[0] == dataset})
    for number, delay in enumerate(delays):
        found = [
            (place, table[key])
            for place, mode in enumerate(_ORDER)
            if (key := (dataset, mode.name, delay)) in table
        ]
        axes.errorbar(
            [place + 0.15 * (number - (len(delays) - 1) / 2) for place, _ in found],
            [cell.auc for _, cell in found],
            yerr=[cell.auc_spread or 0.0 for _, cell in found],
            fmt="o",
            capsize=3,
            label=f"{delay:g} ms",
        )
    axes.set_xticks(range(len(_ORDER)), [mode.name for mode in _ORDER], rotation=30, ha="right")
    axes.set_title("Test AUC: mean and standard deviation over seeds")
    axes.grid(alpha=0.3)
    axes.legend(title="added round trip")


def _draw_speed(axes: Axes, dataset: str, table: dict[Key, Cell]) -> None:
    for mode in MODES:
        found = sorted(
            (delay, cell) for (name, of, delay), cell in table.items() if (name, of) == (dataset, mode.name)
        )
        if not found:
            continue
        rates = [cell.rate for _, cell in found]
        below = [cell.rate - min(cell.rates) for _, cell in found]
        above = [max(cell.rates) - cell.rate for _, cell in found]
        delays = [delay for delay, _ in found]
        axes.errorbar(delays, rates, yerr=[below, above], marker="o", capsize=3, label=mode.name)
    plain = table.get((dataset, PLAIN.name, 0.0))
    if plain is not None:
        axes.axhline(plain.rate, color="grey", linestyle="--", label=f"{PLAIN.name} (no network)")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("added round trip, ms")
    axes.set_title("Samples per second: median and range")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the lines, not on them
