"""Training through a context: what forward and backward do, and what happens to every batch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.lr_schedule import LRSchedule
from persia.embedding.optim import SGD
from persia.errors import FailedPreconditionError, InvalidTypeError, NotFoundError, PersiaError

MakeCtx = Callable[..., TrainCtx]


def rows_of(ctx: TrainCtx, batch: Any) -> np.ndarray[Any, Any]:
    with eval_ctx() as evaluation:
        tensors = evaluation.get_embedding_from_data(batch).consume_all_id_type_feature_embedding_tensors()
        values: np.ndarray[Any, Any] = torch.stack(tensors).numpy().copy()
        return values


def settled(ctx: TrainCtx) -> bool:
    """The invariant: every batch received has ended in one way."""
    c = ctx.counters
    ended = c.batches_trained + c.batches_evaluated + c.batches_released + c.batches_failed
    return c.batches_received == ended and ctx.staleness.in_flight == 0


def train_all(ctx: TrainCtx, loader: DataLoader) -> None:
    with ctx:
        for batch in loader:
            ctx.backward(ctx.forward(batch)[0].sum())


def test_forward_gives_output_and_labels_in_the_order_of_the_batch(make_ctx: MakeCtx, new_batch: Any) -> None:
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(new_batch(5))
        output, labels = ctx.forward(batch)
        assert output.shape == (3, 1)
        assert [label.shape for label in labels or []] == [(3, 1)]
        assert (batch.batch_size, batch.meta, batch.batch_id) == (3, b"5", 0)
        assert [name for name, _ in batch.leaves] == ["a", "b"]
        assert all(leaf.shape == (3, 4) and leaf.dtype == torch.float32 for _, leaf in batch.leaves)
        with pytest.raises(FailedPreconditionError, match="taken already"):
            ctx.forward(batch)


def test_backward_updates_embeddings_and_model(
    make_ctx: MakeCtx, model: torch.nn.Module, new_batch: Any
) -> None:
    with make_ctx(backward_workers_size=1) as ctx:
        batch = ctx.get_embedding_from_data(new_batch(2))
        before, weights = rows_of(ctx, new_batch(2)), model.linear.weight.detach().clone()
        output, _ = ctx.forward(batch)
        loss = ctx.backward(output.sum())
        assert loss.item() == output.sum().item()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert settled(ctx)
    with make_ctx() as again:
        after = rows_of(again, new_batch(2))
    assert not torch.equal(model.linear.weight, weights)
    # ids {2, i}: the row of id 2 gets the gradient of all three samples and twice that of sample 2.
    gradient = np.stack([weights[0, 1:5].numpy(), weights[0, 5:9].numpy()])
    for sample, times in ((0, 4 + 1), (1, 4 + 1), (2, 4 + 4)):
        np.testing.assert_allclose(
            before[:, sample] - after[:, sample], 0.1 * times * gradient, rtol=1e-4, atol=1e-6
        )


def test_every_batch_is_trained_when_the_context_ends(make_ctx: MakeCtx, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        for batch in DataLoader(make_dataset(25)):
            output, _ = ctx.forward(batch)
            ctx.backward(output.sum())
    assert (ctx.counters.batches_received, ctx.counters.batches_trained) == (25, 25)
    assert settled(ctx)


def test_data_set_can_be_iterated_again_and_sees_no_other_epoch(make_ctx: MakeCtx, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        loader = DataLoader(make_dataset(4), num_workers=3)
        for _ in range(3):
            numbers = []
            for batch in loader:
                numbers.append(batch.meta)
                ctx.backward(ctx.forward(batch)[0].sum())
            assert numbers == [b"0", b"1", b"2", b"3"]
    assert ctx.counters.batches_trained == 12


@pytest.mark.parametrize("staleness", [1, 4])
def test_staleness_is_bounded_and_measured(make_ctx: MakeCtx, make_dataset: Any, staleness: int) -> None:
    with make_ctx(backward_workers_size=1) as ctx:  # updates in order: else one may be overtaken
        for batch in DataLoader(make_dataset(30), embedding_staleness=staleness):
            assert ctx.staleness.in_flight <= staleness
            ctx.backward(ctx.forward(batch)[0].sum())
    assert ctx.staleness.max <= staleness - 1
    assert ctx.counters.batches_trained == 30


def test_break_gives_up_what_was_prefetched(make_ctx: MakeCtx, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        for batch in DataLoader(make_dataset(100)):
            ctx.backward(ctx.forward(batch)[0].sum())
            break
    assert ctx.counters.batches_trained == 1
    assert settled(ctx)


@pytest.mark.parametrize("staleness", [1, None])
def test_skipped_batches_are_released(
    make_ctx: MakeCtx, make_dataset: Any, client: Any, staleness: int | None
) -> None:
    with make_ctx() as ctx:
        for number, batch in enumerate(DataLoader(make_dataset(10), embedding_staleness=staleness)):
            output, _ = ctx.forward(batch)
            if number % 2:
                ctx.backward(output.sum())
    assert (ctx.counters.batches_trained, ctx.counters.batches_released) == (5, 5)
    assert settled(ctx)


def test_backward_after_the_batch_was_given_up_is_an_error(make_ctx: MakeCtx, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        batches = iter(DataLoader(make_dataset(3), embedding_staleness=1))
        first = next(batches)
        output, _ = ctx.forward(first)
        next(batches)
        with pytest.raises(FailedPreconditionError, match=r"batch 0 .* was released"):
            ctx.backward(output.sum())


def test_second_backward_of_a_batch_is_an_error(make_ctx: MakeCtx, new_batch: Any) -> None:
    with make_ctx() as ctx:
        output, _ = ctx.forward(ctx.get_embedding_from_data(new_batch(1)))
        ctx.backward(output.sum())
        with pytest.raises(FailedPreconditionError, match="had its backward already"):
            ctx.backward(output.sum())


def test_one_backward_for_several_batches(make_ctx: MakeCtx, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        held = list(DataLoader(make_dataset(3)))
        loss = sum((ctx.forward(batch)[0].sum() for batch in held), torch.zeros(()))
        ctx.backward(loss)
    assert ctx.counters.batches_trained == 3
    assert settled(ctx)


def test_slot_that_the_loss_does_not_reach_is_skipped(make_ctx: MakeCtx, make_dataset: Any, log: Any) -> None:
    with make_ctx() as ctx:
        for batch in DataLoader(make_dataset(2)):
            _, (a, _), _ = ctx.prepare_features(batch)
            ctx.backward(a.sum())
    assert ctx.counters.skipped_slots == 2
    assert ctx.counters.batches_trained == 2
    (record,) = [record for record in log.records if "does not depend on" in record.getMessage()]
    assert record.batch_id == 0
    assert "the loss of batch 0 does not depend on ['b']" in record.getMessage()


def test_nonfinite_gradient_is_counted_and_not_applied(make_ctx: MakeCtx, new_batch: Any) -> None:
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(new_batch(1))
        before = rows_of(ctx, new_batch(1))
        _, (a, b), _ = ctx.prepare_features(batch)
        ctx.backward((a * float("nan")).sum() + b.sum())
    assert ctx.counters.nonfinite_slots == 1
    with make_ctx() as again:
        after = rows_of(again, new_batch(1))
    np.testing.assert_array_equal(after[0], before[0])
    assert not np.array_equal(after[1], before[1])


def test_lost_gradient_is_raised_in_the_loop_and_ends_it(
    make_ctx: MakeCtx, make_dataset: Any, backend: Any
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise NotFoundError("embedding worker 0 does not know reference 5")

    backend.return_gradients = fail
    ctx = make_ctx()
    with pytest.raises(NotFoundError, match="the gradient of batch 0: embedding worker 0"):
        train_all(ctx, DataLoader(make_dataset(1000), embedding_staleness=1))
    assert settled(ctx)


def test_gradient_lost_at_the_very_end_is_raised_on_exit(
    make_ctx: MakeCtx, new_batch: Any, backend: Any
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise NotFoundError("expired")

    backend.return_gradients = fail
    with pytest.raises(NotFoundError, match="batch 0: expired"), make_ctx() as ctx:
        ctx.backward(ctx.forward(ctx.get_embedding_from_data(new_batch(1)))[0].sum())


def test_the_scripts_error_is_not_hidden_by_a_lost_gradient(
    make_ctx: MakeCtx, new_batch: Any, backend: Any
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise NotFoundError("expired")

    backend.return_gradients = fail

    def script() -> None:
        with make_ctx() as ctx:
            ctx.backward(ctx.forward(ctx.get_embedding_from_data(new_batch(1)))[0].sum())
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        script()


def test_error_of_the_users_data_set_surfaces(make_ctx: MakeCtx, make_dataset: Any) -> None:
    ctx = make_ctx()
    with pytest.raises(ZeroDivisionError, match="row 17"):
        train_all(ctx, DataLoader(make_dataset(3, ZeroDivisionError("row 17"))))
    assert ctx.counters.batches_trained == 3


def test_data_set_of_something_else_is_refused(make_ctx: MakeCtx, make_dataset: Any) -> None:
    class Wrong(make_dataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            yield {"a": 1}

    with make_ctx(), pytest.raises(InvalidTypeError, match="must yield PersiaBatch objects, batch 0 is dict"):
        next(iter(DataLoader(Wrong(1))))


def test_unknown_feature_names_the_batch(make_ctx: MakeCtx) -> None:
    from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch

    batch = PersiaBatch([IDTypeFeatureWithSingleID("nobody", np.array([1], np.uint64))], requires_grad=False)
    with make_ctx() as ctx, pytest.raises(PersiaError, match=r"lookup of batch 0: .*nobody"):
        ctx.get_embedding_from_data(batch)


def test_batches_the_script_still_holds_are_released_at_the_end(make_ctx: MakeCtx, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        held = list(DataLoader(make_dataset(3)))
    assert ctx.counters.batches_released == 3
    assert settled(ctx)
    del held
    gc.collect()
    assert ctx.counters.batches_released == 3


def test_tensors_outlive_their_batch(make_ctx: MakeCtx, new_batch: Any) -> None:
    with make_ctx() as ctx:
        dense, embeddings, labels = ctx.prepare_features(ctx.get_embedding_from_data(new_batch(3)))
        copies = [tensor.detach().clone() for tensor in (*dense, *embeddings, *(labels or []))]
        ctx.current_batch = None
        gc.collect()
        ctx.forward(ctx.get_embedding_from_data(new_batch(4)))
        for tensor, copy in zip((*dense, *embeddings, *(labels or [])), copies, strict=True):
            assert torch.equal(tensor, copy)


def test_another_training_config_is_refused_unless_asked_for(make_ctx: MakeCtx, new_batch: Any) -> None:
    with make_ctx() as ctx:
        ctx.forward(ctx.get_embedding_from_data(new_batch(1)))
        with pytest.raises(FailedPreconditionError), make_ctx(embedding_optimizer=SGD(lr=7.0)):
            pass
        ctx.configure_embedding_parameter_servers(EmbeddingConfig(weight_bound=1))


def test_sizes_and_clearing(make_ctx: MakeCtx, new_batch: Any) -> None:
    with make_ctx() as ctx:
        ctx.get_embedding_from_data(new_batch(9))
        assert sum(ctx.get_embedding_size()) == 2 * 4  # ids 9, 0, 1, 2 in each of two groups
        ctx.clear_embeddings()
        assert sum(ctx.get_embedding_size()) == 0


def test_loss_scale_reaches_the_servers_and_backs_off(
    make_ctx: MakeCtx, model: torch.nn.Module, new_batch: Any
) -> None:
    with make_ctx(grad_scalar_update_factor=4) as ctx:
        # The CPU has no mixed precision to offer; the scaler is the same.
        ctx._backward.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        batch = ctx.get_embedding_from_data(new_batch(2))
        before, weights = rows_of(ctx, new_batch(2)), model.linear.weight.detach().clone()
        output, _ = ctx.forward(batch)
        assert ctx.backward(output.sum()).item() == pytest.approx(1024 * output.sum().item())
        assert ctx._backward.scaler.get_scale() == 1024.0

        _, (a, b), _ = ctx.prepare_features(ctx.get_embedding_from_data(new_batch(50)))
        ctx.backward((a * float("inf")).sum() + b.sum() + model.linear.bias.sum())
        assert ctx._backward.scaler.get_scale() == 256.0
    with make_ctx() as again:
        after = rows_of(again, new_batch(2))
    np.testing.assert_allclose(
        (before - after)[0, 2], 0.1 * 8 * weights[0, 1:5].numpy(), rtol=1e-4, atol=1e-6
    )


def test_loss_scale_of_several_ranks_follows_their_dense_gradients_alone(
    make_ctx: MakeCtx, model: torch.nn.Module, new_batch: Any
) -> None:
    """DDP has summed those, so all ranks decide alike; embedding gradients are each rank's own."""
    with make_ctx(grad_scalar_update_factor=4) as ctx:
        ctx._backward.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        ctx._backward.num_ranks = 2
        for dense_factor, scale in ((1.0, 1024.0), (float("inf"), 512.0)):
            _, (a, b), _ = ctx.prepare_features(ctx.get_embedding_from_data(new_batch(50)))
            ctx.backward((a * float("inf")).sum() + b.sum() + (model.linear.bias * dense_factor).sum())
            assert ctx._backward.scaler.get_scale() == scale
        ctx.world_size = 1


