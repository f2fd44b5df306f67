"""Slots in the dense model: values, gradients, moves, export and serving, beside torch and beside servers."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, List  # noqa: UP035 - TorchScript reads these

import numpy as np
import pytest
import torch
from torch import nn

from persia.checkpoint.checkpoints import Source
from persia.config import parse_embedding_config
from persia.ctx import EmbeddingCtx, InferCtx, TrainCtx, eval_ctx, infer
from persia.ctx.base import PreprocessMode
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import ConfigError, FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from persia.job import batch_pipeline
from persia.nn import EmbeddingBagCollection, export
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.dense_ids import DenseIdReader, DenseTable
from persia.pipeline.device_batch import Lane, lane_of
from persia.rows.reader import count_beyond
from persia.serving.embeddings import EmbeddedRows
from persia.serving.exporting import export_to
from persia.serving.predictor import Predictor
from persia.serving.scripts import load_script
from persia.storage.dense_slots import DenseSlots

ROWS, DIM, SAMPLES = 20, 4, 6
SCALINGS = {"sum": {}, "mean": {"mean_scaling": True}, "root.of-sum": {"sqrt_scaling": True}}
DENSE = (*SCALINGS, "far")


class Tower(nn.Module):
    """Sees each number of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.linear = nn.Linear(DIM * (len(SCALINGS) + 1), 1)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(self.linear.weight.shape, generator=generator))
            self.linear.bias.zero_()

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        return self.linear(torch.cat(embeddings, dim=1)).tanh()


def config(*dense: str, **settings: Any) -> dict[str, Any]:
    """Slots of each scaling and one more. Those named in `dense` are in the dense model."""
    slots: dict[str, Any] = {
        name: {"dim": DIM, "cardinality": ROWS, **SCALINGS.get(name, {})} for name in DENSE
    }
    for name in dense:
        slots[name]["placement"] = "dense"
    return {"slots_config": slots, **settings}


def batch(
    seed: int, *, weighted: bool = True, requires_grad: bool = True, size: int = SAMPLES
) -> PersiaBatch:
    """Samples of no ID, one and several; some IDs repeated."""
    random = np.random.default_rng(seed)
    features = []
    for name in DENSE:
        ids = [random.integers(0, ROWS, count).astype(np.uint64) for count in [0, 1, 5, *[3] * (SAMPLES - 3)]]
        weights = [random.random(len(sample)).astype(np.float32) + 0.5 for sample in ids]
        features.append(IDTypeFeature(name, ids, weights if weighted else None))
    labels = [Label(random.random((SAMPLES, 1)).astype(np.float32))]
    return PersiaBatch(features, labels=labels, requires_grad=requires_grad)


def training(model: nn.Module, slots: dict[str, Any], optimizer: Any = None) -> TrainCtx:
    return TrainCtx(
        SGD(lr=0.5),
        optimizer or torch.optim.SGD(model.parameters(), lr=0.5),
        model=model,
        slots=slots,
        embedding_config=EmbeddingConfig(emb_initialization=(-1.0, 1.0), admit_after=3, seed=5),
    )


def step(ctx: TrainCtx, seed: int, **options: Any) -> None:
    output, labels = ctx.forward(ctx.get_embedding_from_data(batch(seed, **options)))
    assert labels is not None
    ctx.backward((output - labels[0]).square().mean())
    ctx.wait_for_gradients()


def predictions(ctx: TrainCtx, seed: int = 99) -> torch.Tensor:
    with torch.no_grad(), eval_ctx(model=ctx.model) as evaluation:
        looked_up = evaluation.get_embedding_from_data(batch(seed, requires_grad=False))
        output, _ = evaluation.forward(looked_up)
    return torch.as_tensor(output)


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
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_training_equals_that_of_embedding_bags(kind: Any, weighted: bool) -> None:
    model = Tower()
    optimizer = kind(model.parameters(), lr=0.1)
    with training(model, config(*DENSE), optimizer) as ctx:
        slots = DenseSlots.find(model)
        assert slots is not None
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


