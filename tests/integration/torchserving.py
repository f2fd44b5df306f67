"""A real TorchServe for tests: its Java frontend and Python workers, with the example's settings."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = REPOSITORY / "examples" / "adult_income" / "serving" / "config.properties"
START_S = 120.0
_OF_JOBS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "REPLICA_INDEX",
    "REPLICA_SIZE",
    "PERSIA_NATS_URL",
    "JAVA_HOME",
)


def require_torchserve() -> None:
    """Skips the test where TorchServe cannot run."""
    if importlib.util.find_spec("ts") is None or shutil.which("java") is None:
        pytest.skip(
            "TorchServe is not installed: apt-get install openjdk-17-jre-headless; pip install torchserve"
        )


class TorchServe:
    """Addresses of a running server, and its REST APIs."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "model_store"
        self.log = folder / "torchserve.log"
        self.inference, self.management, self.metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
        self.grpc, self.grpc_management = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"

    def settings(self) -> str:
        """The example's, with addresses of this server."""
        places = {
            "inference_address": f"http://{self.inference}",
            "management_address": f"http://{self.management}",
            "metrics_address": f"http://{self.metrics}",
            "grpc_inference_port": self.grpc.rpartition(":")[2],
            "grpc_management_port": self.grpc_management.rpartition(":")[2],
        }
        text = SETTINGS.read_text()
        for name, value in places.items():
            text, found = re.subn(rf"(?m)^{name}=.*$", f"{name}={value}", text)
            assert found == 1, name
        return text + "default_workers_per_model=1\n"

    def register(self, archive: Path) -> None:
        """Loads a version beside those that are there; not the default unless it is the first."""
        query = f"url={archive.name}&initial_workers=1&synchronous=true"
        self.ask(self.management, f"/models?{query}", method="POST")

    def set_default(self, model: str, version: str) -> None:
        self.ask(self.management, f"/models/{model}/{version}/set-default", method="PUT")

    def predict(self, model: str, batch: bytes) -> dict[str, Any]:
        return self.ask(self.inference, f"/predictions/{model}", batch, method="POST")

    def ask(
        self, address: str, path: str, body: bytes | None = None, *, method: str = "GET"
    ) -> dict[str, Any]:
        """Raises urllib.error.HTTPError."""
        headers = {"Content-Type": "application/octet-stream"} if body is not None else {}
        request = urllib.request.Request(f"http://{address}{path}", body, headers, method=method)
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            values: dict[str, Any] = json.loads(answer.read())
            return values


@contextlib.contextmanager
def torchserve(folder: Path) -> Iterator[TorchServe]:
    """A server without models; archives belong into its `store`."""
    require_torchserve()
    server = TorchServe(folder)
    server.store.mkdir(parents=True)
    settings = folder / "config.properties"
    settings.write_text(server.settings())
    environment = {name: value for name, value in os.environ.items() if name not in _OF_JOBS}
    # Its pid file is in the temporary folder, its logs in the working directory.
    environment["TMPDIR"] = str(folder)
    command = [sys.executable, "-m", "ts.model_server"]
    start = [*command, "--start", "--ncs", "--foreground"]
    start += ["--ts-config", str(settings), "--model-store", str(server.store)]
    with server.log.open("wb") as log:
        process = subprocess.Popen(start, stdout=log, stderr=log, env=environment, cwd=folder)
    try:
        _wait(server, process)
        yield server
    finally:
        subprocess.run(
            [*command, "--stop", "--foreground"],
            env=environment,
            cwd=folder,
            check=False,
            timeout=90,
            capture_output=True,
        )
        process.wait(120)


def _wait(server: TorchServe, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            server.ask(server.management, "/models")
            return
        time.sleep(0.1)
    pytest.fail(f"TorchServe does not start: {server.log.read_text()}")
