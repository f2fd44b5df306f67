"""The rate of a pipeline: the bounds that it reaches, and the competition for cores that keeps it below."""

from __future__ import annotations

import pytest

from persia.launcher.pipeline_rate import Stage, batches_per_s

LOADER, LOOKUP, LOOP, UPDATE = 0.003, 0.004, 0.010, 0.002


def stages(*, loops: int = 1) -> list[Stage]:
    return [
        Stage(LOADER, threads=1),
        Stage(LOOKUP, pieces=2, has_permit=True),
        Stage(LOOP, threads=loops, has_permit=True),
        Stage(UPDATE, has_permit=True),
    ]


@pytest.mark.parametrize("in_flight", [1, 2, 8])
def test_one_core_does_everything_in_turns(in_flight: int) -> None:
    rate = batches_per_s(stages(), 1.0, in_flight)
    assert 1 / rate == pytest.approx(LOADER + LOOKUP + LOOP + UPDATE, rel=0.02)


def test_the_loop_is_the_limit_with_many_cores() -> None:
    assert 1 / batches_per_s(stages(), 16.0, 8) == pytest.approx(LOOP, rel=0.02)
    assert 1 / batches_per_s(stages(loops=2), 16.0, 8, 2) == pytest.approx(LOOP / 2, rel=0.02)


def test_the_loader_is_the_limit_of_many_ranks() -> None:
    assert 1 / batches_per_s(stages(loops=8), 16.0, 8, 8) == pytest.approx(LOADER, rel=0.02)


def test_one_batch_in_flight_waits_for_each_stage() -> None:
    """Only the loader works beside it; a lookup is divided among two servers."""
    assert 1 / batches_per_s(stages(), 16.0, 1) == pytest.approx(LOOKUP / 2 + LOOP + UPDATE, rel=0.02)


def test_a_loop_that_shares_cores_is_slower_than_either_bound() -> None:
    all_s = LOADER + LOOKUP + LOOP + UPDATE
    batch_s = 1 / batches_per_s(stages(), 1.9, 8)
    assert max(LOOP, all_s / 1.9) < batch_s < all_s


def test_a_stage_without_work_is_left_out() -> None:
    assert batches_per_s([Stage(0.0), *stages()], 1.0, 4) == batches_per_s(stages(), 1.0, 4)