def test_a_load_moves_slots_either_way(tmp_path: Path) -> None:
    placements = [(), ("sum", "mean"), ("mean", "far"), ()]
    expected = None
    for number, dense in enumerate(placements):
        model = Tower()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with training(model, config(*dense), optimizer) as ctx:
            ctx.configure_embedding_parameter_servers(EmbeddingConfig(emb_initialization=(-1.0, 1.0)))
            if number > 0:
                ctx.load_checkpoint(tmp_path / str(number - 1))
                assert ctx.step == 6 * number
                torch.testing.assert_close(predictions(ctx), expected)
            for seed in range(6):
                step(ctx, seed)
            if dense:  # the same again, with the optimizer's state
                ctx.dump_checkpoint(tmp_path / "again")
                step(ctx, 7)
                moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
                rows = [p.detach().clone() for p in model.parameters()]
                ctx.load_checkpoint(tmp_path / "again")
                step(ctx, 7)
                for parameter, moment, row in zip(model.parameters(), moments, rows, strict=True):
                    assert torch.equal(optimizer.state[parameter]["exp_avg"], moment)
                    assert torch.equal(parameter, row)
                ctx.load_checkpoint(tmp_path / "again")
            expected = predictions(ctx)
            ctx.dump_checkpoint(tmp_path / str(number))


def optimizer_of(model: Tower, layout: str) -> torch.optim.Adam:
    """`layout`: how the parameters are divided into groups, if the model has its rows."""
    rows = [p for name, p in model.named_parameters() if "persia_dense_slots" in name]
    weight, bias = model.linear.weight, model.linear.bias
    groups = {
        "one": [[*rows, weight, bias]],
        "apart": [[weight, bias], rows],
        "between": [[weight], [*rows[:1], bias, *rows[1:]]],
    }[layout]
    return torch.optim.Adam(
        [{"params": group, "lr": 0.01 * (1 + number)} for number, group in enumerate(groups) if group]
    )


@pytest.mark.parametrize("layout", ["one", "apart", "between"])
def test_states_keep_their_slots_in_any_group(layout: str, tmp_path: Path) -> None:
    model = Tower()
    with training(model, config("sum", "far"), optimizer_of(model, layout)) as ctx:
        step(ctx, 0)
    optimizer = optimizer_of(model, layout)  # of a model with its rows
    with training(model, config("sum", "far"), optimizer) as ctx:
        step(ctx, 0)
        ctx.dump_checkpoint(tmp_path)
        slots = DenseSlots.find(model)
        assert slots is not None
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.param_groups[-1]["lr"] = 9.0
        moments = {name: optimizer.state[slots.rows(name)]["exp_avg"].clone() for name in slots.tables}
        assert not torch.equal(*moments.values())
        ctx.load_checkpoint(tmp_path)
        assert [group["lr"] for group in optimizer.param_groups] == rates
    again = optimizer_of(fresh := Tower(), layout)  # of one without
    with training(fresh, config("far", "sum"), again) as ctx:
        ctx.load_checkpoint(tmp_path)
        loaded = DenseSlots.find(fresh)
        assert loaded is not None
        for name, moment in moments.items():
            assert torch.equal(again.state[loaded.rows(name)]["exp_avg"], moment)
        assert torch.equal(
            again.state[fresh.linear.weight]["exp_avg"], optimizer.state[model.linear.weight]["exp_avg"]
        )
        step(ctx, 1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.Rprop])
