"""What the code blocks of each page need around them: names, files, and running jobs."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml

from persia.ctx import DataCtx, Recovery
from persia.data import DataLoader, StreamingDataset
from persia.env import get_resume_checkpoint
from persia.pmem import HAS_PMEM
from tests.documented import REPOSITORY
from tests.documented_stage import (
    NUM_BATCHES,
    SLOTS,
    TRAINING,
    Stage,
    around,
    make_batch,
    running_job,
    script,
    training,
    training_job,
    training_on_a_thread,
)
from tests.kuairand_log import write_log


@around("tutorial.md")
def _(stage: Stage) -> Iterator[None]:
    pytest.importorskip("pyarrow")
    patch = stage.fixture("monkeypatch")
    if "KUAIRAND_DIR" not in os.environ:
        for seed, name in enumerate(("val", "test")):
            write_log(stage.folder / f"{name}.parquet", seed)
        patch.setenv("KUAIRAND_DIR", str(stage.folder))
    patch.setenv("KUAIRAND_ROWS", os.environ.get("KUAIRAND_ROWS", "20000"))
    yield
    # 20,000 rows of KuaiRand-Pure give 0.64; all of them 0.70.
    assert stage.names["quality"].auc > 0.6
    assert stage.names["model"].bags.stats().num_rows > 400


@around("convert_and_export.md", "process_group=torch.distributed")
def _(stage: Stage) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{stage.folder}/ranks", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@around("convert_and_export.md", "persia-launcher local")
def _(stage: Stage) -> Iterator[None]:
    model, loop, with_servers = (
        next(source for source in stage.sources if mark in source)
        for mark in ("class Model", "for step in", "with job_servers")
    )
    source = f"{model}\n{with_servers}\n{textwrap.indent(loop, '    ')}    assert servers is not None\n"
    (stage.folder / "train.py").write_text(source)
    yield


@around("training.md")
@around("optimizers.md")
@around("checkpoints.md")
@around("recipes.md")
def _(stage: Stage) -> Iterator[None]:
    script(stage)
    yield


@around("training.md", "def load():")
def _(stage: Stage) -> Iterator[None]:
    yield
    assert stage.names["ctx"].counters.batches_trained == NUM_BATCHES


@around("training.md", "data_loader_replica_num=4")
@around("training.md", "embedding_parameter_replica_num=2")
def _(stage: Stage) -> Iterator[None]:
    (stage.folder / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS))
    # Its function is of this module, which the loader's process imports.
    stage.fixture("monkeypatch").syspath_prepend(str(REPOSITORY))
    loop = f"        for batch in DataLoader(StreamingDataset()):\n{textwrap.indent(TRAINING, '    ')}"
    stage.replaced = {"        ...\n": loop, "replica_num=4": "replica_num=2"}
    yield
    loaders = 2 if "data_loader_replica_num" in stage.sources[-1] else 1
    assert stage.contexts[-1].counters.batches_trained == loaders * NUM_BATCHES
    stage.replaced = {}


@around("training.md", "mask = raw")
def _(stage: Stage) -> Iterator[None]:
    stage.names["raw"] = torch.zeros(1, 4, 3)
    stage.names["raw"][0, :2] = torch.tensor([[2.0, 4.0, 1.0], [4.0, 8.0, 1.0]])
    yield
    assert stage.names["mean"].tolist() == [[3.0, 6.0]]


@around("training.md", "ctx.accumulate()")
def _(stage: Stage) -> Iterator[None]:
    with training(stage):
        yield


@around("training.md", "before_dense_step")
def _(stage: Stage) -> Iterator[None]:
    yield
    names = stage.names
    with stage.contexts[-1] as ctx:
        for batch in names["loader"]:
            output, labels = ctx.forward(batch)
            ctx.backward(names["loss_fn"](output, labels[0]))
    assert ctx.counters.batches_trained == NUM_BATCHES


@around("optimizers.md", "LRSchedule")
def _(stage: Stage) -> Iterator[None]:
    with training(stage):
        yield
    assert stage.names["embedding_optimizer"].lr == pytest.approx(1e-4 + 1e-2 * 0.99 * NUM_BATCHES / 1000)


@around("training.md", "eval_ctx")
def _(stage: Stage) -> Iterator[None]:
    yield
    assert stage.names["evaluation"].counters.batches_evaluated == NUM_BATCHES
    assert stage.contexts[-1].counters.batches_received == 0


@around("training.md", "InferCtx")
def _(stage: Stage) -> Iterator[None]:
    address = stage.fixture("embedding_worker")(SLOTS, {"user": {1: 1.0, 2: 2.0}})
    stage.fixture("monkeypatch").setenv("EMBEDDING_WORKER_SERVICE", address)
    stage.names["message"] = make_batch(requires_grad=False).to_bytes()
    yield
    with stage.names["ctx"]:  # ends it
        assert stage.names["embeddings"][0].tolist() == [[3.0] * 16, [0.0] * 16, [0.0] * 16]
        assert stage.names["dense"][0].tolist() == [[1.0]] * 3


@around("checkpoints.md", "keep_last=3")
def _(stage: Stage) -> Iterator[None]:
    folder = stage.folder / "model"
    with stage.names["TrainCtx"]() as ctx:
        ctx.dump_checkpoint(folder, step=0, keep_last=3)
    stage.replaced = {"s3://models/ads": str(folder), "        ...\n": TRAINING, "10_000": "2"}
    yield
    assert stage.contexts[-1].counters.batches_trained == stage.contexts[-1].step == NUM_BATCHES
    steps = [path.name for path in sorted(folder.glob("step-*"))]
    assert steps == [f"step-{step:012}" for step in (2, 4, 5)]
    assert (folder / steps[-1] / "jit_dense.pt").is_file()


@around("checkpoints.md", "get_resume_checkpoint")
def _(stage: Stage) -> Iterator[None]:
    stage.fixture("monkeypatch").setenv("PERSIA_RESUME_CHECKPOINT", str(stage.folder / "model"))
    yield
    assert stage.contexts[-1].step == NUM_BATCHES


SIGNED = """
import torch
from persia import TrainCtx
from persia.embedding.optim import Adagrad

