"""`persia-launcher serve` as clients meet it: predictions, new versions under load, everything sent wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, List  # noqa: UP035 - torch.jit.script resolves typing.List

import grpc
import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from persia import env
from persia.ctx import TrainCtx
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.launcher import cli
from persia.storage.location import Location
from persia.storage.manifest import MANIFEST_NAME, Manifest
from tests.ports import free_port

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the client's own
    triton = pytest.importorskip("tritonclient.grpc")

SLOTS = {"slots_config": {"user": {"dim": 2}}}
ROWS = np.array([[1, 2], [3, 4]], np.float32)
IDS = np.array([10, 20], np.uint64)
START_S = 120.0


class Model(torch.nn.Module):
    """`factor` times the sum of a sample's row, plus its dense value."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        return self.factor * embeddings[0].sum(dim=1, keepdim=True) + torch.nn.functional.linear(
            dense[0], torch.ones(1, 1)
        )


def dump(
    directory: Path, factor: float, step: int, *, keep_last: int | None = None, kind: type[Model] = Model
) -> None:
    model = kind(factor)
    with TrainCtx(
        SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), model=model, mixed_precision=False, slots=SLOTS
    ) as ctx:
        ctx.set_embedding("user", IDS, ROWS)
        ctx.dump_checkpoint(str(directory), with_jit_model=True, step=step, keep_last=keep_last)


def renumber(checkpoint: Path, step: int) -> None:
    """Makes it the checkpoint of `step`."""
    manifest, _ = Manifest.read(Location.of(checkpoint))
    (checkpoint / MANIFEST_NAME).write_bytes(dataclasses.replace(manifest, step=step).encode())


def make_batch(ids: list[int], dense: float = 0.0, *, slot: str = "user", dtype: Any = np.float32) -> bytes:
    return PersiaBatch(
        [IDTypeFeatureWithSingleID(slot, np.array(ids, np.uint64))],
        [NonIDTypeFeature(np.full((len(ids), 1), dense, dtype))],
        requires_grad=False,
    ).to_bytes()


class Served:
    """A server process and a client of it."""

    def __init__(self, folder: Path, *arguments: str, wait: bool = True) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.log = folder / "serve.log"
        command = [sys.executable, "-m", "persia.launcher", "serve", *arguments]
        command += ["--port", self.address.rpartition(":")[2], "--poll", "0.05"]
        command += [] if "--model" in arguments else ["--model-name", "m"]
        environment = {name: value for name, value in os.environ.items() if name != "PERSIA_NATS_URL"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.client = triton.InferenceServerClient(self.address)
        if wait:
            self.wait_until(self.client.is_server_ready)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(triton.InferenceServerException):
                if condition():
                    return
            time.sleep(0.05)
        pytest.fail(f"not within {timeout_s} s; the server says: {self.log.read_text()}")

    def infer(self, message: bytes, model: str = "m", **arguments: Any) -> tuple[str, list[float]]:
        """(version, predictions)"""
        answer = self.client.infer(model, [tensor(message)], **arguments)
        output = answer.as_numpy("output_0")
        return answer.get_response().model_version, [float(value) for value in output[:, 0]]

    def refusal(self, message: bytes, model: str = "m", **arguments: Any) -> str:
        with pytest.raises(triton.InferenceServerException) as caught:
            self.infer(message, model, **arguments)
        return str(caught.value)

    def stop(self) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def tensor(message: bytes, datatype: str = "BYTES", shape: tuple[int, ...] = (1,)) -> Any:
    made = triton.InferInput("batch", list(shape), datatype)
    made.set_data_from_numpy(np.array([message] * shape[0], dtype=object))
    return made


@contextlib.contextmanager
def no_job() -> Iterator[None]:
    """The environment of a process that belongs to no job."""
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.delenv(name, raising=False)
            env.reload_env()
            yield
    finally:
        env.reload_env()


@contextlib.contextmanager
def one_model(folder: Path, *arguments: str) -> Iterator[Served]:
    """A server for all tests of a module."""
    with no_job():
        (folder / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS))
        dump(folder / "model", factor=2.0, step=7)
        config = str(folder / "embedding_config.yml")
        served = Served(folder, str(folder / "model"), "--embedding-config", config, *arguments)
        yield served
        assert served.stop() == 0