def test_a_load_accepts_more_rows_and_no_fewer(kind: Any, tmp_path: Path) -> None:
    def with_rows(count: int) -> dict[str, Any]:
        slots = config("sum", "far")
        slots["slots_config"]["sum"]["cardinality"] = count
        return slots

    model = Tower()
    with training(model, with_rows(ROWS), kind(model.parameters(), lr=0.01)) as ctx:
        step(ctx, 0)
        ctx.dump_checkpoint(tmp_path)
        slots = DenseSlots.find(model)
        assert slots is not None
        before = slots.rows("sum").detach().clone()

    model = Tower()
    optimizer = kind(model.parameters(), lr=0.01)
    with training(model, with_rows(ROWS + 5), optimizer) as ctx:
        slots = DenseSlots.find(model)
        assert slots is not None
        rows = slots.rows("sum")
        initial = rows.detach().clone()
        last = [
            IDTypeFeature(name, [np.array([ROWS + 4 if name == "sum" else 0], np.uint64)]) for name in DENSE
        ]
        looked_up = ctx.get_embedding_from_data(
            PersiaBatch(last, labels=[Label(np.ones((1, 1)))], requires_grad=True)
        )
        output, _ = ctx.forward(looked_up)
        ctx.backward(output.sum())  # what is trained before a load is replaced
        ctx.load_checkpoint(tmp_path)
        assert torch.equal(rows, torch.cat([before, initial[ROWS:]]))
        first = {torch.optim.Rprop: 0.01}.get(kind, 0.0)
        for key, value in optimizer.state[rows].items():
            if value.ndim > 0:
                assert len(value) == ROWS + 5
                assert (value[ROWS:] == (first if key == "step_size" else 0.0)).all()
                assert value[:ROWS].any()
        step(ctx, 1)

    model = Tower()
    with training(model, with_rows(ROWS - 1), kind(model.parameters(), lr=0.01)) as ctx:
        weight = model.linear.weight.detach().clone()
        with pytest.raises(ConfigError, match=f"'sum' has cardinality {ROWS} .* and {ROWS - 1} and"):
            ctx.load_checkpoint(tmp_path)
        assert torch.equal(model.linear.weight, weight)


def test_ids_that_were_never_trained_begin_when_their_slot_moves(tmp_path: Path) -> None:
    alone = np.array([2], np.uint64)
    with training(Tower(), config()) as ctx:
        ctx.set_embedding("sum", alone, np.full((1, DIM), 9.0, np.float32))
        ctx.dump_checkpoint(tmp_path)
    with training(model := Tower(), config("sum")) as ctx:
        slots = DenseSlots.find(model)
        assert slots is not None
        expected = slots.rows("sum").detach().clone()
        assert expected.all(dim=1).all()
        expected[2] = 9.0
        step(ctx, 0)  # what is trained before a load is replaced
        ctx.load_checkpoint(tmp_path)
        assert torch.equal(slots.rows("sum"), expected)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_rows_beyond_the_cardinality_are_counted_when_their_slot_moves(
    is_sampled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 4096 if is_sampled else 3
    wide = config()
    for name in ("sum", "mean", "far"):
        wide["slots_config"][name]["cardinality"] = ROWS + count
    ids = np.arange(ROWS - 2, ROWS + count, dtype=np.uint64)
    with training(Tower(), wide) as ctx:
        for name, those in (("sum", ids), ("mean", ids[:2]), ("far", ids)):
            ctx.set_embedding(name, those, np.ones((len(those), DIM), np.float32))
        ctx.dump_checkpoint(tmp_path)
    if is_sampled:
        few = partial(count_beyond, max_rows=2048)
        monkeypatch.setattr("persia.ctx.checkpoints.count_beyond", few)
    with training(Tower(), config("sum", "mean")) as ctx:
        ctx.load_checkpoint(tmp_path)
    ((found,),) = [re.findall(r"slot 'sum' moves .*?without (.*?) rows of .*cardinality of 20:", caplog.text)]
    if is_sampled:
        assert 0.7 * count < int(found.removeprefix("about ")) < 1.3 * count
    else:
        assert found == "3"
    assert caplog.text.count("into the dense model without") == 1  # "mean" has none, "far" stays


def test_a_new_slot_keeps_its_initial_values(tmp_path: Path) -> None:
    without = config()
    del without["slots_config"]["far"]
    features = [IDTypeFeature("far", [np.array([2], np.uint64)])]
    with training(Tower(), without) as ctx:
        ctx.dump_checkpoint(tmp_path)
    with training(model := Tower(), config("far")) as ctx:
        slots = DenseSlots.find(model)
        assert slots is not None
        expected = slots.rows("far").detach().clone()
        ctx.load_checkpoint(tmp_path, strict=False)
        assert torch.equal(slots.rows("far"), expected)
        batch_of_it = ctx.get_embedding_from_data(PersiaBatch(features, requires_grad=False))
        _, (embedding,), _ = ctx.prepare_features(batch_of_it)
        assert torch.equal(embedding, expected[[2]])


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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dense", [("sum", "root.of-sum"), DENSE], ids=str)
def test_export_and_serving_predict_the_same(dense: tuple[str, ...], tmp_path: Path) -> None:
    slots = parse_embedding_config(config(*dense))
    with training(Tower(), slots) as ctx:
        for _ in range(3):  # so that servers admit the IDs
            step(ctx, 0)
        expected = predictions(ctx, 0)
        ctx.dump_checkpoint(tmp_path / "c", with_jit_model=True)
        exported = export(ctx)
    given = batch(0, requires_grad=False)
    ids = [torch.from_numpy(f.ids.view(np.int64)) for f in given.id_type_features]
    lengths = [torch.from_numpy(np.diff(f.offsets.astype(np.int64))) for f in given.id_type_features]
    weights = [torch.from_numpy(np.array(f.weights)) for f in given.id_type_features]
    torch.testing.assert_close(exported([], ids, lengths, weights), expected)

    files = export_to(str(tmp_path / "c"), tmp_path / "torch", "torch", slots)
    torch.testing.assert_close(torch.jit.load(str(files[0]))([], ids, lengths, weights), expected)

    source = Source(tmp_path / "c")
    # A config without placements: the model of the checkpoint tells where its rows are.
    for serving in (slots, parse_embedding_config(config())):
        rows = EmbeddedRows(source, serving)
        predictor = Predictor(load_script(source), rows, signature=source.signature)
        torch.testing.assert_close(torch.from_numpy(predictor.predict(given)[0]), expected)
        assert rows.num_missing == 0
    wrong = PersiaBatch(
        [IDTypeFeature(name, [np.array([ROWS], np.uint64)]) for name in DENSE], requires_grad=False
    )
    with pytest.raises(InvalidArgumentError, match=f"the ID {ROWS}"):
        predictor.checked(wrong)


def test_rows_are_set(tmp_path: Path) -> None:
    rows = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM)
    with training(model := Tower(), config("sum")) as ctx:
        ctx.set_embedding("sum", np.array([7, 3], np.uint64), rows)
        slots = DenseSlots.find(model)
        assert slots is not None
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
        slots = DenseSlots.find(model)
        assert slots is not None
        before = slots.rows("sum").detach().clone()
        with pytest.raises((InvalidArgumentError, InvalidTypeError), match=message):
            ctx.set_embedding(slot, ids, rows)
        assert torch.equal(slots.rows("sum"), before)


