"""Between backward and the updates: clipping, accumulation, schedulers, precision; and rows set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from persia.config import parse_embedding_config
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError, NotFoundError

MakeCtx = Callable[..., TrainCtx]
GROUPED = {
    "feature_index_prefix_bit": 12,
    "slots_config": {
        "a": {"dim": 4},
        "b": {"dim": 4},
        "c": {"dim": 2, "embedding_summation": False, "sample_fixed_size": 1},
        "stacked": {"dim": 4, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 10}},
    },
    "feature_groups": {"shared": ["b", "c2"]},
}
GROUPED["slots_config"]["c2"] = {"dim": 4}  # type: ignore[index]


def single(slot: str, ids: list[int]) -> PersiaBatch:
    return PersiaBatch([IDTypeFeatureWithSingleID(slot, np.array(ids, np.uint64))], requires_grad=False)


def rows(slot: str, ids: list[int]) -> np.ndarray[Any, Any]:
    with eval_ctx() as evaluation:
        batch = evaluation.get_embedding_from_data(single(slot, ids))
        values: np.ndarray[Any, Any] = batch.consume_all_id_type_feature_embedding_tensors()[0].numpy().copy()
        return values


def test_dense_gradients_can_be_clipped(make_ctx: MakeCtx, model: torch.nn.Module, new_batch: Any) -> None:
    norms = []

    def clip() -> None:
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))

    before = [p.detach().clone() for p in model.parameters()]
    with make_ctx(before_dense_step=clip) as ctx:
        output, _ = ctx.forward(ctx.get_embedding_from_data(new_batch(7)))
        ctx.backward(output.sum() * 10)
    step = torch.cat(
        [(old - new.detach()).flatten() for old, new in zip(before, model.parameters(), strict=True)]
    )
    assert norms[0] > 100
    assert float(step.norm()) == pytest.approx(0.1 * 0.5, rel=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_embedding_gradients_can_be_clipped(make_ctx: MakeCtx, scaled: bool) -> None:
    seen: dict[str, float] = {}

    def clip(slot: str, gradient: torch.Tensor) -> torch.Tensor | None:
        seen[slot] = float(gradient.norm())
        if slot == "a":
            return gradient.clamp(-0.25, 0.25)
        gradient.mul_(0.5)
        return None

    features = [IDTypeFeatureWithSingleID(slot, np.array([1], np.uint64)) for slot in "ab"]
    batch = PersiaBatch(features, labels=_labels(1))
    with make_ctx(on_embedding_gradient=clip) as ctx:
        if scaled:
            ctx._backward.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        training = ctx.get_embedding_from_data(batch)
        before = {slot: rows(slot, [1]) for slot in "ab"}
        _, (a, b), _ = ctx.prepare_features(training)
        ctx.backward(2 * a.sum() + 2 * b.sum() + 0 * ctx.model.linear.bias.sum())
        ctx.wait_for_gradients()
        after = {slot: rows(slot, [1]) for slot in "ab"}
    assert seen == {"a": pytest.approx(4.0), "b": pytest.approx(4.0)}
    np.testing.assert_allclose(before["a"] - after["a"], np.full((1, 4), 0.1 * 0.25), rtol=1e-5)
    np.testing.assert_allclose(before["b"] - after["b"], np.full((1, 4), 0.1 * 1.0), rtol=1e-5)


def test_hook_that_changes_the_shape_is_refused(make_ctx: MakeCtx, new_batch: Any) -> None:
    with make_ctx(on_embedding_gradient=lambda slot, gradient: gradient.sum()) as ctx:
        output, _ = ctx.forward(ctx.get_embedding_from_data(new_batch(1)))
        with pytest.raises(InvalidArgumentError, match=r"returned \[\] for slot a: return a tensor \[3, 4\]"):
            ctx.backward(output.sum())


def test_accumulated_steps_equal_one_step_over_all_batches(
    make_ctx: MakeCtx, model: torch.nn.Module, make_dataset: Any
) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with make_ctx() as ctx:
        held = list(DataLoader(make_dataset(4)))
        ctx.backward(sum((ctx.forward(batch)[0].mean() / 4 for batch in held), torch.zeros(())))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        ctx.wait_for_gradients()
        model.load_state_dict(start)
        ctx.clear_embeddings()
        steps = []
        for number, batch in enumerate(DataLoader(make_dataset(4), embedding_staleness=4), start=1):
            weight = model.linear.weight.detach().clone()
            if number < 4:
                with ctx.accumulate():
                    ctx.backward(ctx.forward(batch)[0].mean() / 4)
            else:
                ctx.backward(ctx.forward(batch)[0].mean() / 4)
            steps.append(not torch.equal(weight, model.linear.weight))
        assert steps == [False, False, False, True]
    assert ctx.counters.batches_trained == 8
    # Embeddings were updated between the batches here, and not there: close, not equal.
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-3)


def test_schedulers_of_torch_change_the_dense_rate(
    make_ctx: MakeCtx, model: torch.nn.Module, make_dataset: Any
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    moves = []
    with make_ctx(dense_optimizer=optimizer) as ctx:
        for batch in DataLoader(make_dataset(3)):
            before = model.linear.bias.item()
            ctx.backward(ctx.forward(batch)[0].mean())  # the gradient of the bias is 1
            moves.append(before - model.linear.bias.item())
            scheduler.step()
    assert moves == pytest.approx([1.0, 0.5, 0.25], abs=1e-5)


def test_compiled_models_train_alike(make_ctx: MakeCtx, model: torch.nn.Module, make_dataset: Any) -> None:
    def losses(called: torch.nn.Module) -> list[float]:
        found = []
        with make_ctx(model=called, backward_workers_size=1) as ctx:
            ctx.clear_embeddings()
            for batch in DataLoader(make_dataset(5), reproducible=True):
                loss = ctx.forward(batch)[0].square().mean()
                ctx.backward(loss)
                found.append(loss.item())
        return found

    start = {name: value.clone() for name, value in model.state_dict().items()}
    plain = losses(model)
    model.load_state_dict(start)
    # Without code generation, which needs a compiler; what torch traces is the same.
    assert losses(torch.compile(model, backend="aot_eager")) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16),
        (torch.float16, torch.float16),
    ],
)
def test_autocast_on_the_cpu(make_ctx: MakeCtx, new_batch: Any, precision: Any, dtype: torch.dtype) -> None:
    dtypes = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 1)

        def forward(self, dense: Any, embeddings: Any) -> Any:
            output = self.linear(torch.cat(embeddings, dim=1))
            dtypes.append(output.dtype)
            return {"score": output, "pair": (output, [output])}

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_ctx(model=model, dense_optimizer=optimizer, mixed_precision=precision) as ctx:
        output, labels = ctx.forward(ctx.get_embedding_from_data(new_batch(1)))
        assert dtypes == [dtype]
        assert output["score"].dtype == output["pair"][1][0].dtype == torch.float32
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output["score"], (labels or [])[0])
        scaled = ctx.backward(loss)
    if dtype is torch.bfloat16:
        assert scaled is loss  # nothing is scaled
    else:
        assert scaled.item() == loss.item() * 2.0**16
    assert ctx.counters.batches_trained == 1
    assert ctx.counters.nonfinite_slots == 0


class FromEmbeddings(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.linear(torch.cat(embeddings, dim=1))
        return output


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_on_the_cpu_learns_what_full_precision_does(
    make_ctx: MakeCtx, make_dataset: Any, precision: str
) -> None:
    def losses(mixed_precision: Any) -> list[float]:
        torch.manual_seed(4)
        model = FromEmbeddings()
        found = []
        with make_ctx(
            model=model,
            dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            mixed_precision=mixed_precision,
        ) as ctx:
            ctx.clear_embeddings()
            if ctx._backward.scaler is not None:  # no step is skipped until the scale is found
                ctx._backward.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            for batch in DataLoader(make_dataset(20), reproducible=True):
                output, labels = ctx.forward(batch)
                loss = (output - (labels or [])[0]).square().mean()
                ctx.backward(loss)
                found.append(loss.item())
        assert ctx.counters.nonfinite_slots == 0
        return found

    full = losses(False)
    assert full[-1] < full[0] / 10
    assert losses(precision) == pytest.approx(full, rel=0.05, abs=0.01)


def test_a_gradient_that_half_precision_overflows_is_left_out_and_the_scale_falls(
    make_ctx: MakeCtx, new_batch: Any
) -> None:
    with make_ctx(mixed_precision="fp16") as ctx:
        before = ctx.model.linear.bias.item()
        output, _ = ctx.forward(ctx.get_embedding_from_data(new_batch(1)))
        ctx.backward(output.sum() * 1e4)  # times 2^16, more than float16 has
        assert ctx._backward.scaler.get_scale() == 2.0**16 / 4
        assert ctx.model.linear.bias.item() == before
    assert ctx.counters.nonfinite_slots == 2


@pytest.mark.parametrize(
    ("precision", "match"),
    [(True, "needs a CUDA device"), ("int8", "'fp16' or 'bf16'")],
)
def test_precision_that_the_device_lacks(make_ctx: MakeCtx, precision: Any, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        make_ctx(mixed_precision=precision)


def test_every_batch_is_checked_for_finite_gradients(make_ctx: MakeCtx, new_batch: Any) -> None:
    with make_ctx() as ctx:
        ctx._backward.scaler = torch.amp.GradScaler("cpu", init_scale=4.0**5)
        for number in range(1, 5):
            _, (a, b), _ = ctx.prepare_features(ctx.get_embedding_from_data(new_batch(number)))
            ctx.backward((a * float("inf")).sum() + b.sum() + ctx.model.linear.bias.sum())
            assert ctx._backward.scaler.get_scale() == 4.0 ** (5 - number)
    assert ctx.counters.nonfinite_slots == 4


@pytest.fixture
def grouped(make_ctx: MakeCtx, model: torch.nn.Module) -> TrainCtx:
    """A context over slots with groups, a raw slot and a hash stack."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainCtx(SGD(lr=0.1), optimizer, model=model, mixed_precision=False, slots=GROUPED)


