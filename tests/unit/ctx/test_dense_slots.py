"""Slots in the dense model: values, gradients, contexts and optimizers, beside torch and beside servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from persia.config import parse_embedding_config
from persia.ctx import EmbeddingCtx, InferCtx, eval_ctx, infer
from persia.ctx.base import PreprocessMode
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import ConfigError, FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from persia.job import batch_pipeline
from persia.nn import EmbeddingBagCollection
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.dense_ids import DenseIdReader, DenseTable
from persia.pipeline.device_batch import Lane, lane_of
from persia.storage.dense_slots import DenseSlots
from tests.dense_slots_job import (
    ADAGRAD,
    DENSE,
    DIM,
    ROWS,
    SCALINGS,
    Tower,
    batch,
    config,
    predictions,
    rows_of,
    step,
    training,
)


class Reference(nn.Module):
    """`Tower` behind plain embedding bags, with the rows of dense slots."""

    def __init__(self, slots: DenseSlots) -> None:
        super().__init__()
        self.tower = Tower()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                slots.rows(name).detach().clone(), freeze=False, mode="sum", include_last_offset=True
            )
            for name in DENSE
        )

    def forward(self, given: PersiaBatch) -> torch.Tensor:
        pooled = []
        for feature, bag in zip(given.id_type_features, self.bags, strict=True):
            ids = torch.from_numpy(feature.ids.astype(np.int64))
            offsets = torch.from_numpy(feature.offsets.astype(np.int64))
            weights = torch.ones(len(ids))
            if feature.weights is not None:
                weights = torch.from_numpy(feature.weights)
            sums = bag(ids, offsets, per_sample_weights=weights)
            pooled.append(sums * self.factors(feature.name, weights, offsets))
        return self.tower([], pooled)

    def factors(self, name: str, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if name not in SCALINGS or not SCALINGS[name]:
            return torch.ones(len(offsets) - 1, 1)
        parts = weights.split(offsets.diff().tolist())
        if name == "mean":
            sums = torch.stack([part.sum() for part in parts])
        else:
            sums = torch.stack([part.square().sum().sqrt() for part in parts])
        return torch.where(sums > 0, 1 / sums, 0.0).unsqueeze(1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, ADAGRAD, torch.optim.Adam])
def test_training_equals_that_of_embedding_bags(kind: Any, weighted: bool) -> None:
    model = Tower()
    optimizer = kind(model.parameters(), lr=0.1)
    with training(model, config(*DENSE), optimizer) as ctx:
        slots = rows_of(model)
        reference = Reference(slots)
        torch_optimizer = kind(reference.parameters(), lr=0.1)
        for seed in range(4):
            given = batch(seed, weighted=weighted)
            labels = torch.from_numpy(given.labels[0].data)
            torch_optimizer.zero_grad()
            (reference(given) - labels).square().mean().backward()
            torch_optimizer.step()
            step(ctx, seed, weighted=weighted)
        assert ctx.get_embedding_size() == [0]
        assert ctx.counters.gradients_submitted == 4
    for name, bag in zip(DENSE, reference.bags, strict=True):
        torch.testing.assert_close(slots.rows(name).data, bag.weight.data)
    torch.testing.assert_close(model.linear.weight, reference.tower.linear.weight)


@pytest.mark.parametrize("dense", [("sum", "mean"), DENSE], ids=str)
def test_training_equals_that_on_servers(dense: tuple[str, ...]) -> None:
    found = []
    for slots in (config(*dense), config()):
        model = Tower()
        with training(model, slots) as ctx:
            ctx.embedding_config = EmbeddingConfig(emb_initialization=(-1.0, 1.0), seed=5)
            ctx.configure_embedding_parameter_servers(ctx.embedding_config)
            for seed in range(30):
                step(ctx, seed)
            found.append(predictions(ctx))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", [("sum", "mean"), DENSE], ids=str)
def test_batches_that_cross_to_a_device_train_the_same(
    dense: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for make_lane in (lane_of, lambda _: Lane(torch.device("cpu"))):
        monkeypatch.setattr(batch_pipeline, "lane_of", make_lane)
        with training(Tower(), config(*dense)) as ctx:
            for _ in range(5):
                step(ctx, 0)
            assert ctx.counters.skipped_slots == 0
            found.append(predictions(ctx, 0))
    torch.testing.assert_close(*found)


def test_ids_cross_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`to_device` pins them: copies from pageable memory would block the loop once for each slot."""
    crossed: list[torch.Tensor] = []

    def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cpu")
        crossed.append(tensor)
        return tensor

    monkeypatch.setattr("persia.storage.dense_slots.to_device", to_device)
    with training(Tower(), config(*DENSE)) as ctx:
        predictions(ctx)
    # IDs, offsets and weights of each slot, and the factors of those that scale.
    assert len(crossed) == 3 * len(DENSE) + sum(bool(scaling) for scaling in SCALINGS.values())


