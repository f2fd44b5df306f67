"""Mistakes that would train nothing, or wait for ever: each says what to do instead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, StreamingDataset
from persia.data.dataset import _may_have_loader
from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import FailedPreconditionError, InvalidArgumentError

UNTRAINED = "batches that this context received was trained"


def mean_square(output: torch.Tensor, labels: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, labels[0])


@pytest.mark.parametrize("num_batches", [1, 4])
@pytest.mark.parametrize("staleness", [1, 16])
def test_loss_backward_in_the_place_of_ctx_backward(
    make_ctx: Any, make_dataset: Any, num_batches: int, staleness: int
) -> None:
    num_steps = 0

    def train(ctx: TrainCtx) -> None:
        nonlocal num_steps
        with ctx:
            for batch in DataLoader(make_dataset(num_batches), embedding_staleness=staleness):
                mean_square(*ctx.forward(batch)).backward()
                ctx.dense_optimizer.step()
                num_steps += 1

    ctx = make_ctx()
    with pytest.raises(
        FailedPreconditionError, match=r"batch 0 got gradients by loss.backward.*call ctx.back"
    ):
        train(ctx)
    assert num_steps == 0
    assert ctx.counters.batches_trained == 0


def test_more_than_one_forward_or_backward_is_no_mistake(make_ctx: Any, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        batches = iter(DataLoader(make_dataset(4)))
        first, second = next(batches), next(batches)
        loss = mean_square(*ctx.forward(first))
        ctx.backward(loss + mean_square(*ctx.forward(second)))
        loss = mean_square(*ctx.forward(next(batches)))
        loss.backward(retain_graph=True)  # adds to what ctx.backward hands in
        ctx.backward(loss)
        skipped = next(batches)
        ctx.forward(skipped)
    assert ctx.counters.batches_trained == 3


def test_gradients_of_several_batches_may_be_summed_by_loss_backward(
    make_ctx: Any, make_dataset: Any
) -> None:
    with make_ctx() as ctx:
        batches = list(DataLoader(make_dataset(3)))
        for batch in batches[:2]:
            mean_square(*ctx.forward(batch)).backward()
        ctx.backward(mean_square(*ctx.forward(batches[2])))
        ctx.dense_optimizer.step()  # of the script's own, after the gradients are handed in
    assert ctx.counters.batches_trained == 3


def test_frozen_batches_between_others_are_trained_by_the_dense_model(
    make_ctx: Any, make_dataset: Any
) -> None:
    with make_ctx() as ctx:
        frozen = list(DataLoader(make_dataset(2, requires_grad=False)))
        batches = list(DataLoader(make_dataset(2)))
        with ctx.accumulate():
            first, second = (mean_square(*ctx.forward(batch)) for batch in batches)
            ctx.backward(first)
        ctx.forward(frozen[0])
        ctx.backward(second)  # the last batch forwarded is another
        ctx.backward(mean_square(*ctx.forward(frozen[1])))
        assert ctx.step == 3
    assert ctx.counters.batches_trained == 2


def test_batches_without_gradients_cannot_be_trained(make_ctx: Any, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        batch = next(iter(DataLoader(make_dataset(1, requires_grad=False))))
        loss = mean_square(*ctx.forward(batch))
        with pytest.raises(
            FailedPreconditionError, match="batch 0 .*requires_grad=False.*requires_grad=True"
        ):
            ctx.backward(loss)
        assert ctx.step == 0
        loss.backward()  # the remedy for frozen embeddings
        ctx.dense_optimizer.step()


def test_an_evaluation_between_forward_and_backward_is_no_mistake(make_ctx: Any, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        batch = next(iter(DataLoader(make_dataset(1))))
        loss = mean_square(*ctx.forward(batch))
        ctx.forward(next(iter(DataLoader(make_dataset(1, requires_grad=False)))))
        ctx.backward(loss)
    assert ctx.counters.batches_trained == 1


def test_a_loop_that_trains_nothing_is_an_error(make_ctx: Any, make_dataset: Any) -> None:
    def only_forwards(ctx: TrainCtx) -> None:
        for batch in DataLoader(make_dataset(3)):
            ctx.forward(batch)

    def fails_after(loop: Callable[[TrainCtx], None], ctx: TrainCtx) -> None:
        loop(ctx)
        raise ZeroDivisionError  # of the script's own: the one to show

    with (
        pytest.raises(FailedPreconditionError, match=rf"none of the 3 {UNTRAINED}: call ctx.backward"),
        make_ctx() as ctx,
    ):
        only_forwards(ctx)
    assert ctx.counters.batches_released == 3  # the context has ended all the same
    with make_ctx() as following:  # another can be entered
        assert following is not ctx
    with pytest.raises(ZeroDivisionError), make_ctx() as ctx:
        fails_after(only_forwards, ctx)


def test_a_context_that_trains_or_gets_nothing_is_fine(make_ctx: Any, make_dataset: Any) -> None:
    with make_ctx():
        pass
    with make_ctx() as ctx:
        for batch in DataLoader(make_dataset(3)):
            ctx.backward(mean_square(*ctx.forward(batch)))
            break


@pytest.mark.parametrize("num_batches", [3, 9])
def test_a_context_that_only_evaluates_is_fine(make_ctx: Any, make_dataset: Any, num_batches: int) -> None:
    with make_ctx() as ctx:
        for batch in DataLoader(make_dataset(9, requires_grad=False)):
            ctx.forward(batch)
            if batch.batch_id + 1 == num_batches:
                break  # others have been prefetched
    with make_ctx() as ctx, eval_ctx(model=ctx.model) as evaluation:
        for batch in DataLoader(make_dataset(num_batches)):
            evaluation.forward(batch)


def test_a_failed_look_at_a_batch_hides_no_loop(make_ctx: Any, make_dataset: Any) -> None:
    def look_and_loop(ctx: TrainCtx) -> None:
        unknown = [IDTypeFeature("bb", [np.ones(1, np.uint64)])]
        with pytest.raises(InvalidArgumentError, match="bb"):
            ctx.get_embedding_from_data(PersiaBatch(unknown, labels=[Label(np.ones((1, 1), np.float32))]))
        for batch in DataLoader(make_dataset(1)):
            ctx.forward(batch)

    with pytest.raises(FailedPreconditionError, match=rf"none of the 1 {UNTRAINED}"), make_ctx() as ctx:
        look_and_loop(ctx)
    assert ctx.counters.batches_failed == 1


def test_a_look_at_a_batch_is_no_forward_of_a_loop(
    make_ctx: Any, make_dataset: Any, new_batch: Any, log: Any
) -> None:
    with make_ctx() as ctx:
        ctx.forward(ctx.get_embedding_from_data(new_batch(1)))
        next(iter(DataLoader(make_dataset(3))))  # as a job that has ended leaves its loop
    assert sum(UNTRAINED in text for text in log.messages) == 1


def test_a_look_at_a_batch_trains_beside_frozen_ones(
    make_ctx: Any, make_dataset: Any, new_batch: Any
) -> None:
    with make_ctx() as ctx:
        ctx.backward(mean_square(*ctx.forward(ctx.get_embedding_from_data(new_batch(1)))))
        frozen = next(iter(DataLoader(make_dataset(1, requires_grad=False))))
        ctx.backward(mean_square(*ctx.forward(frozen)))
        assert ctx.step == 2


def test_a_look_at_batches_is_fine(make_ctx: Any, make_dataset: Any, new_batch: Any, log: Any) -> None:
    """A handler of requests looks batches up itself; a job that has ended leaves its loop at once."""
    with make_ctx() as ctx:
        ctx.forward(ctx.get_embedding_from_data(new_batch(1)))
    assert not any(UNTRAINED in text for text in log.messages)
    with make_ctx() as ctx:
        assert len(list(DataLoader(make_dataset(3)))) == 3
    assert sum(UNTRAINED in text for text in log.messages) == 1


def test_a_backward_that_fails_was_told(make_ctx: Any, make_dataset: Any) -> None:
    with make_ctx() as ctx:
        output, _ = ctx.forward(next(iter(DataLoader(make_dataset(1)))))
        with pytest.raises(RuntimeError, match="scalar"):
            ctx.backward(output)


def test_a_loader_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = threading.Thread(name="persia-data-loader")
    monkeypatch.setattr("persia.data.dataset.threading.enumerate", lambda: [loader])
    assert _may_have_loader()


def test_a_layer_of_the_wrong_size_names_slots_and_dims(make_ctx: Any, make_dataset: Any, model: Any) -> None:
    model.linear = torch.nn.Linear(17, 1)
    message = r"3x9 and 17x1.*anonymous \[3, 1\] float32, a \[3, 4\] float32, b \[3, 4\].*in_features"
    with pytest.raises(InvalidArgumentError, match=message), make_ctx() as ctx:
        ctx.forward(next(iter(DataLoader(make_dataset(1)))))


def test_an_unknown_feature_gets_the_nearest_slot(make_ctx: Any) -> None:
    features = [IDTypeFeature("bb", [np.ones(1, np.uint64)])]
    with make_ctx() as ctx:
        batch = PersiaBatch(features, labels=[Label(np.ones((1, 1), np.float32))])
        with pytest.raises(InvalidArgumentError, match=r"'bb'.*did you mean 'b'\?"):
            ctx.get_embedding_from_data(batch)


def test_a_layer_of_another_dtype_names_the_inputs(make_ctx: Any, make_dataset: Any, model: Any) -> None:
    model.linear = torch.nn.Linear(9, 1, dtype=torch.float64)
    message = r"same dtype.*a \[3, 4\] float32.*a layer of float32 needs float32"
    with pytest.raises(InvalidArgumentError, match=message), make_ctx() as ctx:
        ctx.forward(next(iter(DataLoader(make_dataset(1)))))


def test_other_errors_of_the_model_are_its_own(make_ctx: Any, make_dataset: Any, model: Any) -> None:
    model.forward = lambda dense, embeddings: torch.cat([dense[0], embeddings[0]])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match") as raised, make_ctx() as ctx:
        ctx.forward(next(iter(DataLoader(make_dataset(1)))))
    assert not isinstance(raised.value, InvalidArgumentError)


def test_a_stream_that_nothing_can_send_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    me = threading.current_thread()
    monkeypatch.setattr("persia.data.dataset.threading.enumerate", lambda: [me])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    slots = {"slots_config": {"a": {"dim": 4}}}
    with (
        TrainCtx(SGD(0.1), optimizer, model=model, slots=slots),
        pytest.raises(FailedPreconditionError, match="nothing can send.*StreamingDataset.loader="),
    ):
        next(iter(DataLoader(StreamingDataset())))