def test_rows_are_set_by_slot_and_id(grouped: TrainCtx) -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(size=(3, 4)).astype(np.float32)
    ids = np.array([5, 2**52 + 3, 2**64 - 1], np.uint64)
    with grouped:
        grouped.set_embedding("b", ids, values)
        np.testing.assert_array_equal(rows("b", ids.tolist()), values)
        np.testing.assert_array_equal(rows("c2", ids.tolist()), values)  # of the same group
        assert not rows("a", ids.tolist()).any()
        grouped.set_embedding("c", ids[:1], values[:1, :2])
        np.testing.assert_array_equal(rows("c", [5])[0, 0], [*values[0, :2], 1.0])
        grouped.set_embedding("a", np.arange(100_000, dtype=np.uint64), np.ones((100_000, 4), np.float32))
        assert sum(grouped.get_embedding_size()) == 100_004
        assert (rows("a", [0, 65_535, 65_536, 99_999]) == 1).all()


@pytest.mark.parametrize(
    ("slot", "ids", "values", "error", "match"),
    [
        ("nobody", np.zeros(1, np.uint64), np.zeros((1, 4), np.float32), NotFoundError, "no slot 'nobody'"),
        ("stacked", np.zeros(1, np.uint64), np.zeros((1, 4)), InvalidArgumentError, "hash stack"),
        ("a", np.zeros(1, np.int64), np.zeros((1, 4)), InvalidTypeError, r"int64 \[1\]: pass a numpy array"),
        ("a", [1], np.zeros((1, 4)), InvalidTypeError, "list: pass a numpy array"),
        ("a", np.zeros(2, np.uint64), np.zeros((1, 4)), InvalidArgumentError, r"pass float32 \[2, 4\]"),
        ("a", np.zeros(1, np.uint64), np.full((1, 4), np.nan), InvalidArgumentError, "NaN or infinite"),
    ],
)
def test_rows_that_cannot_be_set(
    grouped: TrainCtx, slot: str, ids: Any, values: Any, error: type[Exception], match: str
) -> None:
    with grouped, pytest.raises(error, match=match):
        grouped.set_embedding(slot, ids, values)


def test_setting_rows_needs_the_slots(make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_EMBEDDING_CONFIG", raising=False)
    with make_ctx() as ctx, pytest.raises(FailedPreconditionError, match="needs the job's slots"):
        ctx.set_embedding("a", np.zeros(1, np.uint64), np.zeros((1, 4), np.float32))


def test_ids_of_nested_contexts_use_the_slots_around_them(grouped: TrainCtx) -> None:
    assert parse_embedding_config(GROUPED).group_numbers()["a"] == 2
    with grouped, eval_ctx() as evaluation:
        evaluation.set_embedding("a", np.ones(1, np.uint64), np.ones((1, 4), np.float32))
        assert (rows("a", [1]) == 1).all()


def _labels(size: int) -> Any:
    from persia.embedding.data import Label

    return [Label(np.ones((size, 1), np.float32))]
