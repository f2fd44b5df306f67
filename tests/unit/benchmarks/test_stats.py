"""Medians, spreads and paired ratios."""

from __future__ import annotations

import pytest

from benchmarks.stats import Ratio, Summary, median_interval, paired_ratio, summarize


def test_summary_is_the_median_and_half_the_range() -> None:
    assert summarize([4.0, 1.0, 2.0]) == Summary(median=2.0, spread=0.75)


def test_ratios_are_taken_within_each_turn() -> None:
    # The machine was three times slower in the second turn: the ratio does not see it.
    assert paired_ratio([6.0, 2.0, 7.5], [3.0, 1.0, 3.0]) == Ratio(median=2.0, least=2.0, most=2.5)


def test_the_interval_of_a_median_is_of_order_statistics() -> None:
    # Of 25 values the 8th and the 18th: Binomial(25, 1/2) is within them with 95.7 %.
    values = [float(value) for value in range(25, 0, -1)]
    assert median_interval(values) == (13.0, 8.0, 18.0)
    assert median_interval([2.0]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [-1.0]])
def test_samples_must_be_positive(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        summarize(samples)


def test_turns_must_pair_up() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_ratio([1.0, 2.0], [1.0])
