"""What `persia-launcher serve` shows of itself, and rows of servers while model and workers change."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from persia import env
from persia.launcher import cli
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER, SERVING
from persia.security import http_token
from persia.testing import LocalCluster
from tests.ports import free_port

from .test_serving import (
    SLOTS,
    Load,
    Served,
    config,
    dump,
    make_batch,
    no_cluster,
    start,
    wait_for,
)

__all__ = ["config", "no_cluster", "start"]  # fixtures


def get(address: str, path: str) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://{address}{path}", headers={"Authorization": f"Bearer {http_token()}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


def samples(address: str) -> dict[tuple[str, str], float]:
    """By name and the label that tells samples of a family apart, or ""."""
    code, page = get(address, "/metrics")
    assert code == 200
    return {
        (sample.name, sample.labels.get("status") or sample.labels.get("le") or ""): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_metrics_and_status_tell_what_was_asked(
    start: Callable[..., Served], tmp_path: Path, config: str
) -> None:
    dump(tmp_path / "model", factor=2.0, step=7)
    address = f"127.0.0.1:{free_port()}"
    arguments = ["--embedding-config", config, "--replica-index", "1", "--replica-size", "2"]
    served = start(str(tmp_path / "model"), *arguments, "--metrics-port", address.rpartition(":")[2])
    assert get(address, "/healthz") == (200, "ok\n")
    assert get(address, "/readyz") == (200, "ok\n")
    for _ in range(3):
        served.infer(make_batch([10, 20, 99]))
    served.refusal(make_batch([10], slot="shop"))
    served.refusal(make_batch([10]), model="x")
    with grpc.insecure_channel(served.address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as malformed:
            infer(b"\xff\xff no message", timeout=60)
    assert malformed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes are no ModelInferRequest" in malformed.value.details()
    # A request is counted once its answer is on its way.
    deadline = time.monotonic() + 60
    while (found := samples(address))["persia_serving_request_seconds_count", ""] < 6:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    requests = "persia_serving_requests_total"
    assert found[requests, "OK"] == 3
    assert found[requests, "INVALID_ARGUMENT"] == 2
    assert found[requests, "NOT_FOUND"] == 1
    assert found["persia_serving_request_seconds_count", ""] == 6
    assert found["persia_serving_batch_seconds_count", ""] == 4
    assert found["persia_serving_batch_samples_sum", ""] == 3 * 3 + 1
    assert found["persia_serving_batch_samples_bucket", "1"] == 1
    assert found["persia_serving_batch_samples_bucket", "2"] == 1
    assert found["persia_serving_batch_samples_bucket", "4"] == 4
    assert found["persia_serving_missing_rows_total", ""] == 3
    assert found["persia_serving_version_refused", ""] == 0
    assert found["persia_queue_depth", ""] == 0
    assert found["persia_ready", ""] == 1
    assert 'model_version="7"' in get(address, "/metrics")[1]
    status = json.loads(get(address, "/status")[1])
    assert (status["role"], status["index"], status["ready"]) == (SERVING, 1, True)
    records = [line for line in served.log.read_text().splitlines() if " INFO " in line]
    assert any("m is served at" in line for line in records)
    assert all(" INFO [serving 1] " in line for line in records)
    stats = status["stats"]
    assert stats["by_status"] == {"OK": 3, "INVALID_ARGUMENT": 2, "NOT_FOUND": 1}
    assert (stats["model"], stats["served_version"], stats["version_error"]) == ("m", "7", "")
    assert (stats["num_requests"], stats["num_failed"], stats["num_batches"]) == (6, 3, 4)
    assert (stats["num_waiting"], stats["num_running"], stats["num_missing"]) == (0, 0, 3)


@contextmanager
def in_job(cluster: LocalCluster) -> Iterator[None]:
    """This process as one of the cluster's job."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PERSIA_NATS_URL", "PERSIA_JOB_NAME"):
            patch.setenv(name, cluster.env[name])
        env.reload_env()
        yield
    env.reload_env()


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(embedding_config=SLOTS, embedding_workers=2, parameter_servers=2) as cluster:
        yield cluster