model = torch.nn.Linear(16, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
with TrainCtx(Adagrad(lr=0.1), sgd, model=model, slots={"slots_config": {"user": {"dim": 16}}}) as ctx:
    ctx.dump_checkpoint("signed/")
"""


@around("checkpoints.md", "signing-key create")
def _(stage: Stage) -> Iterator[None]:
    (stage.folder / "train.py").write_text(SIGNED)
    before = stage.replaced
    stage.replaced = {"verify model/": "verify signed/"}
    yield
    stage.replaced = before


@around("checkpoints.md", "checkpoint load s3")
def _(stage: Stage) -> Iterator[None]:
    before = stage.replaced
    stage.replaced = {"s3://models/rows": str(stage.folder / "rows_of_servers")}
    with running_job(stage) as ctx:
        yield
        assert ctx.get_embedding_size() == [1]
    stage.replaced, stage.job = before, {}


@around("checkpoints.md", "checkpoint inspect")
def _(stage: Stage) -> Iterator[None]:
    pytest.importorskip("pyarrow")
    stage.replaced |= {"step-000000010000": "step-000000000002", "step-000000020000": "step-000000000005"}
    yield
    assert [*stage.folder.glob("rows/*.parquet")]


@around("recipes.md", "pyarrow.dataset")
def _(stage: Stage) -> Iterator[None]:
    arrow = pytest.importorskip("pyarrow")
    rows = {"user": [["a", "b"], None, ["c"]] * 2, "age": [1, 2, 3] * 2, "clicked": [0, 1, 1] * 2}
    (stage.folder / "clicks").mkdir()
    path = stage.folder / "clicks" / "one"
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(rows), path, row_group_size=3)
    stage.replaced = {"1024": "3"}
    yield
    names = stage.names
    with names["TrainCtx"]() as ctx:
        for batch in DataLoader(StreamingDataset(loader=names["load"])):
            output, labels = ctx.forward(batch)
            ctx.backward(names["loss_fn"](output, labels[0]))
    assert ctx.counters.batches_trained == 2


@around("recipes.md", "patience")
def _(stage: Stage) -> Iterator[None]:
    stage.replaced = {"s3://models/best": str(stage.folder / "best"), "1_000 ==": "1 =="}
    for parameter in stage.names["model"].parameters():  # then the first step separates the labels
        torch.nn.init.zeros_(parameter)
    yield
    assert (stage.folder / "best" / "jit_dense.pt").is_file()
    stopping = stage.names["stopping"]
    assert (stopping.best["auc"], stopping.since_best, stage.contexts[-1].step) == (1.0, 3, 4)


@around("recipes.md", "add_scalar")
def _(stage: Stage) -> Iterator[None]:
    steps: list[int] = []
    stage.names["writer"] = SimpleNamespace(add_scalar=lambda name, value, step: steps.append(step))
    yield
    assert steps == [1, 2, 3, 4, 5]


@around("operations.md", "launcher doctor")
def _(stage: Stage) -> Iterator[None]:
    script(stage)
    with running_job(stage):
        yield
    stage.job = {}


@around("tiers.md", "pmem.create")
def _(stage: Stage) -> Iterator[None]:
    stage.replaced = {"/mnt/pmem/ps0": str(stage.folder / "ps0")}
    if not HAS_PMEM:
        stage.replaced['kind="pmem"'] = 'kind="file"'
    yield
    assert stage.names["pmem"].inspect(str(stage.folder / "ps0"))


@around("operations.md")
def _(stage: Stage) -> Iterator[None]:
    stage.names |= {"step": 1, "auc": 0.7, "loss": torch.tensor(0.5)}
    yield


@around("operations.md", "launcher trace")
def _(stage: Stage) -> Iterator[None]:
    script(stage)
    with training_job(stage):
        yield
    assert json.loads((stage.folder / "trace.json").read_text())["traceEvents"]


@around("checkpoints.md", "--with-dense")
def _(stage: Stage) -> Iterator[None]:
    before, folder = stage.replaced, stage.folder / "ads"
    old = stage.folder / "old"
    stage.replaced = {"s3://models/ads": str(folder), "s3://models/old": str(old)}
    with training_job(stage) as ctx:
        ctx.dump_embedding(old)
        yield
    assert (folder / "dense.pt").is_file()
    assert not old.exists()
    stage.replaced = before


@around("recovery.md")
def _(stage: Stage) -> Iterator[None]:
    """A script whose loader, another thread of this process, can resume."""

    def load() -> None:
        with DataCtx() as data:
            for _ in range(data.resume(), NUM_BATCHES):
                data.send_data(make_batch())

    script(stage)
    optimizer = torch.optim.SGD(stage.names["model"].parameters(), lr=0.1)
    stage.names |= {
        "Recovery": Recovery,
        "StreamingDataset": lambda: StreamingDataset(loader=load),
        "TrainCtx": partial(stage.names["TrainCtx"], dense_optimizer=optimizer),
        "get_resume_checkpoint": get_resume_checkpoint,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    yield


@around("recovery.md", "every_steps=1000")
def _(stage: Stage) -> Iterator[None]:
    folder = stage.folder / "job"
    stage.replaced = {"/shared/job": str(folder), "=1000": "=2", "        ...\n": TRAINING}
    yield
    assert stage.contexts[-1].step == NUM_BATCHES
    assert (folder / "step-000000000004" / "dense.pt").is_file()


RESTARTED = """
import os
from pathlib import Path
import torch
from persia import DataLoader, StreamingDataset, TrainCtx
from persia.ctx import Recovery
from persia.embedding.optim import Adagrad

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 1)

    def forward(self, dense, embeddings):
        return self.linear(embeddings[0])