def test_a_model_keeps_its_rows_in_a_second_context() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with training(model, config("sum"), optimizer) as ctx:
        step(ctx, 0)
        slots = DenseSlots.find(model)
        assert slots is not None
        before = slots.rows("sum").detach().clone()
    with training(model, config("sum"), optimizer):
        assert torch.equal(slots.rows("sum"), before)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 3
    with pytest.raises(FailedPreconditionError, match="make the model anew"):
        training(model, config("mean"), optimizer)


def test_a_model_that_an_evaluation_had_first_gets_initial_values(tmp_path: Path) -> None:
    model = Tower()
    with EmbeddingCtx(PreprocessMode.EVAL, model=model, slots=config("sum")):
        pass
    with training(model, config("sum")) as ctx:
        slots = DenseSlots.find(model)
        assert slots is not None
        assert slots.rows("sum").all()
        ctx.set_embedding("sum", np.array([3], np.uint64), np.full((1, DIM), 9.0, np.float32))
        before = slots.rows("sum").detach().clone()
        ctx.dump_checkpoint(tmp_path)
    loaded = Tower()
    with EmbeddingCtx(PreprocessMode.EVAL, model=loaded, slots=config("sum")) as evaluation:
        evaluation.load_checkpoint(tmp_path)
    with training(loaded, config("sum")):
        slots = DenseSlots.find(loaded)
        assert slots is not None
        assert torch.equal(slots.rows("sum"), before)


def test_initial_values_follow_the_config_until_the_first_step(tmp_path: Path) -> None:
    constant = EmbeddingConfig(emb_initialization=(0.25, 0.25))
    with training(model := Tower(), config(*DENSE)) as ctx:
        slots = DenseSlots.find(model)
        assert slots is not None
        ctx.configure_embedding_parameter_servers(constant)
        assert (slots.rows("sum") == 0.25).all()
        ctx.dump_checkpoint(tmp_path)
        step(ctx, 0)
        trained = slots.rows("sum").detach().clone()
        ctx.configure_embedding_parameter_servers(EmbeddingConfig())
        assert torch.equal(slots.rows("sum"), trained)
    with training(model := Tower(), config(*DENSE)) as ctx:
        slots = DenseSlots.find(model)
        assert slots is not None
        ctx.load_checkpoint(tmp_path)
        ctx.configure_embedding_parameter_servers(EmbeddingConfig())
        assert (slots.rows("sum") == 0.25).all()


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


