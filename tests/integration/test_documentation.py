"""Runs the code blocks of the site's Get started, Concepts and How-to pages, in their order.

The Python of a page runs in one namespace, in an empty folder. Shell commands run in the same folder. YAML is
one of the two configuration files. `tests/documented.py` has the marks of blocks that are tested otherwise.
What stands for something longer in a page, `...` or a name of the reader's script, is something small here.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from persia import env
from persia.ctx import DataCtx, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.helper import PersiaServiceCtx
from persia.pmem import HAS_PMEM
from tests.documented import REPOSITORY, Block, blocks, check, check_config, exec_code, pages
from tests.kuairand_log import write_log
from tests.ports import free_port

SLOTS = {"slots_config": {"user": {"dim": 16}}}
PAGES = pages("Get started", "Concepts", "How-to")
WHOLE = {"parquet.md": "test_parquet_page.py"}  # pages that a test of their own runs from end to end
NUM_BATCHES = 5
TIMEOUT_S = 240.0
TRAINING = """\
        output, labels = ctx.forward(batch)
        ctx.backward(loss_fn(output, labels[0]))
"""


@dataclass
class Stage:
    """What the blocks of a page share."""

    folder: Path
    fixture: Callable[[str], Any]
    names: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)  # in Python and in commands
    sources: list[str] = field(default_factory=list)  # of the Python blocks so far
    contexts: list[TrainCtx] = field(default_factory=list)  # that its blocks have made
    background: list[subprocess.Popen[str]] = field(default_factory=list)
    job: dict[str, str] = field(default_factory=dict)  # variables by which its commands find a running job

    def source(self, block: Block) -> str:
        text = block.text
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text


SetUp = Callable[[Stage], Iterator[None]]
AROUND: dict[tuple[str, str], Callable[[Stage], AbstractContextManager[None]]] = {}


def around(page: str, mark: str = "") -> Callable[[SetUp], SetUp]:
    """Registers what runs around the one block that has this mark in its text, or around the whole page."""

    def register(set_up: SetUp) -> SetUp:
        AROUND[page, mark] = contextmanager(set_up)
        return set_up

    return register


# --- how a block runs ---------------------------------------------------------------------------------------


def play(block: Block, stage: Stage) -> None:
    if not block.runs:
        check(block)
    elif block.language == "python":
        names = dict(stage.names) if block.mark == "apart" else stage.names
        stage.sources.append(block.text)
        with warnings.catch_warnings():
            if "torchrec" in block.text or "torch.jit" in block.text:
                warnings.simplefilter("ignore")  # those of its import, or of what torch deprecates
            exec_code(block, names, stage.source(block))
    elif block.language == "sh":
        check(block)
        run_shell(block, stage)
    elif block.language == "yaml":
        check_config(block)
    else:
        raise AssertionError(f"nothing runs {block.language or 'a block without a language'}: mark it")


def run_shell(block: Block, stage: Stage) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERSIA_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= stage.job
    environment["OMP_NUM_THREADS"] = "1"
    command = ["sh", "-euc", stage.source(block)]
    if block.mark == "background":
        # In place of the shell, so that ending it ends the server.
        command[2] = f"exec {command[2]}"
        with (stage.folder / "background.log").open("w") as log:
            stage.background.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
            )
        return
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"):
        monkeypatch.delenv(name, raising=False)
    env.reload_env()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    made = Stage(tmp_path, request.getfixturevalue)
    yield made
    for process in made.background:
        process.terminate()
        process.wait(TIMEOUT_S)
    monkeypatch.undo()
    env.reload_env()


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WHOLE])
def test_every_block_runs_or_says_why_not(page: str, stage: Stage) -> None:
    marks = [mark for place, mark in AROUND if place == page and mark]
    found = list(blocks(page))
    for mark in marks:
        assert sum(mark in block.text for block in found) == 1, f"{page}: {mark!r} must be in one block"
    with AROUND.get((page, ""), no_set_up)(stage):
        for block in found:
            if missing(block):
                continue
            own = [AROUND[page, mark] for mark in marks if mark in block.text]
            try:
                with (own[0] if own else no_set_up)(stage):
                    play(block, stage)
            except Exception as error:
                raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error


def missing(block: Block) -> bool:
    """Whether it needs torchrec, which is made for one release of torch, where that is not installed."""
    return "import KeyedJaggedTensor" in block.text and importlib.util.find_spec("torchrec") is None


def no_set_up(stage: Stage) -> AbstractContextManager[None]:
    return nullcontext()


# --- what the reader's script has ---------------------------------------------------------------------------


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


def script(stage: Stage) -> None:
    """The names of a training script. Its `TrainCtx(...)` takes what the page leaves out."""
    model, optimizer = Model(), Adagrad(lr=1e-2)

    def train_ctx(*omitted: Any, **options: Any) -> TrainCtx:
        assert all(argument is ... for argument in omitted)
        arguments: dict[str, Any] = {
            "model": model,
            "embedding_optimizer": optimizer,
            "dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "slots": SLOTS,
        }
        stage.contexts.append(TrainCtx(**(arguments | options)))
        return stage.contexts[-1]

    stage.names |= {
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


@contextmanager
def training(stage: Stage) -> Iterator[None]:
    """A block that is the body of a context, which trains all batches of the loader."""
    with stage.names["TrainCtx"]() as stage.names["ctx"]:
        yield
        stage.names["ctx"].wait_for_gradients()
        assert stage.names["ctx"].counters.batches_trained == NUM_BATCHES


@contextmanager
def running_job(stage: Stage) -> Iterator[TrainCtx]:
    """Broker, embedding worker and parameter server, with a training script: their commands find them."""
    with (
        PersiaServiceCtx(embedding_config=SLOTS),
        stage.names["TrainCtx"]() as ctx,
    ):
        stage.job |= {name: value for name, value in os.environ.items() if name.startswith("PERSIA_")}
        ctx.set_embedding("user", np.array([7], np.uint64), np.ones((1, 16), np.float32))
        yield ctx


# --- page by page -------------------------------------------------------------------------------------------


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


@around("training.md", "LRSchedule")
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
    assert (stage.names["best"], stage.names["patience"], stage.contexts[-1].step) == (1.0, 0, 4)


@around("recipes.md", "add_scalar")
def _(stage: Stage) -> Iterator[None]:
    steps: list[int] = []
    stage.names["writer"] = SimpleNamespace(add_scalar=lambda name, value, step: steps.append(step))
    yield
    assert steps == [1, 2, 3, 4, 5]


@around("serving.md")
def _(stage: Stage) -> Iterator[None]:
    """A checkpoint of a trained row; the server listens on a free port."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own
        pytest.importorskip("tritonclient.grpc")
    (stage.folder / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS))
    address = f"127.0.0.1:{free_port()}"
    stage.replaced = {
        "127.0.0.1:8001": address,
        "serve model/ --model": f"serve model/ --port {address.rpartition(':')[2]} --model",
    }
    script(stage)
    with stage.names["TrainCtx"]() as ctx:
        ctx.set_embedding("user", np.array([7], np.uint64), np.ones((1, 16), np.float32))
        stage.names["ctx"] = SimpleNamespace(dump_checkpoint=partial(ctx.dump_checkpoint, step=10_000))
        yield