def test_a_large_weight_leaves_the_scaling_of_other_samples() -> None:
    tables = {"mean": DenseTable(ROWS, DIM, "mean"), "sqrt": DenseTable(ROWS, DIM, "sqrt")}
    ids, offsets = np.arange(4, dtype=np.uint64), np.array([0, 2, 2, 4], np.uint32)
    weights = np.array([1e12, 1e12, 3e-6, 4e-6], np.float32)
    found = DenseIdReader(tables).convert([(name, ids, offsets, weights) for name in tables])
    for name, factors in (("mean", [5e-13, 0.0, 1 / 7e-6]), ("sqrt", [2**-0.5 * 1e-12, 0.0, 1 / 5e-6])):
        torch.testing.assert_close(found[name].factors, torch.tensor(factors).unsqueeze(1))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_id_beyond_the_slot_is_refused(requires_grad: bool) -> None:
    ids = IDTypeFeature("sum", [np.array([ROWS], np.uint64)])
    others = [IDTypeFeature(name, [np.array([0], np.uint64)]) for name in DENSE if name != "sum"]
    wrong = PersiaBatch([ids, *others], labels=[Label(np.ones((1, 1)))], requires_grad=requires_grad)
    with (
        training(Tower(), config(*DENSE)) as ctx,
        pytest.raises(InvalidArgumentError, match=f"'sum' has the ID {ROWS}.*its cardinality of {ROWS}"),
    ):
        ctx.get_embedding_from_data(wrong)


@pytest.mark.parametrize("dense", [(), ("sum",), DENSE], ids=str)
def test_a_loss_over_two_batches_trains_both(dense: tuple[str, ...]) -> None:
    with training(Tower(), config(*dense)) as ctx:
        first, second, other = (ctx.get_embedding_from_data(batch(seed)) for seed in range(3))
        _, *outputs = [ctx.forward(one)[0] for one in (other, first, second)]
        ctx.backward(outputs[0].sum() + outputs[1].sum())
        ctx.wait_for_gradients()
        assert ctx.counters.gradients_submitted == 2
        assert other.lease is not None
        assert not other.lease.acquired  # its own backward may follow


def test_a_schedule_that_exists_rules_the_rows() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    with training(model, config("sum"), optimizer) as ctx:
        step(ctx, 0)
        schedule.step()
        slots = rows_of(model)
        before = slots.rows("sum").detach().clone()
        step(ctx, 1)
        assert torch.equal(slots.rows("sum"), before)


