"""The bound of lookups ahead of the loop, in a model of the time that lookups and steps take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import pytest

from persia.pipeline.staleness import LookAhead


def train(
    lookup_ms: Iterable[float],
    step_ms: Iterable[float],
    num_steps: int,
    *,
    most: int = 64,
    num_at_a_time: int = 1000,
) -> Iterator[tuple[int, float]]:
    """The bound after each step, and how long the loop waited before it.

    `num_at_a_time`: lookups that the servers work on; others wait for them.
    """
    look_ahead = LookAhead(most)
    durations, steps = iter(lookup_ms), iter(step_ms)
    now, lookups = 0.0, list[tuple[float, float]]()  # when each began, and when it was done

    def look_up() -> None:
        busy = sorted((done for _, done in lookups), reverse=True)[:num_at_a_time]
        start = max(now, busy[-1]) if len(busy) == num_at_a_time else now
        lookups.append((now, start + next(durations)))

    look_up()
    for step in range(num_steps):
        begun, done = lookups[step]
        waited_ms = max(0.0, done - now)
        step_ms = next(steps)
        now += waited_ms
        bound = look_ahead.took((done - begun) / 1e3, step_ms / 1e3)
        while len(lookups) < step + 1 + bound:  # those that the bound has held back begin now
            look_up()
        now += step_ms
        yield bound, waited_ms


def waits(steps: list[tuple[int, float]]) -> float:
    return sum(waited_ms for _, waited_ms in steps)


@pytest.mark.parametrize("lookup_ms", [0.5, 1.5, 9.5, 40.5])
def test_it_is_the_time_of_a_lookup_by_that_of_a_step_and_two_more(lookup_ms: float) -> None:
    steps = list(train(itertools.repeat(lookup_ms), itertools.repeat(1.0), 500))
    assert steps[-1][0] == math.ceil(lookup_ms) + 2
    assert waits(steps[1:]) == pytest.approx(
        lookup_ms - 1 if lookup_ms > 1 else 0
    )  # of the first burst alone


def test_it_follows_lookups_that_become_slower_and_faster() -> None:
    slower = itertools.chain(itertools.repeat(0.5, 500), itertools.repeat(20.0, 500), itertools.repeat(0.5))
    bounds = [bound for bound, _ in train(slower, itertools.repeat(1.0), 1_500)]
    assert (bounds[499], bounds[900], bounds[-1]) == (3, 22, 3)


@pytest.mark.parametrize(
    "lookup_ms",
    [itertools.cycle([0.5, 20.0]), itertools.chain([0.5], itertools.repeat(20.0))],
    ids=["a near and a far embedding worker", "one short lookup"],
)
def test_short_lookups_do_not_hide_slow_ones(lookup_ms: Iterable[float]) -> None:
    steps = list(train(lookup_ms, itertools.repeat(2.0), 2_000))
    assert waits(steps[100:]) == 0
    assert steps[-1][0] == 12


def test_the_loop_takes_several_batches_at_once() -> None:
    """As with an accumulation of gradients: the batches that follow at once must be ready, too."""
    step_ms = itertools.cycle([*itertools.repeat(0.0, 7), 100.0])
    steps = list(train(itertools.repeat(20.0), step_ms, 2_000, most=10))
    assert waits(steps[100:]) == 0


def test_a_long_pause_of_the_loop_changes_nothing() -> None:
    step_ms = itertools.cycle([*itertools.repeat(1.0, 99), 2_000.0])
    steps = list(train(itertools.repeat(9.5), step_ms, 2_000))
    assert {bound for bound, _ in steps[200:]} == {12}


def test_lookups_slower_than_the_loop_begin_as_early_as_they_may() -> None:
    steps = list(train(itertools.repeat(2.0), itertools.repeat(1.0), 1_000, num_at_a_time=1))
    assert steps[-1][0] == 64
