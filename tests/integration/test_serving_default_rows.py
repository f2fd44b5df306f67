"""`persia-launcher serve --on-missing-server default` answers while servers of rows are down, and says so."""

from __future__ import annotations

import json
import re
import struct
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from persia import env
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.testing import LocalCluster
from tests.ports import free_port

from .test_serving import SLOTS, config, dump, make_batch, no_cluster, start, tensor
from .watching import get

__all__ = ["config", "no_cluster", "start"]  # fixtures
MESSAGE = make_batch([10], dense=0.5)


def over_http(port: int) -> dict[str, Any]:
    raw = struct.pack("<I", len(MESSAGE)) + MESSAGE
    described = {"name": "batch", "datatype": "BYTES", "shape": [1]}
    head = json.dumps({"inputs": [{**described, "parameters": {"binary_data_size": len(raw)}}]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/m/infer",
        head + raw,
        {"Inference-Header-Content-Length": str(len(head))},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_default_rows_answer_while_a_parameter_server_is_down(
    start: Any, tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(embedding_config=SLOTS, embedding_workers=1, parameter_servers=2) as cluster:
        with monkeypatch.context() as patch:
            for name in ("PERSIA_NATS_URL", "PERSIA_JOB_NAME"):
                patch.setenv(name, cluster.env[name])
            env.reload_env()
            dump(tmp_path / "model", factor=1.0, step=1)
            (worker,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, 60.0)
        env.reload_env()
        http_port, metrics_port = free_port(), free_port()
        served = start(
            *(str(tmp_path / "model"), "--embedding-worker", worker.address, "--embedding-config", config),
            *("--on-missing-server", "default", "--timeout", "30"),
            *("--http-port", str(http_port), "--metrics-port", str(metrics_port)),
        )

        def ask() -> tuple[float, bool]:
            """The prediction, and whether the reply says that it is of default rows."""
            answer = served.client.infer("m", [tensor(MESSAGE)])
            marks = answer.get_response().parameters
            assert not marks or marks["default_rows"].bool_param
            return float(answer.as_numpy("output_0")[0, 0]), bool(marks)

        def shown(path: str) -> str:
            return get(f"http://127.0.0.1:{metrics_port}{path}")

        served.wait_until(lambda: ask() == (3.5, False))
        assert "parameters" not in over_http(http_port)
        for index in range(2):
            cluster.kill(f"embedding-parameter-server-{index}")
        served.wait_until(lambda: ask() == (0.5, True))
        assert over_http(http_port)["parameters"] == {"default_rows": True}
        assert served.client.is_server_ready()
        assert "ok, answers from default rows: none of the embedding workers" in shown("/readyz")
        assert worker.address in json.loads(shown("/status"))["stats"]["rows_error"]
        number = re.search(
            r"^persia_serving_default_batches_total\S* (\S+)$", shown("/metrics"), re.MULTILINE
        )
        assert number is not None
        assert float(number[1]) >= 2