def test_remote_rows_while_model_and_workers_change(
    start: Callable[..., Served], cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_job(cluster):
        dump(tmp_path / "model", factor=1.0, step=1, keep_last=5)
        workers = Directory(cluster.session).wait_for(EMBEDDING_WORKER, 60.0)
    monkeypatch.setenv("PERSIA_JOB_NAME", cluster.env["PERSIA_JOB_NAME"])
    addresses = [argument for worker in workers for argument in ("--embedding-worker", worker.address)]
    served = start(str(tmp_path / "model"), *addresses, "--nats-url", cluster.env["PERSIA_NATS_URL"])
    with Load(served.address) as load:
        wait_for(served, load, ("1", 3.0))
        with in_job(cluster):  # the servers' rows are the same ones again: only the model is another
            dump(tmp_path / "model", factor=2.0, step=2, keep_last=5)
        wait_for(served, load, ("2", 6.0))
        (shown,) = wait_until_shown(cluster)
        cluster.kill("embedding-worker-0")
        wait_for(served, load, ("2", 6.0))
        assert served.client.is_server_ready()
    assert load.failures == []
    assert set(load.answers) == {("1", 3.0), ("2", 6.0)}
    assert shown.address == served.address
    assert json.loads(get(shown.status_address, "/status")[1])["stats"]["served_version"] == "2"
    with in_job(cluster):
        table = CliRunner().invoke(cli, ["status", "--once", "--interval", "0.5"]).output
        assert "serving 0" in table
        assert "version 2, 0 failed" in table
    cluster.kill("embedding-worker-1")
    served.wait_until(lambda: get(shown.status_address, "/readyz")[0] == 503)
    assert "no embedding worker serves" in get(shown.status_address, "/readyz")[1]
    assert served.stop() == 0
    assert Directory(cluster.session).present(SERVING, 0.4) == []


def wait_until_shown(cluster: LocalCluster) -> list[Any]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = Directory(cluster.session).present(SERVING, 0.4)
        if found:
            return found
    return pytest.fail("the server does not announce itself")


def test_a_broker_that_is_away_does_not_matter(
    start: Callable[..., Served], tmp_path: Path, config: str
) -> None:
    dump(tmp_path / "model", factor=1.0, step=1)
    served = start(
        str(tmp_path / "model"), "--embedding-config", config, "--nats-url", f"nats://127.0.0.1:{free_port()}"
    )
    assert served.infer(make_batch([10])) == ("1", [3.0])
    served.wait_until(lambda: "not shown in persia-launcher status for now" in served.log.read_text())
    assert served.infer(make_batch([20])) == ("1", [7.0])
    assert served.stop() == 0


def test_memory_of_a_replaced_version_is_kept_for_the_next_one(
    start: Callable[..., Served], tmp_path: Path, config: str
) -> None:
    dump(tmp_path / "model", factor=1.0, step=1, keep_last=5)
    address = f"127.0.0.1:{free_port()}"
    served = start(
        str(tmp_path / "model"), "--embedding-config", config, "--metrics-port", address.rpartition(":")[2]
    )

    def kept_bytes() -> int:
        return int(json.loads(get(address, "/status")[1])["stats"]["kept_memory_bytes"])

    assert kept_bytes() == 0
    found = []
    for step in (2, 3, 4):
        dump(tmp_path / "model", factor=1.0, step=step, keep_last=5)
        served.wait_until(lambda step=step: served.infer(make_batch([10])) == (str(step), [3.0]))
        # The thread that loads gives the old version up just after the new one answers.
        served.wait_until(lambda: kept_bytes() > 0)
        found.append(kept_bytes())
    assert found == [found[0]] * 3, "each version takes what the one before last has left"