def test_the_dense_part_of_a_checkpoint_alone_moves_its_rows_to_servers(tmp_path: Path) -> None:
    with training(model := Tower(), config("sum")) as ctx:
        step(ctx, 0)
        slots = DenseSlots.find(model)
        assert slots is not None
        ctx.dump_checkpoint(tmp_path / "all")
    (tmp_path / "torch").mkdir()
    for name in ("dense.pt", "opt.pt"):
        (tmp_path / "torch" / name).write_bytes(Source(tmp_path / "all").dense(name))
    features = [IDTypeFeature("sum", [np.array([2], np.uint64)])]
    with training(Tower(), config()) as ctx:
        ctx.load_checkpoint(tmp_path / "torch")
        looked_up = ctx.get_embedding_from_data(PersiaBatch(features, requires_grad=False))
        _, (embedding,), _ = ctx.prepare_features(looked_up)
        assert torch.equal(embedding, slots.rows("sum")[[2]])


def test_a_schedule_that_exists_rules_the_rows() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    with training(model, config("sum"), optimizer) as ctx:
        step(ctx, 0)
        schedule.step()
        slots = DenseSlots.find(model)
        assert slots is not None
        before = slots.rows("sum").detach().clone()
        step(ctx, 1)
        assert torch.equal(slots.rows("sum"), before)


def test_the_threshold_places_what_it_can() -> None:
    settings: dict[str, Any] = {
        "small": {"dim": 2, "cardinality": 10},
        "large": {"dim": 2, "cardinality": 11},
        "unknown": {"dim": 2},
        "kept": {"dim": 2, "cardinality": 1, "placement": "servers"},
        "chosen": {"dim": 2, "cardinality": 1000, "placement": "dense"},
        "raw": {"dim": 2, "cardinality": 10, "embedding_summation": False},
        "slow": {"dim": 2, "cardinality": 10, "admit_after": 2},
        "one": {"dim": 2, "cardinality": 10},
        "other": {"dim": 2, "cardinality": 10},
    }
    slots: dict[str, Any] = {"slots_config": settings, "feature_groups": {"both": ["one", "other"]}}
    without = parse_embedding_config(slots)
    assert list(without.dense_slots) == ["chosen"]
    with_it = parse_embedding_config({**slots, "dense_placement_threshold": 10})
    assert list(with_it.dense_slots) == ["small", "chosen"]
    assert with_it.slot_modes == ("", "dense")
    assert without.schema_hash() != with_it.schema_hash()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs cardinality"),
        ({"cardinality": 2**24 + 1}, "cardinality of 16777217 is more than the 16777216"),
        ({"cardinality": 5, "embedding_summation": False}, "excludes embedding_summation=false"),
        ({"cardinality": 5, "admit_after": 2}, "excludes admit_after"),
        ({"cardinality": 5, "time_to_live_sec": 2.0}, "excludes time_to_live_sec"),
        ({"cardinality": 5, "optimizer": {"name": "sgd", "lr": 1.0}}, "excludes optimizer"),
        ({"cardinality": 5, "embedding_staleness": 2}, "excludes consistency 'hybrid 2'"),
        (
            {"cardinality": 5, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 9}},
            "excludes hash_stack_config",
        ),
    ],
    ids=str,
)
def test_what_excludes_a_slot_from_the_dense_model(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_embedding_config({"slots_config": {"a": {"dim": 2, "placement": "dense", **settings}}})


def test_slots_of_one_group_share_rows_on_servers() -> None:
    slots = {name: {"dim": 2, "cardinality": 5} for name in ("a", "b")}
    slots["b"]["placement"] = "dense"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="placement differ"):
        parse_embedding_config({"slots_config": slots, "feature_groups": {"both": ["a", "b"]}})
