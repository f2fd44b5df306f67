"""persia's handler in a real TorchServe: versions under load, everything sent wrong.

Its AUC is compared in test_serving_adult.py.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from persia import env
from persia.launcher import cli

from .test_serving import SLOTS, dump, make_batch, renumber
from .torchserving import SETTINGS, TorchServe, torchserve

GOOD = make_batch([10, 20, 99])
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two steps of a model, and its slots."""
    patch = pytest.MonkeyPatch()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"):
        patch.delenv(name, raising=False)
    env.reload_env()
    folder = tmp_path_factory.mktemp("torchserve")
    (folder / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS))
    for step, factor in ((1, 1.0), (2, 2.0)):
        dump(folder / "model", factor=factor, step=step, keep_last=5)
    yield folder
    patch.undo()
    env.reload_env()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TorchServe]:
    """Serves version 1; 2 is in the store."""
    with torchserve(folder / "server") as server:
        archives = [write(folder, server.store, step) for step in (1, 2)]
        assert [archive.name for archive in archives] == ["m-1.mar", "m-2.mar"]
        server.register(archives[0])
        yield server


def write(folder: Path, store: Path, step: int, *arguments: str) -> Path:
    """The archive of a step, as the command writes it."""
    result = run(folder, str(folder / "model" / f"step-{step:012d}"), "--export-path", str(store), *arguments)
    assert result.exit_code == 0, result.output
    return Path(result.output.splitlines()[-1])


def run(folder: Path, *arguments: str) -> Any:
    config = ("--embedding-config", str(folder / "embedding_config.yml"))
    return CliRunner().invoke(cli, ["torchserve-archive", "--model-name", "m", *config, *arguments])


def outputs(answer: dict[str, Any]) -> tuple[str, list[float]]:
    """(version, predictions)"""
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"]) == ("output_0", "FP32")
    return answer["model_version"], output["data"]


@pytest.fixture
def ask(server: TorchServe, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Predictions over gRPC, by the proto of the example's client."""
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools (the 'test' extra)")
    monkeypatch.syspath_prepend(str(SETTINGS.parent))
    messages, services = grpc.protos_and_services("torchserve.proto")
    with grpc.insecure_channel(server.grpc) as channel:
        service = services.InferenceAPIsServiceStub(channel)

        def predict(batch: bytes, model: str = "m", version: str = "", key: str = "batch") -> Any:
            request = messages.PredictionsRequest(model_name=model, model_version=version, input={key: batch})
            return json.loads(service.Predictions(request, timeout=240).prediction)

        yield predict


def test_both_apis_answer_alike(server: TorchServe, ask: Callable[..., Any]) -> None:
    expected = ("1", [3.0, 7.0, 0.0])  # a miss is zeros
    assert outputs(server.predict("m", GOOD)) == expected
    assert outputs(ask(GOOD)) == expected
    assert outputs(ask(GOOD, key="data")) == expected


WRONG = {
    "cut short": (b"abc", "a batch of 3 bytes is cut short"),
    "no batch": (b"\xff" * 100, "not a batch of version 1"),
    "unknown slot": (make_batch([10], slot="shop"), "feature 'shop'"),
    "wrong dtype": (make_batch([10], dtype=np.float64), "float64[1, 1]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_answered_by_name(server: TorchServe, ask: Callable[..., Any], name: str) -> None:
    message, expected = WRONG[name]
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.predict("m", message)
    assert refused.value.code == 400
    assert expected in json.loads(refused.value.read())["message"]
    with pytest.raises(grpc.RpcError) as failed:
        ask(message)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert expected in failed.value.details()
    assert outputs(server.predict("m", GOOD))[0] == outputs(ask(GOOD))[0], "it goes on serving"


def test_what_torchserve_refuses_by_itself(server: TorchServe, ask: Callable[..., Any]) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as unknown:
        server.predict("x", GOOD)
    assert "Model not found: x" in unknown.value.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404") as version:
        server.ask(server.inference, "/predictions/m/9", GOOD, method="POST")
    assert "9" in version.value.read().decode()
    with pytest.raises(grpc.RpcError) as failed:
        ask(GOOD, model="x")
    assert failed.value.code() is grpc.StatusCode.INTERNAL  # TorchServe's choice
    assert "Model not found: x" in failed.value.details()
    with pytest.raises(grpc.RpcError) as large:
        ask(bytes(17 * MIB))
    # It names the limit only when the client has read that far before its stream is reset.
    assert large.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
    with pytest.raises(urllib.error.URLError, match="413|reset|Broken pipe"):  # likewise
        server.predict("m", bytes(17 * MIB))
    assert outputs(ask(GOOD))[1] == [3.0, 7.0, 0.0]


class Load:
    """Clients of both APIs that ask all the time; what they were told, or what failed."""

    def __init__(self, *asks: Callable[[], tuple[str, list[float]]]) -> None:
        self.failures: list[str] = []
        self.answers: list[tuple[str, list[float]]] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(ask,)) for ask in asks]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, answer: tuple[str, list[float]], count: int = 20) -> None:
        seen, end = len(self.answers), time.monotonic() + 60
        while self.answers[seen:].count(answer) < count:
            assert time.monotonic() < end, (answer, self.answers[-3:], self.failures[-3:])
            time.sleep(0.02)

    def _run(self, ask: Callable[[], tuple[str, list[float]]]) -> None:
        while not self._stopped.is_set():
            try:
                self.answers.append(ask())
            except Exception as failure:
                self.failures.append(repr(failure))


