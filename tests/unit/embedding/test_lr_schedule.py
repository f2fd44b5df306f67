"""Schedulers of torch for the embeddings' learning rate. What they do to rows is in tests/numerics."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from persia.embedding.lr_schedule import LRSchedule
from persia.embedding.optim import SGD
from persia.errors import InvalidTypeError


def test_a_plateau_needs_its_metric() -> None:
    optimizer = SGD(1.0)
    schedule = LRSchedule(optimizer, lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0))
    with pytest.raises(InvalidTypeError, match="metrics"):
        schedule.step()
    for loss in (1.0, 1.0, 1.0):
        schedule.step(loss)
    assert optimizer.lr == 0.25


def test_state_goes_on_where_it_was_taken() -> None:
    first = LRSchedule(SGD(1.0), lambda o: StepLR(o, step_size=2, gamma=0.5))
    for _ in range(3):
        first.step()
    optimizer = SGD(1.0)
    second = LRSchedule(optimizer, lambda o: StepLR(o, step_size=2, gamma=0.5))
    second.load_state_dict(first.state_dict())
    assert optimizer.lr == 0.5
    second.step()
    assert optimizer.lr == 0.25


def test_optimizers_and_schedulers_of_another_kind_are_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"persia\.embedding\.optim"):
        LRSchedule(torch.optim.SGD([torch.zeros(1)]), lambda o: ExponentialLR(o, 0.9))  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="LRScheduler"):
        LRSchedule(SGD(1.0), lambda o: o)  # type: ignore[arg-type, return-value]
