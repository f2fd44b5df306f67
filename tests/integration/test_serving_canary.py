"""Two versions side by side in `persia-launcher serve`: labels, shares, shadow requests, rollback; a log."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, List  # noqa: UP035 - torch.jit.script resolves typing.List

import torch
from click.testing import CliRunner

from persia.embedding.data import split_batches
from persia.launcher import cli
from persia.serving.gate import Gate
from persia.serving.sideline import Share
from tests.ports import free_port

from .test_serving import Model, Served, config, dump, make_batch, no_cluster, refused, start, tensor
from .test_serving_observed import get

__all__ = ["config", "no_cluster", "start"]  # fixtures
MESSAGE = make_batch([10])
STABLE, CANARY = ("1", [3.0]), ("2", [6.0])


class Broken(Model):
    """Fails every request."""

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        return torch.nn.functional.linear(dense[0], torch.ones(7, 7)) * self.factor


def metric(address: str, name: str) -> float:
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", get(address, "/metrics")[1], re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def canary_status(address: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(address, "/status")[1])["stats"]["canary"]
    return found


def over_http(port: int, path: str, request_id: str) -> dict[str, Any]:
    """The reply to a request whose batch is behind its JSON."""
    raw = len(MESSAGE).to_bytes(4, "little") + MESSAGE
    described = {
        "name": "batch",
        "datatype": "BYTES",
        "shape": [1],
        "parameters": {"binary_data_size": len(raw)},
    }
    head = json.dumps({"id": request_id, "inputs": [described]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}/infer", head + raw, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_a_canary_has_a_label_and_a_share(start: Callable[..., Served], tmp_path: Path, config: str) -> None:
    dump(tmp_path / "model", factor=1.0, step=1)
    dump(tmp_path / "next", factor=2.0, step=2)
    http_port, metrics_port, log = free_port(), free_port(), tmp_path / "requests.bin"
    sample, share = tmp_path / "sample.bin", tmp_path / "share"
    sample.write_bytes(2 * MESSAGE)
    share.write_text("0.5\n", encoding="utf-8")
    served = start(
        *(str(tmp_path / "model"), "--embedding-config", config, "--request-log", str(log)),
        *("--canary", str(tmp_path / "next"), "--canary-share", str(share), "--http-port", str(http_port)),
        *("--metrics-port", str(metrics_port), "--sample", str(sample)),
    )
    served.wait_until(lambda: served.client.is_model_ready("m", "canary"))
    words = ["evaluate", "latency", str(log), "--address", served.address, "--model-name", "m"]
    assert "has no requests yet" in CliRunner().invoke(cli, words).output
    for version, expected in (("stable", STABLE), ("canary", CANARY), ("1", STABLE), ("2", CANARY)):
        answer = served.client.infer("m", [tensor(MESSAGE)], model_version=version)
        reply = answer.get_response()
        assert (reply.model_version, answer.as_numpy("output_0")[0].tolist()) == expected
        assert ("canary" in reply.parameters) == (expected == CANARY)
        assert over_http(http_port, f"/v2/models/m/versions/{version}", "")["model_version"] == expected[0]
    assert "no version '3' here, but '1' and, as canary, '2'" in served.refusal(MESSAGE, model_version="3")
    # The share is drawn by the request's ID, so that all servers agree.
    drawn = Share(0.5, "canary")
    for number in range(16):
        expected = CANARY if drawn.takes(f"r{number}") else STABLE
        assert served.infer(MESSAGE, request_id=f"r{number}") == expected
        assert over_http(http_port, "/v2/models/m", f"r{number}")["model_version"] == expected[0]
    assert list(served.client.get_model_metadata("m").versions) == ["1", "2"]
    assert [model.version for model in served.client.get_model_repository_index().models] == ["1", "2"]
    stats = served.client.get_inference_statistics("m", "canary").model_stats[0]
    assert (stats.version, stats.inference_stats.fail.count) == ("2", 0)
    address = f"127.0.0.1:{metrics_port}"
    assert re.search('canary_info{.*model_version="2"', get(address, "/metrics")[1])
    assert get(address, "/readyz") == (200, "ok\n")
    served.wait_until(lambda: metric(address, "persia_serving_requests_logged_total") == 8 + 32)
    logged = log.read_bytes()
    assert split_batches(logged) == [MESSAGE] * 40
    assert log.stat().st_mode & 0o777 == 0o600
    Gate.of_file(log, max_drift=0.1, min_auc=None)
    result = CliRunner().invoke(cli, [*words, "--model-version", "canary", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)[0]["num_requests"] == 40
    assert metric(address, "persia_serving_canary_batch_samples_sum") >= 4 + 41
    # The file changes while the server runs.
    share.write_text("1", encoding="utf-8")
    served.wait_until(lambda: canary_status(address)["share"] == 1)
    assert {served.infer(MESSAGE, request_id=f"r{number}")[0] for number in range(16)} == {"2"}
    share.write_text("all", encoding="utf-8")
    refused = "share has no share: write a number from 0 to 1"
    served.wait_until(lambda: served.infer(MESSAGE) == CANARY and refused in served.log.read_text())
    assert served.stop() == 0


def test_a_canary_is_rolled_back_and_the_next_one_tried(
    start: Callable[..., Served], tmp_path: Path, config: str
) -> None:
    dump(tmp_path / "model", factor=1.0, step=1)
    address = f"127.0.0.1:{free_port()}"
    served = start(
        *(str(tmp_path / "model"), "--embedding-config", config, "--canary", str(tmp_path / "next")),
        *("--canary-share", "1", "--shadow-share", "1", "--canary-max-errors", "2"),
        *("--canary-max-drift", "0.5", "--metrics-port", address.rpartition(":")[2]),
    )
    # A canary that cannot be loaded stops nothing.
    served.wait_until(lambda: "the canary cannot be served: " in get(address, "/readyz")[1])
    assert served.infer(MESSAGE) == STABLE
    assert "no version 'canary' here" in served.refusal(MESSAGE, model_version="canary")
    dump(tmp_path / "next", factor=1.0, step=2, keep_last=5, kind=Broken)
    served.wait_until(lambda: canary_status(address)["version"] == "2")
    for _ in range(6):
        assert served.infer(MESSAGE) == STABLE, "what the canary fails is answered all the same"
    # The client's fault is not the canary's.
    assert "INVALID_ARGUMENT" in served.refusal(make_batch([10], slot="shop"))
    code, text = get(address, "/readyz")
    assert (code, "canary 2 is rolled back: it failed 3 of its last 3" in text) == (200, True), text
    assert canary_status(address)["num_errors"] == 3
    dump(tmp_path / "next", factor=2.0, step=3, keep_last=5)
    served.wait_until(lambda: served.infer(MESSAGE) == ("3", [6.0]))
    assert get(address, "/readyz") == (200, "ok\n")

    def is_rolled_back() -> bool:
        assert served.infer(MESSAGE, model_version="stable") == STABLE
        return bool(canary_status(address)["rolled_back"])

    served.wait_until(is_rolled_back)
    assert "differ from those of the stable version by 3 on average" in get(address, "/readyz")[1]
    assert served.infer(MESSAGE) == STABLE
    assert served.infer(MESSAGE, model_version="canary") == ("3", [6.0]), "a request may still ask for it"
    assert metric(address, "persia_serving_canary_rollbacks_total") == 2
    assert metric(address, "persia_serving_canary_rolled_back") == 1
    assert metric(address, "persia_serving_shadow_difference_count") >= 10
    assert served.stop() == 0


def test_every_batch_of_a_sample_is_tried(tmp_path: Path, config: str) -> None:
    dump(tmp_path / "model", factor=1.0, step=1)
    sample = tmp_path / "sample.bin"
    sample.write_bytes(MESSAGE + make_batch([10], slot="shop"))
    assert "shop" in refused(str(tmp_path / "model"), "--embedding-config", config, "--sample", str(sample))
