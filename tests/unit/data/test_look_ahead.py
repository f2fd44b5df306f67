"""The bound of lookups ahead of the loop, in a model of the time that lookups and steps take."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest

from persia.pipeline.staleness import LookAhead

STEP_MS = 1.0


def train(
    look_ahead: LookAhead, lookup_ms: Iterable[float], num_steps: int, num_at_a_time: int = 1000
) -> Iterator[tuple[int, float]]:
    """The bound after each step, and how long the loop waited before it.

    `num_at_a_time`: lookups that the servers work on; others wait for them.
    """
    durations = iter(lookup_ms)
    now, lookups = 0.0, list[tuple[float, float]]()  # when each began, and when it was done

    def look_up() -> None:
        busy = sorted((done for _, done in lookups), reverse=True)[:num_at_a_time]
        start = max(now, busy[-1]) if len(busy) == num_at_a_time else now
        lookups.append((now, start + next(durations)))

    look_up()
    for step in range(num_steps):
        begun, done = lookups[step]
        waited_ms = max(0.0, done - now)
        now += waited_ms
        bound = look_ahead.took(now / 1e3, (done - begun) / 1e3)
        while len(lookups) < step + 1 + bound:  # those that the bound has held back begin now
            look_up()
        now += STEP_MS
        yield bound, waited_ms


@pytest.mark.parametrize(
    ("lookup_ms", "bound"), [(0.5, 4), (1.5, 5), (9.5, 13), (40.5, 44), (63.5, 64), (200.0, 64)]
)
def test_it_is_the_time_of_a_lookup_by_that_of_a_step_and_three_more(lookup_ms: float, bound: int) -> None:
    steps = list(train(LookAhead(64), itertools.repeat(lookup_ms), 5_000))
    assert {bound for bound, _ in steps[-100:]} == {bound}
    if lookup_ms < 64 * STEP_MS:
        assert sum(waited_ms for _, waited_ms in steps[-100:]) == pytest.approx(0, abs=1e-6)


def test_it_shrinks_when_lookups_become_faster() -> None:
    durations = itertools.chain(itertools.repeat(30.0, 500), itertools.repeat(0.5))
    bounds = [bound for bound, _ in train(LookAhead(64), durations, 1_000)]
    assert max(bounds) >= 30
    assert bounds[-1] == 4


def test_lookups_that_wait_for_each_other_do_not_begin_earlier() -> None:
    """The servers are slower than the loop: earlier lookups would only wait longer."""
    steps = list(train(LookAhead(64), itertools.repeat(2.0), 1_000, num_at_a_time=1))
    assert max(bound for bound, _ in steps) <= 8


def test_it_grows_when_lookups_become_slower() -> None:
    durations = itertools.chain(itertools.repeat(0.5, 500), itertools.repeat(9.5))
    steps = list(train(LookAhead(64), durations, 10_000))
    assert steps[-1][0] >= 10
    assert sum(waited_ms for _, waited_ms in steps[-100:]) == pytest.approx(0, abs=1e-6)


def test_a_bound_below_its_start_holds() -> None:
    assert {bound for bound, _ in train(LookAhead(2), itertools.repeat(9.0), 200)} == {2}