@pytest.fixture(autouse=True)
def no_cluster() -> Iterator[None]:
    with no_job():
        yield


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "embedding_config.yml"
    path.write_text(yaml.safe_dump(SLOTS))
    return str(path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:

        def run(*arguments: str, **keywords: Any) -> Served:
            served = Served(tmp_path, *arguments, **keywords)
            stack.callback(served.stop)
            return served

        yield run


def test_predictions_metadata_and_health(start: Any, tmp_path: Path, config: str) -> None:
    dump(tmp_path / "model", factor=2.0, step=7)
    served = start(str(tmp_path / "model"), "--embedding-config", config)
    assert served.infer(make_batch([10, 20, 99], dense=0.5)) == ("7", [6.5, 14.5, 0.5]), "a miss is zeros"
    assert served.infer(make_batch([20]), model_version="7", request_id="r")[1] == [14.0]
    assert served.infer(make_batch([20]), model_version="stable")[1] == [14.0], "also without a canary"
    # Nothing was trained, as in checkpoints of older versions: features are taken by position.
    assert served.log.read_text().count("does not name the features of its model") == 1
    samples = [np.array(ids, np.uint64) for ids in ([10, 20], [], [20, 99])]
    pooled = PersiaBatch(
        [IDTypeFeature("user", samples)],
        [NonIDTypeFeature(np.zeros((3, 1), np.float32))],
        requires_grad=False,
    )
    assert served.infer(pooled.to_bytes())[1] == [20.0, 0.0, 14.0]
    client = served.client
    assert client.is_server_live()
    assert client.is_model_ready("m")
    assert client.get_server_metadata().name == "persia"
    metadata = client.get_model_metadata("m")
    assert (list(metadata.versions), metadata.inputs[0].name) == (["7"], "batch")
    (output,) = metadata.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("output_0", "FP32", [-1, 1])
    with grpc.insecure_channel(served.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "m", "inference.GRPCInferenceService"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert served.stop() == 0


def test_everything_wrong_is_answered_by_name(start: Any, tmp_path: Path, config: str) -> None:
    dump(tmp_path / "model", factor=1.0, step=1)
    served = start(
        str(tmp_path / "model"),
        "--embedding-config",
        config,
        "--max-request-mib",
        "1",
        "--max-batch-size",
        "8",
    )
    good = make_batch([10])
    refusals = {
        "NOT_FOUND] there is no model 'x'": served.refusal(good, "x"),
        "NOT_FOUND] model 'm' has no version '2'": served.refusal(good, model_version="2"),
        "INVALID_ARGUMENT] a batch of 3 bytes is cut short": served.refusal(b"abc"),
        "INVALID_ARGUMENT] not a batch of version 1": served.refusal(b"\xff" * 100),
        "shop": served.refusal(make_batch([10], slot="shop")),
        "ndarray_base": served.refusal(make_batch([10])[:-1]),
        "float64[1, 1]": served.refusal(make_batch([10], dtype=np.float64)),
        "9 samples, this server takes 8": served.refusal(make_batch([10] * 9)),
        "RESOURCE_EXHAUSTED] the request has 20971": served.refusal(b"x" * (1 << 21)),
    }
    refusals.pop("ndarray_base")  # cut off somewhere: which check finds it does not matter
    for expected, refusal in refusals.items():
        assert expected in refusal
    assert "INVALID_ARGUMENT" in served.refusal(make_batch([10], slot="shop"))
    for inputs, expected in (
        ([], "the inputs [], and the checkpoint does not name"),
        ([tensor(good, shape=(2,))], "has shape [2] and a NoneType: send shape [1]"),
    ):
        with pytest.raises(triton.InferenceServerException, match="INVALID_ARGUMENT") as caught:
            served.client.infer("m", inputs)
        assert expected in str(caught.value)
    number = triton.InferInput("batch", [1], "INT64")
    number.set_data_from_numpy(np.ones(1, np.int64))
    with pytest.raises(triton.InferenceServerException, match="datatype 'INT64': send BYTES"):
        served.client.infer("m", [number])
    with pytest.raises(triton.InferenceServerException, match="no output 'score', but output_0"):
        served.client.infer("m", [tensor(good)], outputs=[triton.InferRequestedOutput("score")])
    assert served.infer(good)[1] == [3.0], "it goes on serving"
    served.stop()
    assert "UNAVAILABLE" in served_down(served.address)


TWO_SLOTS = {"slots_config": {"user": {"dim": 2}, "item": {"dim": 2}}}


class TwoFeatures(torch.nn.Module):
    """Tells its inputs apart: 1 x user + 10 x item + 100 x age + 1000 x price."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        ids = embeddings[0].sum(1) + 10 * embeddings[1].sum(1)
        return (ids + 100 * dense[0][:, 0] + 1000 * dense[1][:, 0] + self.bias).unsqueeze(1)


def dump_trained(directory: Path, *, step: int = 1) -> None:
    """With a signature, as it has trained a batch."""
    model = TwoFeatures()
    with TrainCtx(
        SGD(0.1),
        torch.optim.SGD(model.parameters(), 0.1),
        model=model,
        mixed_precision=False,
        slots=TWO_SLOTS,
    ) as ctx:
        for name, factor in (("user", 1), ("item", 10)):
            ctx.set_embedding(name, IDS, factor * ROWS)
        batch = PersiaBatch.from_bytes(features("user", "item", "age", "price"))
        ctx.forward(ctx.get_embedding_from_data(batch))
        ctx.dump_checkpoint(str(directory), with_jit_model=True, step=step)


def features(*names: str, age: float = 0.5, dtype: Any = np.float32) -> bytes:
    values = {"age": age, "price": 0.25}
    dense = [name for name in names if name not in ("user", "item", "shop")]
    return PersiaBatch(
        [IDTypeFeatureWithSingleID(name, IDS) for name in names if name not in dense],
        [NonIDTypeFeature(np.full((2, 1), values.get(name, 0), dtype), name) for name in dense],
        requires_grad=False,
    ).to_bytes()


def test_features_are_matched_by_name(start: Any, tmp_path: Path) -> None:
    dump_trained(tmp_path / "model")
    config = tmp_path / "two.yml"
    config.write_text(yaml.safe_dump(TWO_SLOTS, sort_keys=False))
    served = start(str(tmp_path / "model"), "--embedding-config", str(config))
    expected = ("1", [303.0 + 300.0, 707.0 + 300.0])
    for names in (("user", "item", "age", "price"), ("price", "item", "age", "user")):
        assert served.infer(features(*names)) == expected
    for message, named in (
        (
            features("user", "shop", "age", "price"),
            "ID features are not the model's (unknown: shop; missing: item",
        ),
        (features("user", "item", "price"), "missing: age"),
        (features("user", "item", "age", "price", "size"), "unknown: size"),
        (features("user", "item", "age", "age", "price"), "repeated: age"),
        (features("user", "item", "age", "price", dtype=np.float64), "'age' is float64[2, 1]"),
        (features("user", "item", "age", "price", age=np.nan), "'age' has NaN or Inf in sample 0"),
    ):
        refusal = served.refusal(message)
        assert "INVALID_ARGUMENT" in refusal
        assert named in refusal
    assert "does not name the features" not in served.log.read_text()
    served.stop()
    served = start(str(tmp_path / "model"), "--embedding-config", str(config), "--allow-nonfinite")
    assert np.isnan(served.infer(features("user", "item", "age", "price", age=np.nan))[1]).all()


def served_down(address: str) -> str:
    client = triton.InferenceServerClient(address)
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer("m", [tensor(b"")], client_timeout=60)
    client.close()
    return str(caught.value)


class Load:
    """Clients that ask all the time; what they were told, by time."""

    def __init__(self, address: str, num_clients: int = 3) -> None:
        self.failures: list[str] = []
        self.answers: list[tuple[str, float]] = []
        self._address = address
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self) -> None:
        client = triton.InferenceServerClient(self._address)
        while not self._stopped.is_set():
            try:
                answer = client.infer("m", [tensor(make_batch([10]))])
                value = float(answer.as_numpy("output_0")[0, 0])
                self.answers.append((answer.get_response().model_version, value))
            except triton.InferenceServerException as failure:
                self.failures.append(str(failure))
        client.close()


def test_versions_change_and_roll_back_while_requests_flow(start: Any, tmp_path: Path, config: str) -> None:
    root = tmp_path / "model"
    dump(root, factor=1.0, step=1, keep_last=5)
    served = start(str(root), "--embedding-config", config)
    with Load(served.address) as load:
        wait_for(served, load, ("1", 3.0))
        dump(root, factor=2.0, step=2, keep_last=5)
        wait_for(served, load, ("2", 6.0))
        # What cannot be served changes nothing.
        shutil.copytree(root / "step-000000000002", root / "step-000000000003")
        for script in (root / "step-000000000003").glob("dump-*/jit_dense.pt"):
            script.unlink()  # a hard link of the other's content would change that as well
            script.write_bytes(b"damaged")
        renumber(root / "step-000000000003", 3)
        (Location.of(root) / "latest").replace(b"step-000000000003\n")
        served.wait_until(lambda: "jit_dense.pt is damaged" in served.log.read_text())
        assert served.infer(make_batch([10])) == ("2", [6.0])
        assert served.log.read_text().count("is damaged") == 1, "said once"
        (Location.of(root) / "latest").replace(b"step-000000000001\n")
        wait_for(served, load, ("1", 3.0))
    assert load.failures == []
    assert set(load.answers) == {("1", 3.0), ("2", 6.0)}, "rows and model are always of one version"


def wait_for(served: Served, load: Load, answer: tuple[str, float]) -> None:
    seen = len(load.answers)
    served.wait_until(lambda: answer in load.answers[seen:])


def refused(*arguments: str) -> str:
    """What the command says before it ends; nothing is served."""
    result = CliRunner().invoke(cli, ["serve", *arguments])
    assert result.exit_code == 1, result.output
    return result.output


def test_a_version_that_cannot_answer_the_sample_is_not_used(tmp_path: Path, config: str) -> None:
    dump(tmp_path / "model", factor=1.0, step=1)
    sample = tmp_path / "sample.bin"
    sample.write_bytes(make_batch([10], slot="shop"))
    assert "shop" in refused(str(tmp_path / "model"), "--embedding-config", config, "--sample", str(sample))


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path, config: str) -> None:
    assert "need their slots" in refused("nowhere")
    assert "is no checkpoint" in refused("nowhere", "--embedding-config", config)
    with TrainCtx(
        SGD(0.1),
        torch.optim.SGD(Model(1.0).parameters(), 0.1),
        model=Model(1.0),
        mixed_precision=False,
        slots=SLOTS,
    ) as ctx:
        ctx.set_embedding("user", IDS, ROWS)
        ctx.dump_checkpoint(str(tmp_path / "plain"))
    assert "with_jit_model=True" in refused(str(tmp_path / "plain"), "--embedding-config", config)


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_in_use_is_said_before_a_model_is_loaded(tmp_path: Path, config: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # What would be loaded is not even there.
        arguments = ["serve", str(tmp_path / "none"), "--embedding-config", config, option, str(port)]
        result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port} (--host, {option})" in result.output
