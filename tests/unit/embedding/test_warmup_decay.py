"""NVIDIA's schedule: the formula's values, and the rates that dense and sparse optimizers get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from persia.embedding.lr_schedule import LRSchedule, WarmupPolynomialDecay
from persia.embedding.optim import SGD
from persia.errors import InvalidArgumentError


def factors(schedule: WarmupPolynomialDecay, steps: int) -> list[float]:
    return [schedule(step) for step in range(steps)]


def test_values_by_hand() -> None:
    schedule = WarmupPolynomialDecay(4, decay_start_step=6, decay_steps=4, end=0.1)
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 0.75**2, 0.5**2, 0.1, 0.1, 0.1, 0.1]
    assert factors(schedule, 12) == expected
    # With a warm-up factor of 1 the first of 4 steps is 1 - 3 / 8.
    assert factors(WarmupPolynomialDecay(4, 1, decay_steps=0), 5) == [0.625, 0.75, 0.875, 1, 1]
    assert factors(WarmupPolynomialDecay(2, decay_start_step=None, decay_steps=2, decay_power=1), 5) == [
        *(0.5, 1, 0.5, 0, 0),
    ]
    assert factors(WarmupPolynomialDecay(0, decay_start_step=0, decay_steps=0), 3) == [1, 1, 1]


def test_dense_and_sparse_rates_are_equal() -> None:
    schedule = WarmupPolynomialDecay(3, decay_start_step=5, decay_steps=4)
    dense = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=24)
    sparse = SGD(lr=24)
    both: list[Any] = [LambdaLR(dense, schedule), LRSchedule(sparse, lambda o: LambdaLR(o, schedule))]
    for step in range(11):
        assert dense.param_groups[0]["lr"] == sparse.lr == pytest.approx(24 * schedule(step))
        dense.step()
        for one in both:
            one.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"warmup_steps": 10, "decay_start_step": 9},
            "decay_start_step=9 is before the end of the warm-up, step 10",
        ),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"decay_power": -2}, "decay_power=-2 must be at least 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        WarmupPolynomialDecay(**arguments)
