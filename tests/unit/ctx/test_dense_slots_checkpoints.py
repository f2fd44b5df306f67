"""Slots in the dense model: moves, growth, states of optimizers, initial values, export and serving."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia.checkpoint.checkpoints import Source
from persia.config import parse_embedding_config
from persia.ctx import EmbeddingCtx
from persia.ctx.base import PreprocessMode
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
from persia.errors import ConfigError, InvalidArgumentError, UnavailableError
from persia.nn import export
from persia.rows.beyond import count_beyond
from persia.rows.reader import RowReader
from persia.serving.embeddings import EmbeddedRows
from persia.serving.exporting import export_to
from persia.serving.predictor import Predictor
from persia.serving.scripts import load_script
from persia.storage.dense_slots import _IDS_AT_A_TIME, DenseSlots, DenseSlotsOptimizer
from tests.dense_slots_job import (
    ADAGRAD,
    DENSE,
    DIM,
    ROWS,
    Tower,
    batch,
    config,
    predictions,
    rows_of,
    step,
    training,
)


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
        slots = rows_of(model)
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.param_groups[-1]["lr"] = 9.0
        moments = {name: optimizer.state[slots.rows(name)]["exp_avg"].clone() for name in slots.tables}
        assert not torch.equal(*moments.values())
        ctx.load_checkpoint(tmp_path)
        assert [group["lr"] for group in optimizer.param_groups] == rates
    again = optimizer_of(fresh := Tower(), layout)  # of one without
    with training(fresh, config("far", "sum"), again) as ctx:
        ctx.load_checkpoint(tmp_path)
        loaded = rows_of(fresh)
        for name, moment in moments.items():
            assert torch.equal(again.state[loaded.rows(name)]["exp_avg"], moment)
        assert torch.equal(
            again.state[fresh.linear.weight]["exp_avg"], optimizer.state[model.linear.weight]["exp_avg"]
        )
        step(ctx, 1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, ADAGRAD, torch.optim.Rprop])
def test_a_load_accepts_more_rows_and_no_fewer(kind: Any, tmp_path: Path) -> None:
    def with_rows(count: int) -> dict[str, Any]:
        slots = config("sum", "far")
        slots["slots_config"]["sum"]["cardinality"] = count
        return slots

    model = Tower()
    with training(model, with_rows(ROWS), kind(model.parameters(), lr=0.01)) as ctx:
        step(ctx, 0)
        ctx.dump_checkpoint(tmp_path)
        slots = rows_of(model)
        before = slots.rows("sum").detach().clone()

    model = Tower()
    optimizer = kind(model.parameters(), lr=0.01)
    with training(model, with_rows(ROWS + 5), optimizer) as ctx:
        slots = rows_of(model)
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
        begin = {"step_size": 0.01, "sum": 0.1}  # of Rprop and Adagrad
        for key, value in optimizer.state[rows].items():
            if value.ndim > 0:
                assert len(value) == ROWS + 5
                assert (value[ROWS:] == begin.get(key, 0.0)).all()
                assert value[:ROWS].any()
        step(ctx, 1)

    model = Tower()
    with training(model, with_rows(ROWS - 1), kind(model.parameters(), lr=0.01)) as ctx:
        weight = model.linear.weight.detach().clone()
        with pytest.raises(ConfigError, match=f"'sum' has cardinality {ROWS} .* and {ROWS - 1} and"):
            ctx.load_checkpoint(tmp_path)
        assert torch.equal(model.linear.weight, weight)


def test_states_of_new_rows_begin_with_the_setting_of_their_group() -> None:
    def made(count: int) -> tuple[torch.optim.Rprop, torch.nn.Parameter, DenseSlotsOptimizer]:
        slots = config("sum")
        slots["slots_config"]["sum"]["cardinality"] = count
        found = DenseSlots.attach(model := Tower(), parse_embedding_config(slots), None)
        groups = [{"params": model.linear.parameters()}, {"params": [found.rows("sum")], "lr": 0.25}]
        optimizer = torch.optim.Rprop(groups, lr=0.5)
        return optimizer, found.rows("sum"), DenseSlotsOptimizer(optimizer, found)

    optimizer, rows, before = made(ROWS)
    rows.grad = torch.ones_like(rows)
    optimizer.step()
    optimizer, rows, after = made(ROWS + 5)
    after.load_state_dict(before.state_dict())
    assert torch.equal(optimizer.state[rows]["step_size"][ROWS:], torch.full((5, DIM), 0.25))


def test_ids_that_were_never_trained_begin_when_their_slot_moves(tmp_path: Path) -> None:
    alone = np.array([2], np.uint64)
    with training(Tower(), config()) as ctx:
        ctx.set_embedding("sum", alone, np.full((1, DIM), 9.0, np.float32))
        ctx.dump_checkpoint(tmp_path)
    with training(model := Tower(), config("sum")) as ctx:
        slots = rows_of(model)
        expected = slots.rows("sum").detach().clone()
        assert expected.all(dim=1).all()
        expected[2] = 9.0
        step(ctx, 0)  # what is trained before a load is replaced
        ctx.load_checkpoint(tmp_path)
        assert torch.equal(slots.rows("sum"), expected)


def half_of_the_rows(folder: Path) -> int:
    return sum(entry.num_bytes for entry in RowReader(folder).section.files) // 2


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
        few = partial(count_beyond, max_bytes=half_of_the_rows(tmp_path))
        monkeypatch.setattr("persia.rows.beyond.count_beyond", few)
    with training(Tower(), config("sum", "mean")) as ctx:
        ctx.load_checkpoint(tmp_path)
    ((found,),) = [re.findall(r"slot 'sum' moves .*?without (.*?) rows of .*cardinality of 20:", caplog.text)]
    if is_sampled:
        assert 0.7 * count < int(found.removeprefix("about ")) < 1.3 * count
    else:
        assert found == "3"
    assert caplog.text.count("into the dense model without") == 1  # "mean" has none, "far" stays


def test_a_failure_to_count_rows_does_not_fail_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise UnavailableError("the object store is overloaded")

    with training(Tower(), config()) as ctx:
        ctx.set_embedding("sum", np.array([2], np.uint64), np.full((1, DIM), 9.0, np.float32))
        ctx.dump_checkpoint(tmp_path)
    monkeypatch.setattr("persia.rows.beyond.count_beyond", fails)
    with training(model := Tower(), config("sum")) as ctx:
        ctx.load_checkpoint(tmp_path)
        assert torch.equal(rows_of(model).rows("sum")[2], torch.full((DIM,), 9.0))
    assert "were not counted: the object store is overloaded" in caplog.text


def test_a_new_slot_keeps_its_initial_values(tmp_path: Path) -> None:
    without = config()
    del without["slots_config"]["far"]
    features = [IDTypeFeature("far", [np.array([2], np.uint64)])]
    with training(Tower(), without) as ctx:
        ctx.dump_checkpoint(tmp_path)
    with training(model := Tower(), config("far")) as ctx:
        slots = rows_of(model)
        expected = slots.rows("far").detach().clone()
        ctx.load_checkpoint(tmp_path, strict=False)
        assert torch.equal(slots.rows("far"), expected)
        batch_of_it = ctx.get_embedding_from_data(PersiaBatch(features, requires_grad=False))
        _, (embedding,), _ = ctx.prepare_features(batch_of_it)
        assert torch.equal(embedding, expected[[2]])


def test_the_dense_part_of_a_checkpoint_alone_moves_its_rows_to_servers(tmp_path: Path) -> None:
    with training(model := Tower(), config("sum")) as ctx:
        step(ctx, 0)
        slots = rows_of(model)
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


def test_a_model_that_an_evaluation_had_first_gets_initial_values(tmp_path: Path) -> None:
    model = Tower()
    with EmbeddingCtx(PreprocessMode.EVAL, model=model, slots=config("sum")):
        pass
    with training(model, config("sum")) as ctx:
        slots = rows_of(model)
        assert slots.rows("sum").all()
        ctx.set_embedding("sum", np.array([3], np.uint64), np.full((1, DIM), 9.0, np.float32))
        before = slots.rows("sum").detach().clone()
        ctx.dump_checkpoint(tmp_path)
    loaded = Tower()
    with EmbeddingCtx(PreprocessMode.EVAL, model=loaded, slots=config("sum")) as evaluation:
        evaluation.load_checkpoint(tmp_path)
    with training(loaded, config("sum")):
        slots = rows_of(loaded)
        assert torch.equal(slots.rows("sum"), before)


def test_initial_values_of_several_blocks_are_those_of_servers() -> None:
    count = _IDS_AT_A_TIME + 1
    own, theirs = config("sum"), config()
    for slots in (own, theirs):
        slots["slots_config"]["sum"]["cardinality"] = count
    with training(model := Tower(), own):
        rows = rows_of(model).rows("sum").detach().clone()
    assert rows.all(dim=1).all()
    with training(Tower(), theirs) as ctx:
        ctx.configure_embedding_parameter_servers(EmbeddingConfig(emb_initialization=(-1.0, 1.0), seed=5))
        ids = [0, count - 2, count - 1]
        features = [IDTypeFeature("sum", [np.array([one], np.uint64) for one in ids])]
        looked_up = ctx.get_embedding_from_data(
            PersiaBatch(features, labels=[Label(np.ones((3, 1)))], requires_grad=True)
        )
        _, (embedding,), _ = ctx.prepare_features(looked_up)
        assert torch.equal(embedding, rows[ids])


def test_initial_values_follow_the_config_until_the_first_step(tmp_path: Path) -> None:
    constant = EmbeddingConfig(emb_initialization=(0.25, 0.25))
    with training(model := Tower(), config(*DENSE)) as ctx:
        slots = rows_of(model)
        ctx.configure_embedding_parameter_servers(constant)
        assert (slots.rows("sum") == 0.25).all()
        ctx.dump_checkpoint(tmp_path)
        step(ctx, 0)
        trained = slots.rows("sum").detach().clone()
        ctx.configure_embedding_parameter_servers(EmbeddingConfig())
        assert torch.equal(slots.rows("sum"), trained)
    with training(model := Tower(), config(*DENSE)) as ctx:
        slots = rows_of(model)
        ctx.load_checkpoint(tmp_path)
        ctx.configure_embedding_parameter_servers(EmbeddingConfig())
        assert (slots.rows("sum") == 0.25).all()


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
