"""Inference servers that follow a training: real processes, killed and started again, of other numbers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner

from persia import env
from persia.ctx import InferCtx, TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.launcher import cli
from persia.packets.log import PacketLog
from persia.security import http_token
from persia.storage.location import Location
from persia.storage.position import Position
from persia.testing import LocalCluster
from tests.packet_trainer import IDS, SLOTS, Model, PacketTrainer
from tests.ports import free_port

from .test_serving import Load, Served, make_batch

DEADLINE_S = 120.0
MANY_IDS = np.concatenate([IDS, np.arange(1000, 1500, dtype=np.uint64)])
_OTHER_JOBS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL")


class Batches(IterableDataset):
    """Some training, a while long."""

    def __init__(self) -> None:
        super().__init__(buffer_size=1)

    def __iter__(self) -> Iterator[PersiaBatch]:
        for _ in range(4):
            time.sleep(0.2)
            yield PersiaBatch(
                [IDTypeFeatureWithSingleID("user", IDS[:1])],
                [NonIDTypeFeature(np.zeros((1, 1), np.float32))],
                [Label(np.zeros((1, 1), np.float32))],
            )


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in _OTHER_JOBS:
        monkeypatch.delenv(name, raising=False)
    env.reload_env()
    yield
    monkeypatch.undo()
    env.reload_env()


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "embedding_config.yml"
    path.write_text(yaml.safe_dump(SLOTS))
    return str(path)


def wait_until(condition: Callable[[], bool], what: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def ask(url: str) -> Any:
    return urllib.request.urlopen(
        urllib.request.Request(url, headers={"Authorization": f"Bearer {http_token()}"}), timeout=60
    )


def status_of(address: str) -> dict[str, Any]:
    with ask(f"http://{address}/status") as answer:
        stats: dict[str, Any] = json.load(answer)["stats"]
    return stats


def went_back(address: str, position: Position) -> bool:
    following = status_of(address)["following"]
    return (following["position"], following["pinned"]) == (str(position), True)


def test_a_server_killed_while_it_follows_starts_where_training_is(tmp_path: Path, config: str) -> None:
    trainer = PacketTrainer(tmp_path / "packets", scripted=False)
    trainer.trained(1)
    trainer.checkpoint(tmp_path / "model", 1.0)
    arguments = [str(tmp_path / "model"), "--embedding-config", config]
    arguments += ["--incremental-dir", str(tmp_path / "packets"), "--incremental-poll", "0.05"]
    served = Served(tmp_path, *arguments)
    try:
        with Load(served.address, num_clients=1) as load:
            for value in range(2, 8):
                trainer.trained(value)
                time.sleep(0.1)
            at = str(trainer.position)
            served.wait_until(lambda: served.infer(make_batch([10])) == (at, [98.0]))
        assert load.failures == []
        first = trainer.position.number - 6
        for version, value in load.answers:
            number = int(version.rpartition("/")[2]) - first + 1
            assert value == 2.0 * number**2, "each answer is of one packet, rows and model"
        served.process.send_signal(signal.SIGKILL)
        served.process.wait(120)
    finally:
        served.stop()
    trainer.trained(8)
    again = Served(tmp_path, *arguments)
    try:
        assert again.infer(make_batch([10])) == (str(trainer.position), [128.0])
        found = re.search(r"metrics and status are at (\S+:\d+)", again.log.read_text())
        assert found is not None
        with ask(f"http://{found[1]}/metrics") as answer:
            page = answer.read().decode()
        values = dict(re.findall(r"^(\w+)\{[^}]*\} (\S+)$", page, re.MULTILINE))
        assert 0.5 <= float(values["inc_update_delay_sec"]) < DEADLINE_S
        assert float(values["persia_inc_applied_number"]) == trainer.position.number
        assert float(values["persia_inc_packets_failed_total"]) == 0
        shown = CliRunner().invoke(
            cli, ["status", "--address", found[1], "--once", "--interval", "0.2"], env={"COLUMNS": "200"}
        )
        assert shown.exit_code == 0, shown.output
        assert f"packet {trainer.position.number}, 0 behind" in shown.output
    finally:
        again.stop()


def position_of(version: str) -> Position:
    stream, _, number = version.rpartition("/")
    return Position(stream, int(number))


def newer_than(log: PacketLog) -> Position:
    """The newest packet, once there is another one."""
    before = log.newest()
    wait_until(lambda: log.newest() != before, lambda: f"no packet after {before}")
    newest = log.newest()
    assert newest is not None
    return newest


@pytest.fixture
def start(tmp_path: Path, config: str) -> Iterator[Callable[..., None]]:
    """Starts a role of an inference job that follows the packets; metrics at the port given."""
    with contextlib.ExitStack() as stack:

        def run(role: str, port: int, infer: dict[str, Any], *arguments: str) -> None:
            section = {"enable_incremental_update": True, "incremental_dir": str(tmp_path / "packets")}
            path = tmp_path / f"{role}-{port}.yml"
            common = {"job_type": "Infer", "infer_config": {**infer, "incremental_poll_ms": 50}}
            path.write_text(
                yaml.safe_dump({"common_config": common, "embedding_parameter_server_config": section})
            )
            command = [sys.executable, "-m", "persia.launcher", role, "--port", str(port), *arguments]
            command += ["--embedding-config", config, "--global-config", str(path)]
            log = stack.enter_context(path.with_suffix(".log").open("wb"))
            environment = {name: value for name, value in os.environ.items() if name not in _OTHER_JOBS}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)

        yield run


@pytest.fixture
def training(tmp_path: Path) -> Iterator[TrainCtx]:
    """A job with three parameter servers that writes packets, once there is one; its model is dumped."""
    section = {
        "enable_incremental_update": True,
        "incremental_dir": str(tmp_path / "packets"),
        "incremental_interval_ms": 100,
        "incremental_dense_interval_sec": 0,
    }
    config = {"embedding_parameter_server_config": section}
    with (
        LocalCluster(embedding_config=SLOTS, parameter_servers=3, global_config=config) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("PERSIA_NATS_URL", "PERSIA_JOB_NAME"):
            patch.setenv(name, cluster.env[name])
        env.reload_env()
        model = Model(1.0)
        with TrainCtx(
            SGD(0.1),
            torch.optim.SGD(model.parameters(), 0.1),
            model=model,
            mixed_precision=False,
            slots=SLOTS,
        ) as ctx:
            ctx.set_embedding("user", MANY_IDS[:100], np.full((100, 2), 1.0, np.float32))
            wait_until(lambda: (tmp_path / "packets" / "latest").exists(), lambda: "no packet was written")
            ctx.dump_checkpoint(str(tmp_path / "model"), with_jit_model=True, step=1)
            yield ctx
        env.reload_env()


@dataclass(frozen=True)
class Followers:
    served: Served
    worker: InferCtx
    server_status: list[str]  # addresses

    def answer(self) -> tuple[str, list[float]]:
        return self.served.infer(make_batch([20]))


@pytest.fixture
def followers(training: TrainCtx, tmp_path: Path, start: Any) -> Iterator[Followers]:
    """Two parameter servers, a worker and the dense model, which follow `training`."""
    servers = [free_port() for _ in range(2)]
    watched = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    for index, server in enumerate(servers):
        place = ("--replica-index", str(index), "--replica-size", "2")
        shown = ("--metrics-port", watched[index].rpartition(":")[2])
        source = {"embedding_checkpoint": str(tmp_path / "model")}
        start("embedding-parameter-server", server, source, *place, *shown)
    port = free_port()
    start("embedding-worker", port, {"servers": [f"127.0.0.1:{server}" for server in servers]})
    worker = InferCtx([f"127.0.0.1:{port}"])
    worker.wait_for_serving(DEADLINE_S)
    arguments = [str(tmp_path / "model"), "--embedding-worker", f"127.0.0.1:{port}"]
    arguments += ["--incremental-poll", "0.05", "--incremental-dir", str(tmp_path / "packets")]
    for address in watched:
        arguments += ["--server-status", address]
    served = Served(tmp_path, *arguments)
    try:
        yield Followers(served, worker, watched)
    finally:
        served.stop()


def train_some(ctx: TrainCtx) -> None:
    """Training steps offer the model for the next packet."""
    for batch in DataLoader(Batches()):
        output, _ = ctx.forward(batch)
        ctx.backward(0.0 * output.sum())


def test_two_servers_follow_three_and_the_dense_model_waits_for_them(
    training: TrainCtx, followers: Followers, tmp_path: Path
) -> None:
    served = followers.served
    served.wait_until(lambda: followers.answer()[1] == [2.0])
    first = position_of(followers.answer()[0])
    training.set_embedding("user", MANY_IDS, np.full((len(MANY_IDS), 2), 3.0, np.float32))
    assert isinstance(training.model, Model)
    with torch.no_grad():
        training.model.factor.fill_(5.0)
    train_some(training)
    served.wait_until(lambda: followers.answer()[1] == [30.0])
    assert sum(followers.worker.get_embedding_size()) == len(MANY_IDS)
    assert min(followers.worker.get_embedding_size()) > 0
    positions = {status_of(address)["following"]["position"] for address in followers.server_status}
    assert all(position is not None for position in positions)
    with Load(served.address, num_clients=1) as load:
        pin = tmp_path / "packets" / "pin"
        (Location.of(pin)).replace(f"{first.name}\n".encode())
        served.wait_until(lambda: followers.answer() == (str(first), [2.0]))
        for address in followers.server_status:  # servers go back in no order
            wait_until(lambda at=address: went_back(at, first), lambda at=address: status_of(at))
        training.set_embedding("user", MANY_IDS, np.full((len(MANY_IDS), 2), 4.0, np.float32))
        newest = newer_than(PacketLog(tmp_path / "packets"))
        assert followers.answer() == (str(first), [2.0]), "it stays there"
        pin.unlink()
        served.wait_until(lambda: followers.answer()[1] == [40.0])
    assert load.failures == [], "nobody who asks has to wait for it"
    assert newest > first
