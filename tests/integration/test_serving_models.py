"""Several models in one `persia-launcher serve`: by name over both ports, with one copy of common rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.ports import free_port

from .test_serving import Served, config, dump, make_batch, no_cluster, start
from .test_serving_canary import over_http
from .test_serving_observed import get

__all__ = ["config", "no_cluster", "start"]  # fixtures
MESSAGE = make_batch([10])  # whose row has the sum 3


def metrics(address: str) -> dict[tuple[str, str, str], float]:
    """By name, model and status."""
    return {
        (sample.name, sample.labels.get("model", "-"), sample.labels.get("status", "")): sample.value
        for family in text_string_to_metric_families(get(address, "/metrics")[1])
        for sample in family.samples
    }


def test_models_are_asked_by_name_and_share_rows(
    start: Callable[..., Served], tmp_path: Path, config: str
) -> None:
    dump(tmp_path / "ads", factor=2.0, step=7)
    shutil.copytree(tmp_path / "ads", tmp_path / "twin")
    dump(tmp_path / "head", factor=5.0, step=1)
    dump(tmp_path / "feed", factor=1.0, step=3)
    http_port, address = free_port(), f"127.0.0.1:{free_port()}"
    served = start(
        *("--model", f"ads={tmp_path}/ads", "--model", f"twin={tmp_path}/twin"),
        *("--model", f"head={tmp_path}/head,rows=ads", "--model", f"feed={tmp_path}/feed,max-batch-size=1"),
        *("--embedding-config", config, "--http-port", str(http_port)),
        *("--metrics-port", address.rpartition(":")[2]),
    )
    expected = {"ads": ("7", 6.0), "twin": ("7", 6.0), "head": ("1", 15.0), "feed": ("3", 3.0)}
    for name, (version, value) in expected.items():
        assert served.infer(MESSAGE, name) == (version, [value])
        reply = over_http(http_port, f"/v2/models/{name}", "")
        assert (reply["model_name"], reply["model_version"]) == (name, version)
        assert reply["outputs"][0]["data"] == [value]
        assert served.client.get_model_metadata(name).name == name
        assert served.client.is_model_ready(name, version)
    assert "no version '7' here, but '3'" in served.refusal(MESSAGE, "feed", model_version="7")
    assert "2 samples, this server takes 1" in served.refusal(make_batch([10, 20]), "feed")
    assert "there is no model 'm': this server has 'ads', 'twin'" in served.refusal(MESSAGE, "m")
    index = served.client.get_model_repository_index().models
    assert {(model.name, model.version) for model in index} == {(n, v) for n, (v, _) in expected.items()}
    stats = {one.name: one for one in served.client.get_inference_statistics().model_stats}
    assert stats.keys() == expected.keys()
    assert (stats["ads"].inference_count, stats["feed"].inference_stats.fail.count) == (2, 2)
    with grpc.insecure_channel(served.address) as channel:
        for service in ("", *expected):
            request = health_pb2.HealthCheckRequest(service=service)
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    shown = metrics(address)
    # Two dumps of two rows: of ads and its copy, and of feed. The head has none of its own.
    assert shown["persia_serving_rows", "-", ""] == 4
    requests = "persia_serving_requests_total"
    assert [shown[requests, name, "OK"] for name in expected] == [2] * 4
    assert (shown[requests, "feed", "NOT_FOUND"], shown[requests, "", "NOT_FOUND"]) == (1, 1)
    assert get(address, "/readyz") == (200, "ok\n")
    status = json.loads(get(address, "/status")[1])["stats"]
    assert [model["model"] for model in status["models"]] == list(expected)
    assert (status["num_requests"], status["num_failed"]) == (11, 3), "with those of no model"
    # Each has versions of its own, and the head the rows of another model.
    dump(tmp_path / "ads", factor=4.0, step=8)
    served.wait_until(lambda: served.infer(MESSAGE, "ads") == ("8", [12.0]))
    assert served.infer(MESSAGE, "twin") == ("7", [6.0])
    assert served.infer(MESSAGE, "head") == ("1", [15.0])
    assert metrics(address)["persia_serving_rows", "-", ""] == 6
    assert served.stop() == 0
