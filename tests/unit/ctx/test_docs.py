"""Runs the snippets of the pages about training scripts and checkpoints.

What stands for something longer there, `...` or a name of the script around it, is something small here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from persia.ctx import DataCtx, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad

DOCS = Path(__file__).parents[3] / "docs"
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SLOTS = {"slots_config": {"user": {"dim": 16}}}
NUM_BATCHES = 5

# What each snippet has, and no other of its page.
MARKS = {
    "training.md": [
        "def load():",
        "from persia.helper import",  # run by tests/integration/test_helper.py, as it starts processes
        "mask = raw",
        "ctx.accumulate()",
        "before_dense_step",
        "LRSchedule",
        "eval_ctx",
        "InferCtx",
    ],
    "checkpoints.md": ["keep_last=3", "get_resume_checkpoint"],
    "recipes.md": ["pyarrow.dataset", "patience", "add_scalar"],
}


def snippet(page: str, mark: str) -> tuple[str, str]:
    """(the one with this mark, at its lines of the page, so that a traceback leads there; its file)."""
    text = (DOCS / page).read_text()
    (found,) = [match for match in SNIPPET.finditer(text) if mark in match.group(1)]
    return "\n" * text[: found.start(1)].count("\n") + found.group(1), str(DOCS / page)


def run(page: str, mark: str, names: dict[str, Any]) -> None:
    exec(compile(*snippet(page, mark), "exec"), names)


def make_batch(*, requires_grad: bool = True) -> PersiaBatch:
    return PersiaBatch(
        [IDTypeFeature("user", [np.array(ids, np.uint64) for ids in ([1, 2], [], [3])])],
        non_id_type_features=[NonIDTypeFeature(np.ones((3, 1), np.float32))],
        labels=[Label(np.array([[0], [1], [1]], np.float32))],
        requires_grad=requires_grad,
    )


class Batches(IterableDataset):
    requires_grad = True

    def __iter__(self) -> Iterator[PersiaBatch]:
        return (make_batch(requires_grad=self.requires_grad) for _ in range(NUM_BATCHES))


class EvaluationBatches(Batches):
    requires_grad = False


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1 + 16, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return torch.sigmoid(self.linear(torch.cat([dense[0], embeddings[0]], dim=1)))


@pytest.fixture
def made() -> list[TrainCtx]:
    """The contexts that a snippet has made."""
    return []


@pytest.fixture
def names(made: list[TrainCtx]) -> dict[str, Any]:
    """What the script around a snippet has."""
    model, optimizer = Model(), Adagrad(lr=1e-2)

    def train_ctx(*omitted: Any, **options: Any) -> TrainCtx:
        assert all(argument is ... for argument in omitted)
        arguments: dict[str, Any] = {
            "model": model,
            "embedding_optimizer": optimizer,
            "dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "mixed_precision": False,
            "slots": SLOTS,
        }
        made.append(TrainCtx(**(arguments | options)))
        return made[-1]

    return {
        "Adagrad": Adagrad,
        "DataCtx": DataCtx,
        "DataLoader": DataLoader,
        "StreamingDataset": StreamingDataset,
        "TestBatches": EvaluationBatches,
        "TrainCtx": train_ctx,
        "embedding_optimizer": optimizer,
        "eval_ctx": eval_ctx,
        "loader": DataLoader(Batches()),
        "loss_fn": torch.nn.BCELoss(),
        "model": model,
        "my_batches": Batches,
        "nullcontext": nullcontext,
        "torch": torch,
    }


@pytest.mark.parametrize("page", MARKS)
def test_every_snippet_of_the_page_is_known(page: str) -> None:
    text = (DOCS / page).read_text()
    found = SNIPPET.findall(text)
    assert len(found) == text.count("```python\n")
    assert [mark for mark in MARKS[page] for source in found if mark in source] == MARKS[page]


def test_a_script_in_one_process(names: dict[str, Any], made: list[TrainCtx]) -> None:
    run("training.md", "def load():", names)
    assert made[0].counters.batches_trained == NUM_BATCHES


def test_the_average_of_a_raw_slot(names: dict[str, Any]) -> None:
    names["raw"] = torch.zeros(1, 4, 3)
    names["raw"][0, :2] = torch.tensor([[2.0, 4.0, 1.0], [4.0, 8.0, 1.0]])
    run("training.md", "mask = raw", names)
    assert names["mean"].tolist() == [[3.0, 6.0]]


@pytest.mark.parametrize("mark", ["ctx.accumulate()", "LRSchedule"])
def test_loops(names: dict[str, Any], mark: str) -> None:
    with names["TrainCtx"]() as ctx:
        run("training.md", mark, names | {"ctx": ctx})
        ctx.wait_for_gradients()
        assert ctx.counters.batches_trained == NUM_BATCHES
    if mark == "LRSchedule":
        assert names["embedding_optimizer"].lr == pytest.approx(1e-4 + 1e-2 * 0.99 * NUM_BATCHES / 1000)


def test_hooks(names: dict[str, Any], made: list[TrainCtx]) -> None:
    run("training.md", "before_dense_step", names)
    with made[0] as ctx:
        for batch in names["loader"]:
            output, labels = ctx.forward(batch)
            ctx.backward(names["loss_fn"](output, labels[0]))
    assert ctx.counters.batches_trained == NUM_BATCHES


def test_evaluation(names: dict[str, Any], made: list[TrainCtx]) -> None:
    run("training.md", "eval_ctx", names)
    assert names["evaluation"].counters.batches_evaluated == NUM_BATCHES
    assert made[0].counters.batches_received == 0


def test_inference(
    names: dict[str, Any], embedding_worker: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", embedding_worker(SLOTS, {"user": {1: 1.0, 2: 2.0}}))
    names["message"] = make_batch(requires_grad=False).to_bytes()
    run("training.md", "InferCtx", names)
    with names["ctx"]:  # ends it
        assert names["embeddings"][0].tolist() == [[3.0] * 16, [0.0] * 16, [0.0] * 16]
        assert names["dense"][0].tolist() == [[1.0]] * 3


def test_checkpoints(names: dict[str, Any], made: list[TrainCtx], tmp_path: Path) -> None:
    with names["TrainCtx"]() as ctx:
        ctx.dump_checkpoint(tmp_path, step=0, keep_last=3)
    source, page = snippet("checkpoints.md", "keep_last=3")
    source = source.replace("s3://models/ads", str(tmp_path)).replace("        ...\n", TRAINING)
    exec(compile(source.replace("10_000", "2"), page, "exec"), names)
    assert made[1].counters.batches_trained == made[1].step == NUM_BATCHES
    steps = [path.name for path in sorted(tmp_path.glob("step-*"))]
    assert steps == [f"step-{step:012}" for step in (2, 4, 5)]
    assert (tmp_path / steps[-1] / "jit_dense.pt").is_file()


def test_reading_parquet_files(names: dict[str, Any], made: list[TrainCtx], tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    rows = {"user": [["a", "b"], None, ["c"]] * 2, "age": [1, 2, 3] * 2, "clicked": [0, 1, 1] * 2}
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(rows), tmp_path / "one", row_group_size=3)
    source, page = snippet("recipes.md", "pyarrow.dataset")
    exec(compile(source.replace("clicks/", str(tmp_path)).replace("1024", "3"), page, "exec"), names)
    with names["TrainCtx"]() as ctx:
        for batch in DataLoader(StreamingDataset(loader=names["load"])):
            output, labels = ctx.forward(batch)
            ctx.backward(names["loss_fn"](output, labels[0]))
    assert ctx.counters.batches_trained == 2


def test_early_stopping(names: dict[str, Any], made: list[TrainCtx], tmp_path: Path) -> None:
    source, page = snippet("recipes.md", "patience")
    source = source.replace("s3://models/best", str(tmp_path / "best")).replace("1_000 ==", "1 ==")
    for parameter in names[
        "model"
    ].parameters():  # the first step then separates the labels, whatever the seed
        torch.nn.init.zeros_(parameter)
    exec(compile(source, page, "exec"), names)
    assert (tmp_path / "best" / "jit_dense.pt").is_file()
    assert (names["best"], names["patience"], made[0].step) == (1.0, 0, 4)


def test_reported_metrics(names: dict[str, Any], made: list[TrainCtx]) -> None:
    steps: list[int] = []
    names["writer"] = SimpleNamespace(add_scalar=lambda name, value, step: steps.append(step))
    run("recipes.md", "add_scalar", names)
    assert steps == [1, 2, 3, 4, 5]


TRAINING = """\
        output, labels = ctx.forward(batch)
        ctx.backward(loss_fn(output, labels[0]))
"""


def test_going_on_from_a_checkpoint(
    names: dict[str, Any], made: list[TrainCtx], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with names["TrainCtx"]() as ctx:
        ctx.dump_checkpoint(tmp_path / "model", step=7)
    monkeypatch.setenv("PERSIA_RESUME_CHECKPOINT", str(tmp_path / "model"))
    run("checkpoints.md", "get_resume_checkpoint", names)
    assert made[1].step == 7