def test_data_set_that_exits_ends_the_loop(make_ctx: MakeCtx, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        batches = iter(DataLoader(make_dataset(2, SystemExit(3)), timeout_ms=5000))
        for _ in range(2):
            ctx.backward(ctx.forward(next(batches))[0].sum())
        with pytest.raises(SystemExit):
            next(batches)


def test_a_schedule_steers_the_rate_of_the_servers(make_ctx: MakeCtx, new_batch: Any) -> None:
    optimizer = SGD(1.0)
    schedule = LRSchedule(optimizer, lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5))
    steps = []
    with make_ctx(embedding_optimizer=optimizer) as ctx:
        torch.nn.init.ones_(ctx.model.linear.weight)  # type: ignore[union-attr, arg-type]
        ctx.dense_optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        for _ in range(3):
            batch, before = ctx.get_embedding_from_data(new_batch(2)), rows_of(ctx, new_batch(2))
            ctx.backward(ctx.forward(batch)[0].sum())
            ctx.wait_for_gradients()
            steps.append(float(np.abs(rows_of(ctx, new_batch(2)) - before).max()))
            schedule.step()
    assert steps[1] == pytest.approx(steps[0] / 2, rel=1e-3)
    assert steps[2] == pytest.approx(steps[0] / 4, rel=1e-3)
    optimizer.set_lr(0.5)  # the context has ended: nobody is told