def test_versions_change_and_roll_back_while_requests_flow(
    server: TorchServe, ask: Callable[..., Any]
) -> None:
    old, new = ("1", [3.0, 7.0, 0.0]), ("2", [6.0, 14.0, 0.0])
    with Load(lambda: outputs(ask(GOOD)), lambda: outputs(server.predict("m", GOOD))) as load:
        load.wait_for(old)
        server.register(server.store / "m-2.mar")
        load.wait_for(old)
        server.set_default("m", "2")
        load.wait_for(new)
        server.set_default("m", "1")
        load.wait_for(old)
    assert load.failures == []
    assert all(answer in (old, new) for answer in load.answers)
    assert outputs(ask(GOOD, version="2")) == new, "a version can be asked for by name"


def test_requests_computed_together_are_answered_for_themselves(
    server: TorchServe, folder: Path, ask: Callable[..., Any]
) -> None:
    server.register(write(folder, server.store, 2, "--version", "2-batched", "--batch-size", "8"))
    found: dict[int, Any] = {}
    together = [GOOD, make_batch([10], slot="shop"), make_batch([20]), b"abc", make_batch([10] * 3)]

    def predict(index: int) -> None:
        try:
            found[index] = server.ask(
                server.inference, "/predictions/m/2-batched", together[index], method="POST"
            )
        except urllib.error.HTTPError as refusal:
            found[index] = (refusal.code, refusal.read().decode())

    threads = [threading.Thread(target=predict, args=(index,)) for index in range(len(together))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outputs(found[0]) == ("2-batched", [6.0, 14.0, 0.0])
    assert outputs(found[2])[1] == [14.0]
    assert outputs(found[4])[1] == [6.0] * 3
    for index, expected in ((1, "feature 'shop'"), (3, "cut short")):
        code, message = found[index]
        assert code == 400
        assert expected in message


def test_a_checkpoint_that_changed_since_is_refused(server: TorchServe, folder: Path) -> None:
    shutil.copytree(folder / "model" / "step-000000000002", folder / "copy")
    result = run(folder, str(folder / "copy"), "--export-path", str(server.store), "--version", "3")
    assert result.exit_code == 0, result.output
    renumber(folder / "copy", 3)
    with pytest.raises(urllib.error.HTTPError):
        server.register(server.store / "m-3.mar")
    assert "is no longer what was archived: archive it again" in server.log.read_text()
    server.ask(server.management, "/models/m/3", method="DELETE")
    assert outputs(server.predict("m", GOOD))[0] == "1"
