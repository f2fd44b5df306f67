"""From samples to the figures of the table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

__all__ = ["Ratio", "Summary", "median_interval", "paired_ratio", "summarize"]


@dataclasses.dataclass(frozen=True)
class Summary:
    """The median of some samples, and half their range relative to it (0.1 is "within 10 %")."""

    median: float
    spread: float


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, with the smallest and the largest."""

    median: float
    least: float
    most: float


def summarize(samples: Sequence[float]) -> Summary:
    """
    Raises:
        ValueError: no samples, or one that is not positive.
    """
    _check(samples)
    median = statistics.median(samples)
    return Summary(median, (max(samples) - min(samples)) / 2 / median)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ratios of samples taken one right after the other, so that what slows the machine down for seconds
    slows both and cancels out.

    Raises:
        ValueError: the lengths differ, or as for `summarize`.
    """
    _check(ours)
    _check(theirs)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and between which two values it lies with a confidence of 95 %."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * count**0.5  # 1.96 standard deviations of Binomial(count, 1/2)
    low, high = int(max(count / 2 - reach, 0)), int(min(count / 2 + reach, count - 1))
    return statistics.median(ordered), ordered[low], ordered[high]


def _check(samples: Sequence[float]) -> None:
    if not samples or min(samples) <= 0:
        raise ValueError(f"samples must be positive and not empty, not {list(samples)!r}")