@around("serving.md", "InferenceServerClient(")
def _(stage: Stage) -> Iterator[None]:
    stage.names |= {"users": [np.array([7], np.uint64)], "ages": np.ones((1, 1), np.float32)}
    triton = importlib.import_module("tritonclient.grpc")
    client = triton.InferenceServerClient(stage.replaced["127.0.0.1:8001"])
    end, is_ready = time.monotonic() + TIMEOUT_S, False
    while not is_ready and time.monotonic() < end:
        assert stage.background[0].poll() is None, (stage.folder / "background.log").read_text()
        time.sleep(0.05)
        with suppress(triton.InferenceServerException):
            is_ready = client.is_server_ready()
    client.close()
    yield
    expected = stage.names["model"]([torch.ones(1, 1)], [torch.ones(1, 16)])
    assert stage.names["probabilities"].tolist() == expected.tolist()


@around("serving.md", "Predictor(")
def _(stage: Stage) -> Iterator[None]:
    stage.names["message"] = make_batch(requires_grad=False).to_bytes()
    yield
    assert stage.names["probabilities"].shape == (3, 1)
    assert stage.names["predictor"].embeddings.num_missing == 3


@around("serving_clients.md")
def _(stage: Stage) -> Iterator[None]:
    """A model that was trained on named features; the server listens on free ports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own
        pytest.importorskip("tritonclient.grpc")
    (stage.folder / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS))
    port, http_port = free_port(), free_port()
    stage.replaced = {
        "127.0.0.1:8001": f"127.0.0.1:{port}",
        "127.0.0.1:8000": f"127.0.0.1:{http_port}",
        "--http-port 8000": f"--port {port} --http-port {http_port}",
        "curl -sS ": "curl -sS --fail-with-body --retry 100 --retry-connrefused --retry-delay 1 ",
    }
    script(stage)
    with stage.names["TrainCtx"]() as ctx:
        ctx.set_embedding("user", np.array([7, 8], np.uint64), np.ones((2, 16), np.float32))
        batch = PersiaBatch(
            [IDTypeFeature("user", [np.array([7], np.uint64)])],
            [NonIDTypeFeature(np.ones((1, 1), np.float32), "age")],
            requires_grad=False,
        )
        ctx.forward(ctx.get_embedding_from_data(batch))
        ctx.dump_checkpoint("model/", with_jit_model=True)
    yield
    model = stage.names["model"].cpu()
    ages, rows = torch.tensor([[31.0], [54.0]]), torch.tensor([[1.0] * 16, [2.0] * 16])
    expected = model([ages], [rows]).detach().numpy()
    np.testing.assert_allclose(stage.names["probabilities"], expected, rtol=1e-6)
    stage.names["client"].close()


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


def test_a_block_without_a_mark_or_a_language_fails(stage: Stage) -> None:
    for language, text in (("", "1 + 1\n"), ("yaml", "nothing: 1\n"), ("console", "$ ls\n")):
        with pytest.raises(AssertionError, match="mark"):
            play(Block("page.md", 1, language, text, ""), stage)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("sh", "persia-launcher serve model/ --no-such-option 1"),
        ("sh", "echo && persia-launcher local --nn-worker train.py --parameter-servers two"),
        ("sh", "./run nothing"),
        ("sh", "kubectl apply -f examples/nothing.yml"),
        ("python", "def f(:\n"),
        ("yaml", "a: [\n"),
        ("console", ""),
    ],
)
def test_a_block_that_does_not_run_is_checked(language: str, text: str) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        check(Block("page.md", 1, language, text, "not run, a test"))
    assert not isinstance(caught.value, AttributeError | ImportError)


def test_pages_with_a_test_of_their_own_have_it() -> None:
    for page, test in WHOLE.items():
        assert page not in PAGES or Path(__file__).with_name(test).is_file(), page


def test_installations_do_not_run() -> None:
    assert not Block("page.md", 1, "sh", "apt-get install g++\npip install persia-*.whl\n", "").runs
    assert Block("page.md", 1, "sh", "pip list && persia-launcher --help\n", "").runs
