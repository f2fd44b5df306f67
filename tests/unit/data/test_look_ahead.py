"""The bound of lookups ahead of the loop, in a model of the time that lookups and steps take."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest

from persia.pipeline.staleness import LookAhead


def train(
    look_ahead: LookAhead, lookup_ms: Iterable[float], step_ms: float, num_steps: int
) -> Iterator[tuple[int, float]]:
    """The bound after each step, and how long the loop waited before it. Lookups do not slow each other."""
    durations = iter(lookup_ms)
    now, done_at, was_held = 0.0, [next(durations)], [False]
    for step in range(num_steps):
        is_ready = done_at[step] <= now
        next_is_ready = step + 1 < len(done_at) and done_at[step + 1] <= now
        bound = look_ahead.took(was_held=was_held[step], is_ready=is_ready, next_is_ready=next_is_ready)
        for _ in range(step + 1 + bound - len(done_at)):  # those that the bound has held back begin now
            done_at.append(now + next(durations))
            was_held.append(True)
        waited_ms = max(0.0, done_at[step] - now)
        now += waited_ms + step_ms
        yield bound, waited_ms


@pytest.mark.parametrize(
    ("lookup_ms", "bound"), [(0.5, 1), (1.0, 1), (1.5, 2), (9.5, 10), (63.5, 64), (200.0, 64)]
)
def test_it_settles_at_the_time_of_a_lookup_by_that_of_a_step(lookup_ms: float, bound: int) -> None:
    steps = list(train(LookAhead(64), itertools.repeat(lookup_ms), 1.0, 2_000))
    assert {bound for bound, _ in steps[-100:]} == {bound}
    if bound < 64:
        assert sum(waited_ms for _, waited_ms in steps[-100:]) == 0


def test_it_shrinks_when_lookups_become_faster() -> None:
    durations = itertools.chain(itertools.repeat(30.0, 500), itertools.repeat(0.5))
    bounds = [bound for bound, _ in train(LookAhead(64), durations, 1.0, 3_000)]
    assert max(bounds) >= 30
    assert bounds[-1] == 1


def test_rare_slow_lookups_cost_little() -> None:
    """One in 16 takes 8 steps: the bound does not fall between them, and the loop seldom waits."""
    durations = itertools.cycle([8.0, *itertools.repeat(0.5, 15)])
    steps = list(train(LookAhead(64), durations, 1.0, 4_000))[1_000:]
    assert sum(waited_ms for _, waited_ms in steps) < 0.01 * len(steps)
    assert max(bound for bound, _ in steps) <= 8