model = Model()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
with TrainCtx(Adagrad(lr=0.1), sgd, model=model, recovery=Recovery("job", every_steps=2)) as ctx:
    for batch in DataLoader(StreamingDataset()):
        logits, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[0]))
        if ctx.step == 3 and not Path("died").exists():
            Path("died").touch()
            os._exit(1)
    Path("steps").write_text(str(ctx.step))
"""
RESUMING = """
import numpy as np
from persia import DataCtx, IDTypeFeature, Label, PersiaBatch

with DataCtx() as data:
    for _ in range(data.resume(), 5):
        users = IDTypeFeature("user", [np.array([1], np.uint64)])
        data.send_data(PersiaBatch([users], labels=[Label(np.ones((1, 1), np.float32))]))
"""


@around("recovery.md", "--max-restarts")
def _(stage: Stage) -> Iterator[None]:
    (stage.folder / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS))
    (stage.folder / "train.py").write_text(RESTARTED)
    (stage.folder / "loader.py").write_text(RESUMING)
    (stage.folder / "job").rename(stage.folder / "shared")
    yield
    assert (stage.folder / "died").exists()
    assert (stage.folder / "steps").read_text() == str(NUM_BATCHES)


@around("recovery.md", "get_resume_checkpoint()")
def _(stage: Stage) -> Iterator[None]:
    checkpoint = stage.folder / "shared" / "step-000000000004"
    stage.fixture("monkeypatch").setenv("PERSIA_RESUME_CHECKPOINT", str(checkpoint))
    stage.names |= {"directory": stage.folder / "dumped", "epoch": 1}
    stage.replaced = {"% 1000": "% 5", "        ...\n": TRAINING}
    yield
    assert stage.contexts[-1].counters.batches_trained == 1
    assert (stage.folder / "dumped" / "step-000000000005" / "dense.pt").is_file()


@around("recovery.md", "ctx.resume()")
def _(stage: Stage) -> Iterator[None]:
    stage.names["read_batches"] = lambda first, *_: (make_batch() for _ in range(first, NUM_BATCHES))
    with (
        stage.names["TrainCtx"]() as ctx,
        training_on_a_thread(stage, ctx, DataLoader(StreamingDataset())),
    ):
        yield
    assert ctx.counters.batches_trained == NUM_BATCHES
