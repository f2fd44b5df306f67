"""`job_type: Infer`: servers with a checkpoint's rows, found by address, without a broker."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from persia import env
from persia._native import RemoteClient, TrainConfig
from persia.ctx import InferCtx, TrainCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from persia.job.inference import RemoteRows
from persia.security import install
from persia.security.secret import TRAINER
from persia.waiting import Attempts
from tests.ports import free_port

from .watching import get

SLOTS = {"slots_config": {"user": {"dim": 4}}}
NUM_IDS = 100
START_S = 120.0
_OTHER_JOBS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in _OTHER_JOBS:
        monkeypatch.delenv(name, raising=False)
    env.reload_env()
    yield
    monkeypatch.undo()
    env.reload_env()


@pytest.fixture
def rows() -> Any:
    return np.random.default_rng(0).normal(size=(NUM_IDS, 4)).astype(np.float32)


@pytest.fixture
def checkpoint(tmp_path: Path, rows: Any) -> Path:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with TrainCtx(SGD(0.1), optimizer, model=model, mixed_precision=False, slots=SLOTS) as ctx:
        ctx.set_embedding("user", np.arange(NUM_IDS, dtype=np.uint64), rows)
        ctx.dump_embedding(str(tmp_path / "model"))
    return tmp_path / "model"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], Path]]]:
    """Starts a role with a global config of its own; gives the process and its log."""
    with contextlib.ExitStack() as stack:
        (tmp_path / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS))

        def run(role: str, port: int, infer: dict[str, Any], *arguments: str) -> Any:
            config = tmp_path / f"{role}-{port}.yml"
            config.write_text(yaml.safe_dump({"common_config": {"job_type": "Infer", "infer_config": infer}}))
            command = [sys.executable, "-m", "persia.launcher", role, "--port", str(port)]
            command += ["--embedding-config", str(tmp_path / "embedding_config.yml")]
            command += ["--global-config", str(config), *arguments]
            environment = {name: value for name, value in os.environ.items() if name not in _OTHER_JOBS}
            log = config.with_suffix(".log")
            with log.open("wb") as sink:
                process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return process, log

        yield run


def test_bug_21_servers_answer_from_a_checkpoint_and_change_nothing(
    start: Any, checkpoint: Path, rows: Any
) -> None:
    ports = [free_port(), free_port()]
    for index, port in enumerate(ports):
        place = ("--replica-index", str(index), "--replica-size", "2")
        start("embedding-parameter-server", port, {"embedding_checkpoint": str(checkpoint)}, *place)
    worker_port = free_port()
    start("embedding-worker", worker_port, {"servers": [f"127.0.0.1:{port}" for port in ports]})
    address = f"127.0.0.1:{worker_port}"
    ctx = InferCtx([address])
    ctx.wait_for_serving(START_S)
    sizes = ctx.get_embedding_size()
    assert sum(sizes) == NUM_IDS, "serving begins when all rows are there"
    assert min(sizes) > 0
    ids = np.arange(NUM_IDS + 1, dtype=np.uint64)
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID("user", ids)],
        [NonIDTypeFeature(np.zeros((len(ids), 1), np.float32))],
        requires_grad=False,
    )
    _, (user,), _ = ctx.prepare_features(ctx.get_embedding_from_bytes(batch.to_bytes()))
    np.testing.assert_array_equal(user.numpy()[:-1], rows)
    assert not user.numpy()[-1].any(), "a miss is zeros"
    install(TRAINER)  # an inference client would be refused for its role
    client = RemoteClient(1)
    client.set_worker(0, address)
    with pytest.raises(FailedPreconditionError, match="job_type: Infer"):
        client.clear(timeout_s=10)
    with pytest.raises(FailedPreconditionError, match="job_type: Infer"):
        client.configure(TrainConfig(optimizer="sgd", lr=1.0), timeout_s=10)
    with pytest.raises(FailedPreconditionError, match="not configured"):
        client.set_embeddings(np.array([1], np.uint64), np.zeros((1, 4), np.float32), timeout_s=10)
    assert sum(ctx.get_embedding_size()) == NUM_IDS


def test_a_server_that_dies_is_named_and_misses_are_counted(
    start: Any, checkpoint: Path, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_server(index: int) -> subprocess.Popen[bytes]:
        place = ("--replica-index", str(index), "--replica-size", "2", "--metrics-port", str(shown[index]))
        infer = {"embedding_checkpoint": str(checkpoint)}
        process: subprocess.Popen[bytes]
        process, _ = start("embedding-parameter-server", ports[index], infer, *place)
        return process

    ports, shown, worker_port = [free_port(), free_port()], [free_port(), free_port()], free_port()
    servers = [start_server(index) for index in range(2)]
    start("embedding-worker", worker_port, {"servers": [f"127.0.0.1:{port}" for port in ports]})
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "10")  # of this process
    env.reload_env()
    ctx = InferCtx([f"127.0.0.1:{worker_port}"])
    ctx.wait_for_serving(START_S)
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID("user", np.arange(2 * NUM_IDS, dtype=np.uint64))],
        [NonIDTypeFeature(np.zeros((2 * NUM_IDS, 1), np.float32))],
        requires_grad=False,
    ).to_bytes()

    def look_up() -> Any:
        _, (user,), _ = ctx.prepare_features(ctx.get_embedding_from_bytes(batch))
        return user.numpy()

    np.testing.assert_array_equal(look_up()[:NUM_IDS], rows)
    pages = [get(f"http://127.0.0.1:{port}/metrics") for port in shown]
    missed = [float(re.findall(r"^index_miss_count\{.*\} (\S+)$", page, re.MULTILINE)[0]) for page in pages]
    assert sum(missed) == NUM_IDS
    servers[1].kill()
    servers[1].wait(120)
    with pytest.raises(
        (UnavailableError, DeadlineExceededError), match=f"parameter-server 1 at 127.0.0.1:{ports[1]}"
    ):
        look_up()
    start_server(1)
    ctx.wait_for_serving(START_S)
    np.testing.assert_array_equal(look_up()[:NUM_IDS], rows)


def test_lookups_pass_by_a_stopped_worker_until_it_continues(
    start: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other worker must not be found down when a busy machine lets it wait for a second.
    monkeypatch.setattr("persia.job.inference._TRY_S", 5.0)
    server, ports = free_port(), [free_port(), free_port()]
    start("embedding-parameter-server", server, {"embedding_checkpoint": str(checkpoint)})
    addresses = [f"127.0.0.1:{port}" for port in ports]
    workers = [start("embedding-worker", port, {"servers": [f"127.0.0.1:{server}"]})[0] for port in ports]
    InferCtx(addresses).wait_for_serving(START_S)
    rows = RemoteRows(addresses, deadline_s=60.0)
    ids = PersiaBatch(
        [IDTypeFeatureWithSingleID("user", np.arange(3, dtype=np.uint64))], requires_grad=False
    ).encode_id_features()
    for _ in range(50):
        rows.lookup(ids)
    workers[0].send_signal(signal.SIGSTOP)  # its connections stay, and nothing is refused
    try:
        for _ in Attempts(60):
            assert len(rows.lookup(ids).slots[0].rows) == 3
            if rows._workers[0].failure is not None:
                break
        assert isinstance(rows._workers[0].failure, (DeadlineExceededError, UnavailableError))
        for _ in Attempts(60):  # hedged lookups may still wait for it
            if rows._workers[0].num_pending == 0:
                break
        for _ in range(50):
            rows.lookup(ids)
        assert rows._workers[0].num_pending == 0, "no lookup tries whether it is back"
    finally:
        workers[0].send_signal(signal.SIGCONT)
    for _ in Attempts(60):
        if rows._workers[0].failure is None:
            break
    rows.lookup(ids)


@pytest.mark.parametrize(
    ("role", "infer", "expected"),
    [
        ("embedding-parameter-server", {}, "embedding_checkpoint is missing"),
        ("embedding-parameter-server", {"embedding_checkpoint": "/nowhere"}, "/nowhere"),
        ("embedding-worker", {}, "infer_config.servers is missing"),
    ],
)
def test_what_is_missing_is_said(start: Any, role: str, infer: dict[str, Any], expected: str) -> None:
    process, log = start(role, free_port(), infer)
    assert process.wait(START_S) == 1
    assert expected in log.read_text()
