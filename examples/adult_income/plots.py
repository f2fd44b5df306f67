"""Draws loss, AUC, batches in flight and throughput of a run from its history.

python plots.py build/demo/history.jsonl build/demo/curves.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # Before pyplot: the picture goes to a file, also where there is no display.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from history import Series, read_history

PUBLISHED_AUC = 0.8928645  # Published for Adult on CPU, reproducible mode, staleness 1.
SMOOTHING_STEPS = 10
BLUE, ORANGE, GREEN, VIOLET, GREY = "#2f6db3", "#d9772b", "#3a8f5c", "#7d5ba6", "#7a7a7a"


def draw(history: Path, picture: Path, dataset: str, best_auc: float | None = None) -> None:
    """Writes a PNG of four panels; `best_auc` is the level to reach on generated data."""
    curves = read_history(history)
    figure, panels = plt.subplots(2, 2, figsize=(11, 7.2), sharex=True, layout="constrained")
    _draw_loss(panels[0, 0], curves.get("loss", Series()))
    _draw_auc(panels[0, 1], curves.get("test_auc", Series()), dataset, best_auc)
    _draw_in_flight(panels[1, 0], curves.get("staleness", Series()))
    _draw_throughput(panels[1, 1], curves.get("samples_per_second", Series()))
    for axes in panels.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.02)
    for axes in panels[1]:
        axes.set_xlabel("training step (batch of 128 samples)")
    name = "adult income" if dataset == "adult" else "generated data (not Adult)"
    figure.suptitle(f"{name}: one pass through the pipeline", fontsize=14, fontweight="bold")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def _draw_loss(axes: Axes, loss: Series) -> None:
    axes.set_title("Training loss")
    axes.set_ylabel("binary cross entropy (nats)")
    axes.plot(loss.steps, loss.values, color=BLUE, alpha=0.3, linewidth=1, label="each batch")
    axes.plot(
        loss.steps, _smooth(loss.values), color=BLUE, linewidth=2, label=f"mean of {SMOOTHING_STEPS} batches"
    )
    if loss.values:
        axes.legend(loc="upper right", frameon=False)


def _draw_auc(axes: Axes, auc: Series, dataset: str, best_auc: float | None) -> None:
    axes.set_title("Test AUC")
    axes.set_ylabel("area under the ROC curve")
    axes.plot(auc.steps, auc.values, color=ORANGE, marker="o", linewidth=2, label="this run")
    if auc.values:
        last = (auc.steps[-1], auc.values[-1])
        axes.annotate(f"{last[1]:.4f}", last, (0, 8), textcoords="offset points", ha="right", color=ORANGE)
    if dataset == "adult":
        axes.axhline(PUBLISHED_AUC, color=GREY, linestyle="--", label=f"published: {PUBLISHED_AUC}")
    elif best_auc is not None:
        axes.axhline(best_auc, color=GREY, linestyle="--", label=f"best possible: {best_auc:.4f}")
    axes.margins(y=0.15)
    axes.legend(loc="lower right", frameon=False)


def _draw_in_flight(axes: Axes, in_flight: Series) -> None:
    axes.set_title("In flight: from lookup to acknowledged update")
    axes.set_ylabel("batches")
    axes.plot(in_flight.steps, in_flight.values, color=VIOLET, linewidth=1.5, drawstyle="steps-mid")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)


def _draw_throughput(axes: Axes, throughput: Series) -> None:
    axes.set_title("Throughput")
    axes.set_ylabel("samples per second")
    axes.plot(throughput.steps, throughput.values, color=GREEN, linewidth=1.5)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value else "0"))


def _smooth(values: list[float]) -> list[float]:
    """Mean of the last SMOOTHING_STEPS values, of fewer at the start."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - SMOOTHING_STEPS, 0)
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist() if values else []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("history", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dataset", choices=("adult", "generated"), default="adult")
    arguments = parser.parse_args()
    draw(arguments.history, arguments.picture, arguments.dataset)
    return 0


if __name__ == "__main__":
    sys.exit(main())
