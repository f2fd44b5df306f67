"""A step whose dense gradients are not finite leaves the model as it is; weights that are not finite reach no
checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from persia.errors import FailedPreconditionError, InvalidArgumentError
from persia.pipeline.gradients import _are_dense_gradients_finite


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def step(ctx: Any, batch: Any, factor: float) -> None:
    output, _ = ctx.forward(ctx.get_embedding_from_data(batch))
    ctx.backward((output * factor).sum())


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_the_step_is_skipped_and_the_next_one_trains(
    make_ctx: Any, model: torch.nn.Module, new_batch: Any, factor: float, log: pytest.LogCaptureFixture
) -> None:
    hooks = []
    with make_ctx(before_dense_step=lambda: hooks.append(1)) as ctx:
        before = parameters(model)
        for _ in range(2):
            step(ctx, new_batch(7), factor)
        assert all(torch.equal(*pair) for pair in zip(before, parameters(model), strict=True))
        assert (ctx.counters.nonfinite_steps, hooks) == (2, [])
        step(ctx, new_batch(7), 1.0)  # with gradients of its own alone
        assert not torch.equal(before[0], parameters(model)[0])
        assert all(torch.isfinite(weight).all() for weight in model.parameters())
    assert (ctx.counters.nonfinite_steps, hooks, ctx.step) == (2, [1], 3)
    assert [r.message.count("have NaN or Inf: the dense model is left") for r in log.records].count(1) == 1


def test_gradients_that_were_added_up_are_skipped_together(
    make_ctx: Any, model: torch.nn.Module, new_batch: Any
) -> None:
    with make_ctx() as ctx:
        before = parameters(model)
        with ctx.accumulate():
            step(ctx, new_batch(7), float("nan"))
        step(ctx, new_batch(8), 1.0)
        assert all(torch.equal(*pair) for pair in zip(before, parameters(model), strict=True))
        assert ctx.counters.nonfinite_steps == 1


def test_steps_in_a_row_end_the_training_and_single_ones_do_not(make_ctx: Any, new_batch: Any) -> None:
    with make_ctx(max_nonfinite_steps=2) as ctx:
        for factor in (float("nan"), 0.0, float("nan"), 0.0):
            step(ctx, new_batch(7), factor)
        step(ctx, new_batch(7), float("nan"))
        message = r"the dense gradients of 2 steps in a row, up to batch 0, have NaN or Inf.*learning rate"
        with pytest.raises(FailedPreconditionError, match=message):
            step(ctx, new_batch(7), float("nan"))
        assert ctx.counters.nonfinite_steps == 4
    with pytest.raises(InvalidArgumentError, match="max_nonfinite_steps"):
        make_ctx(max_nonfinite_steps=0)


def test_large_gradients_are_no_mistake(make_ctx: Any, model: torch.nn.Module, new_batch: Any) -> None:
    with make_ctx() as ctx:
        step(ctx, new_batch(7), 1e30)  # whose squares are infinite
        model.linear.weight.register_hook(lambda gradient: torch.full_like(gradient, 3e38))  # and their sum
        step(ctx, new_batch(7), 1.0)
        assert ctx.counters.nonfinite_steps == 0


@pytest.mark.parametrize(("value", "is_finite"), [(float("nan"), False), (float("inf"), False), (3e38, True)])
def test_sparse_gradients_and_those_of_16_bits(value: float, is_finite: bool) -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    half = torch.nn.Parameter(torch.ones(1000, dtype=torch.float16))
    half.grad = torch.full_like(half, 60_000)  # whose sum no float16 holds
    (table(torch.tensor([1, 1, 2])) * value / 2).sum().backward()
    optimizer = torch.optim.SGD([*table.parameters(), half], lr=0.1)
    assert _are_dense_gradients_finite(optimizer) is is_finite


def test_weights_that_are_not_finite_replace_no_checkpoint(
    make_ctx: Any, model: torch.nn.Module, new_batch: Any, tmp_path: Path
) -> None:
    with make_ctx() as ctx:
        step(ctx, new_batch(7), 1.0)
        model.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))  # as attention has
        model.frozen = torch.nn.Parameter(torch.tensor([float("-inf")]), requires_grad=False)
        ctx.dump_checkpoint(tmp_path / "c")
        good = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()}
        with torch.no_grad():
            model.linear.bias.fill_(float("nan"))  # type: ignore[union-attr, operator]
        with pytest.raises(
            FailedPreconditionError, match=r"linear.bias has NaN or Inf.*load the last checkpoint"
        ):
            ctx.dump_checkpoint(tmp_path / "c")
        assert good == {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()}
        ctx.load_checkpoint(tmp_path / "c")
        assert torch.isfinite(model.linear.bias).all()  # type: ignore[union-attr, arg-type]
