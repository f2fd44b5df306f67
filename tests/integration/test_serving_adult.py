"""The adult-income model has the same AUC behind a server, ours or TorchServe, as in training."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .torchserving import require_torchserve, torchserve

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "adult_income"
SLOTS = str(EXAMPLE / "config" / "embedding_config.yml")
TIMEOUT_S = 240


def run(command: list[str], environment: dict[str, str]) -> str:
    finished = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def wait_until_serving(process: subprocess.Popen[bytes], log: Path) -> str:
    """The server's address: it says in its log which port it took."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"is served at (\S+:\d+)", log.read_text())
        if found:
            address = found.group(1)
            with grpc.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                with contextlib.suppress(grpc.RpcError):
                    reply = stub.Check(health_pb2.HealthCheckRequest(service="adult"), timeout=5)
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return address
        time.sleep(0.1)
    pytest.fail(f"the server does not serve: {log.read_text()}")


@dataclass
class Trained:
    """A run of the example: its folder, the test AUC it ended with, and the environment it ran in."""

    folder: Path
    auc: float
    environment: dict[str, str]

    @property
    def checkpoint(self) -> str:
        return str(self.folder / "run" / "checkpoint")

    def auc_of(self, client: str, *arguments: str) -> float:
        """What a client of the example prints."""
        data = ("--data", str(self.folder / "data"))
        printed = run([str(EXAMPLE / "serving" / client), *data, *arguments], self.environment)
        return float(printed.split()[2])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    settings = ("PERSIA_NATS_URL", "PERSIA_EMBEDDING_CONFIG", "RANK", "WORLD_SIZE", "ADULT_CHECKPOINT")
    folder = tmp_path_factory.mktemp("adult")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in settings},
        "ADULT_DATA": str(folder / "data"),
        "ADULT_OUTPUT": str(folder / "run"),
        "REPRODUCIBLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    run([str(EXAMPLE / "prepare_data.py"), "--generate", "--output", str(folder / "data")], environment)
    run([str(EXAMPLE / "train.py")], environment)
    auc = json.loads((folder / "run" / "summary.json").read_text())["test_auc"]
    assert 0.6 < auc < 1
    return Trained(folder, auc, environment)


# The example's client, whose batches have their ID features in another order.
REORDERED = """
import random, runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/serving"]
import batches
make, order = batches.to_persia_batch, sys.argv[2]
def reordered(split, requires_grad):
    batch = make(split, requires_grad)
    names = [feature.name for feature in batch.id_type_features]
    shuffled = random.Random(1).sample(names, 8)
    chosen = {"reversed": names[::-1], "alphabetical": sorted(names), "shuffled": shuffled}
    assert len(names) == 8 and chosen[order] != names
    batch.id_type_features.sort(key=lambda feature: chosen[order].index(feature.name))
    return batch
batches.to_persia_batch = reordered
sys.argv = sys.argv[2:]
runpy.run_path(sys.path[1] + "/client.py", run_name="__main__")
"""


def test_auc_through_the_server_equals_the_one_in_training(trained: Trained, tmp_path: Path) -> None:
    pytest.importorskip("tritonclient", reason="needs tritonclient (the 'test' extra)")
    log = tmp_path / "serve.log"
    command = [sys.executable, "-m", "persia.launcher", "serve", trained.checkpoint]
    command += ["--embedding-config", SLOTS, "--model-name", "adult", "--port", "0"]
    with (
        log.open("wb") as sink,
        subprocess.Popen(command, env=trained.environment, stdout=sink, stderr=sink) as server,
    ):
        try:
            address = wait_until_serving(server, log)
            assert trained.auc_of("client.py", "--address", address) == pytest.approx(trained.auc, abs=1e-6)
            for order in ("reversed", "alphabetical", "shuffled"):
                data = ["--data", str(trained.folder / "data"), "--address", address]
                printed = run(["-c", REORDERED, str(EXAMPLE), order, *data], trained.environment)
                assert float(printed.split()[2]) == pytest.approx(trained.auc, abs=1e-6), order
        finally:
            server.terminate()
            server.wait(120)


def test_auc_through_torchserve_equals_the_one_in_training(trained: Trained, tmp_path: Path) -> None:
    require_torchserve()
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools (the 'test' extra)")
    with torchserve(tmp_path / "server") as server:
        command = ["-m", "persia.launcher", "torchserve-archive", trained.checkpoint, "--version", "1"]
        command += ["--model-name", "adult", "--embedding-config", SLOTS, "--export-path", str(server.store)]
        archive = Path(run(command, trained.environment).splitlines()[-1])
        server.register(archive)
        for api, address in (("grpc", server.grpc), ("rest", server.inference)):
            served = trained.auc_of("torchserve_client.py", "--api", api, "--address", address)
            assert served == pytest.approx(trained.auc, abs=1e-6), api