class Partitioned(torch.optim.SGD):
    """As ZeroRedundancyOptimizer: trains what was handed to it, whatever its groups have become."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)


def test_an_optimizer_with_lists_of_its_own_is_refused() -> None:
    model = Tower()
    with pytest.raises(ConfigError, match=r"Partitioned keeps lists .* \(sum\)"):
        training(model, config("sum"), Partitioned(model.parameters(), lr=0.5))
    with training(model := Tower(), config(), Partitioned(model.parameters(), lr=0.5)) as ctx:
        step(ctx, 0)


def test_rows_are_set() -> None:
    rows = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM)
    with training(model := Tower(), config("sum")) as ctx:
        ctx.set_embedding("sum", np.array([3, 7], np.uint64)[::-1], rows)  # a view of other strides
        slots = rows_of(model)
        assert torch.equal(slots.rows("sum")[[7, 3]], torch.from_numpy(rows))
        with pytest.raises(InvalidArgumentError, match=f"the ID {ROWS}"):
            ctx.set_embedding("sum", np.array([ROWS], np.uint64), rows[:1])


@pytest.mark.parametrize("slot", ["sum", "mean"])  # in the dense model, and on the server
@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        (np.array([-1]), np.ones((1, DIM), np.float32), r"int64 \[1\]"),
        (np.array([[7]], np.uint64), np.ones((1, DIM), np.float32), r"uint64 \[1, 1\]"),
        (np.array([1, 2], np.uint64), np.ones((1, 1), np.float32), r"are \[1, 1\]"),
        (np.array([4], np.uint64), np.full((1, DIM), np.nan, np.float32), "NaN or"),
        (np.array([4], np.uint64), np.full((1, DIM), 1e300), "NaN or"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_wrong_rows_are_refused_wherever_a_slot_is(slot: str, ids: Any, rows: Any, message: str) -> None:
    with training(model := Tower(), config("sum")) as ctx:
        slots = rows_of(model)
        before = slots.rows("sum").detach().clone()
        with pytest.raises((InvalidArgumentError, InvalidTypeError), match=message):
            ctx.set_embedding(slot, ids, rows)
        assert torch.equal(slots.rows("sum"), before)


class Probability(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return torch.sigmoid(self.model(dense, embeddings))


def test_an_evaluation_of_another_model_scales_as_that_model_does() -> None:
    scaled = config(*DENSE)
    scaled["slots_config"]["far"]["mean_scaling"] = True
    with training(Tower(), config(*DENSE)) as ctx:
        expected, other = predictions(ctx), ctx.model
    with training(Tower(), scaled) as ctx:
        with torch.no_grad(), eval_ctx(model=other) as evaluation:
            looked_up = evaluation.get_embedding_from_data(batch(99, requires_grad=False))
            assert torch.equal(evaluation.forward(looked_up)[0], expected)
        with eval_ctx() as evaluation:  # without a model of its own: the rows of the outer one
            looked_up = evaluation.get_embedding_from_data(batch(99, requires_grad=False))
            dense, embeddings, _ = evaluation.prepare_features(looked_up)
        assert ctx.model is not None
        torch.testing.assert_close(ctx.model(dense, embeddings), predictions(ctx))
        with torch.no_grad(), eval_ctx(model=Probability(ctx.model)) as evaluation:
            output, _ = evaluation.forward(evaluation.get_embedding_from_data(batch(99, requires_grad=False)))
        torch.testing.assert_close(output, torch.sigmoid(predictions(ctx)))
        with (
            eval_ctx(model=Tower()) as evaluation,  # without rows: those of the outer model are not its own
            pytest.raises(FailedPreconditionError, match="the context has none with them"),
        ):
            evaluation.forward(evaluation.get_embedding_from_data(batch(99, requires_grad=False)))


def test_a_context_without_the_rows_refuses_their_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = batch(0, requires_grad=False).to_bytes()
    message = "rows of sum, far are in the dense model"
    with (
        EmbeddingCtx(PreprocessMode.EVAL, slots=config("sum", "far")) as alone,
        pytest.raises(FailedPreconditionError, match=message),
    ):
        alone.prepare_features(alone.get_embedding_from_bytes(given))

    # Workers of inference know no modes: they answer all slots, here with zeros.
    file = tmp_path / "slots.yml"
    file.write_text(json.dumps(config("sum", "far")))
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(file))
    with training(model := Tower(), config("sum", "far")) as ctx:
        expected = predictions(ctx, 0)
        backend = EmbeddingBackend(ctx.runtime.backend._client, deadline_s=5.0)
        monkeypatch.setattr(infer, "InferenceBackend", lambda _: backend)
        with (
            InferCtx(["host:1"]) as without,
            pytest.raises(FailedPreconditionError, match=message),
        ):
            without.prepare_features(without.get_embedding_from_bytes(given))
        with torch.no_grad(), InferCtx(["host:1"], model=model) as served:
            dense, embeddings, _ = served.prepare_features(served.get_embedding_from_bytes(given))
            torch.testing.assert_close(model(dense, embeddings), expected)


def test_the_config_of_a_rank_is_that_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, own = parse_embedding_config(config("sum", "far")), config("sum")
    file = tmp_path / "slots.yml"
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(file))
    with training(Tower(), theirs) as ctx:
        backend = EmbeddingBackend(
            ctx.runtime.backend._client,
            deadline_s=5.0,
            slot_modes=theirs.slot_modes,
            schema=theirs.schema_hash(),
        )
        file.write_text(json.dumps(own))
        with pytest.raises(FailedPreconditionError, match=f"config {theirs.schema_hash()}, this process"):
            EmbeddingCtx(PreprocessMode.EVAL, model=Tower(), backend=backend)
        file.write_text(json.dumps(config("sum", "far")))
        with EmbeddingCtx(PreprocessMode.EVAL, model=Tower(), backend=backend):
            pass


def test_a_job_that_places_no_slot_in_the_dense_model_refuses_a_model_with_rows() -> None:
    with training(model := Tower(), config("sum", "far")) as ctx:
        backend = EmbeddingBackend(ctx.runtime.backend._client, deadline_s=5.0)  # its workers know no modes
        with pytest.raises(FailedPreconditionError, match="the model has the rows of sum, far, and the job"):
            training(model, None, backend=backend)


def test_a_model_keeps_its_rows_in_a_second_context() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with training(model, config("sum"), optimizer) as ctx:
        step(ctx, 0)
        slots = rows_of(model)
        before = slots.rows("sum").detach().clone()
    with training(model, config("sum"), optimizer):
        assert torch.equal(slots.rows("sum"), before)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 3
    with pytest.raises(FailedPreconditionError, match="make the model anew"):
        training(model, config("mean"), optimizer)


def test_what_cannot_have_rows_in_the_dense_model_says_so() -> None:
    scripted = torch.jit.script(Tower())
    optimizer = torch.optim.SGD(scripted.parameters(), lr=0.5)
    with pytest.raises(
        ConfigError, match="sum, far are placed in the dense model, and a model of TorchScript"
    ):
        training(scripted, config("sum", "far"), optimizer)
    with pytest.raises(ConfigError, match="slots places sum, far in the dense model"):
        EmbeddingBagCollection(parse_embedding_config(config("sum", "far")), SGD(lr=0.1))
    with pytest.raises(ConfigError, match="dense_placement_threshold"):
        parse_embedding_config(config(dense_placement_threshold=2**24 + 1))
