"""Pushes, health and readiness of server processes, and the switches that turn them off."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from persia import _native
from persia.errors import StorageError, UnavailableError
from persia.messaging.discovery import Directory, ServiceInfo
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER
from persia.observability.health import HealthService
from persia.observability.http import HttpPort
from persia.security.secret import WORKER
from persia.testing import LocalCluster
from tests.ports import free_port

from .conftest import EMBEDDING_CONFIG
from .watching import DEADLINE_S, all_processes, get, get_any, prometheus, pushgateway, wait_until

METRICS_ON = {"common_config": {"metrics_config": {"job_name": "dlrm", "push_interval_sec": 1}}}
METRICS_OFF = {"common_config": {"metrics_config": {"enable_metrics": False}}}


def status_of(process: ServiceInfo) -> dict[str, Any]:
    return json.loads(get(f"http://{process.status_address}/status"))["stats"]


def pushed_labels(page: str) -> list[dict[str, str]]:
    """Of each group on a gateway's page."""
    lines = re.findall(r"^push_time_seconds{(.*)}", page, flags=re.MULTILINE)
    return [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]


def groups_of(page: str) -> set[tuple[str, str, str]]:
    """(job, role, replica) of what was pushed."""
    return {(one["job"], one["role"], one["replica"]) for one in pushed_labels(page)}


def test_bug_24_each_process_has_a_group_of_its_own_on_the_gateway(local_cluster, tmp_path):
    with pushgateway(tmp_path) as gateway:
        cluster = local_cluster(
            embedding_config=EMBEDDING_CONFIG,
            global_config=METRICS_ON,
            parameter_servers=2,
            env={"PERSIA_METRICS_GATEWAY_ADDR": gateway},
        )
        expected = {
            ("dlrm", EMBEDDING_PARAMETER_SERVER, "0"),
            ("dlrm", EMBEDDING_PARAMETER_SERVER, "1"),
            ("dlrm", EMBEDDING_WORKER, "0"),
        }
        wait_until(lambda: groups_of(get(f"http://{gateway}/metrics")) == expected, "all groups")
        page = get(f"http://{gateway}/metrics")
        assert "# TYPE index_miss_count counter\n" in page
        assert len(re.findall(r"^persia_rows{", page, flags=re.MULTILINE)) == 2
        with prometheus(tmp_path, gateway=gateway) as scraped:  # as docker-compose.metrics.yml has it
            rows = 'count by (job, replica) (persia_rows{job="dlrm", role="embedding-parameter-server"})'
            wait_until(lambda: len(scraped.query(rows)) == 2, "pushed metrics, with the labels of who pushed")
        assert cluster.stop("embedding-parameter-server-1") == 0
        left = expected - {("dlrm", EMBEDDING_PARAMETER_SERVER, "1")}
        # The gateway accepts a deletion before it has deleted.
        wait_until(lambda: groups_of(get(f"http://{gateway}/metrics")) == left, "one group less")


def test_two_jobs_of_one_name_do_not_overwrite_each_other_on_the_gateway(local_cluster, tmp_path):
    with pushgateway(tmp_path) as gateway:
        one, other = (
            local_cluster(
                embedding_config=EMBEDDING_CONFIG,
                global_config=METRICS_ON,
                embedding_workers=0,
                env={"PERSIA_METRICS_GATEWAY_ADDR": gateway},
            )
            for _ in range(2)
        )
        url = f"http://{gateway}/metrics"
        wait_until(lambda: len(pushed_labels(get(url))) == 2, "a group of each")
        groups = pushed_labels(get(url))
        assert {(g["job"], g["role"], g["replica"]) for g in groups} == {
            ("dlrm", EMBEDDING_PARAMETER_SERVER, "0")
        }
        assert len({group["instance"] for group in groups}) == 2
        assert len(re.findall(r"^persia_rows{", get(url), flags=re.MULTILINE)) == 2
        assert one.stop("embedding-parameter-server-0") == 0
        wait_until(lambda: len(pushed_labels(get(url))) == 1, "one group less: deletions are only accepted")
        (left,) = pushed_labels(get(url))
        (process,) = [p for p in other.processes if p.name == "embedding-parameter-server-0"]
        assert left["instance"].endswith(f":{process.pid}")


def test_a_rank_pushes_its_metrics(start_job, tmp_path):
    with pushgateway(tmp_path) as gateway:
        job = start_job(
            *("--pace", "0.1"),
            loaders=[["--batches", "60"]],
            global_config=METRICS_ON,
            env={"PERSIA_METRICS_GATEWAY_ADDR": gateway},
        )
        wait_until(lambda: "persia_nn_staleness_max{" in get(f"http://{gateway}/metrics"), "the rank's push")
        assert job.finish_nn_worker() == 0


def test_a_gateway_that_is_away_is_reported_once_and_stops_nothing(local_cluster):
    cluster = local_cluster(
        embedding_config=EMBEDDING_CONFIG,
        global_config=METRICS_ON,
        embedding_workers=0,
        env={"PERSIA_METRICS_GATEWAY_ADDR": f"127.0.0.1:{free_port()}"},
    )
    name = "embedding-parameter-server-0"
    wait_until(lambda: "could not be pushed" in cluster.logs(name), "the report")
    assert cluster.stop(name) == 0
    assert cluster.logs(name).count("could not be pushed") == 1


def test_metrics_that_are_off_are_neither_shown_nor_pushed(local_cluster, tmp_path):
    with pushgateway(tmp_path) as gateway:
        cluster = local_cluster(
            embedding_config=EMBEDDING_CONFIG,
            global_config=METRICS_OFF,
            env={"PERSIA_METRICS_GATEWAY_ADDR": gateway},
        )
        for info in all_processes(cluster, 2):
            code, text = get_any(f"http://{info.status_address}/metrics")
            assert code == 404
            assert "enable_metrics" in text
            assert get(f"http://{info.status_address}/readyz") == "ok\n"
        assert groups_of(get(f"http://{gateway}/metrics")) == set()


def test_a_worker_is_not_ready_while_a_parameter_server_is_away(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, parameter_servers=2)
    (worker,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, DEADLINE_S)
    ready = f"http://{worker.status_address}/readyz"
    assert get(ready) == "ok\n"
    loads = status_of(worker)["server_loads"]
    assert [load["num_rows"] for load in loads] == [0, 0]
    cluster.kill("embedding-parameter-server-1")
    code, reason = get_any(ready)
    assert code == 503
    assert "server_loads" not in status_of(worker)
    assert "parameter-server 1" in reason
    assert get(f"http://{worker.status_address}/healthz") == "ok\n"  # alive all the same
    cluster.restart("embedding-parameter-server-1")
    wait_until(lambda: get_any(ready)[0] == 200, "ready again")


def test_a_process_without_a_broker_is_not_ready(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, embedding_workers=0)
    (server,) = all_processes(cluster, 1)
    ready = f"http://{server.status_address}/readyz"
    cluster.kill("nats")
    wait_until(lambda: get_any(ready)[0] == 503, "not ready")
    assert "NATS" in get_any(ready)[1]
    cluster.restart("nats")
    wait_until(lambda: get_any(ready)[0] == 200, "ready again")


class Health:
    """Asks a gRPC health service."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)

    def is_serving(self, service: str = "") -> bool:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = self._stub.Check(request, timeout=DEADLINE_S, wait_for_ready=True)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def watch(self) -> Iterator[bool]:
        """Whether it is serving, now and at every change."""
        for answer in self._stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=DEADLINE_S):
            yield answer.status == health_pb2.HealthCheckResponse.SERVING


@contextlib.contextmanager
def with_health(cluster: LocalCluster, role: str) -> Iterator[tuple[subprocess.Popen[bytes], Health]]:
    """A server of the cluster's job with a health service, and no other port for those who watch."""
    port = free_port()
    command = [sys.executable, "-m", "persia.launcher", role]
    options = ["--port=0", f"--health-port={port}", "--metrics-port=off"]
    with subprocess.Popen([*command, *options], env=cluster.env) as process:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield process, Health(channel)
        finally:
            process.kill()


def test_the_grpc_health_service_says_ready_and_configured(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, embedding_workers=0, parameter_servers=0)
    with with_health(cluster, EMBEDDING_PARAMETER_SERVER) as (process, health):
        wait_until(health.is_serving, "serving")
        assert not health.is_serving("configured")
        (server,) = Directory(cluster.session).wait_for(EMBEDDING_PARAMETER_SERVER, DEADLINE_S)
        assert server.status_address == ""  # --metrics-port=off
        configure(cluster, server.address)
        wait_until(lambda: health.is_serving("configured"), "configured")
        watch = health.watch()
        assert next(watch)
        process.terminate()
        assert not next(watch)
        assert process.wait(DEADLINE_S) == 0


def test_the_grpc_health_of_an_embedding_worker_follows_its_parameter_servers(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, embedding_workers=0)
    with with_health(cluster, EMBEDDING_WORKER) as (process, health):
        wait_until(health.is_serving, "serving")
        assert not health.is_serving("configured")
        watch = health.watch()
        assert next(watch)
        cluster.kill("embedding-parameter-server-0")
        assert not next(watch)  # told once, not at every look
        cluster.restart("embedding-parameter-server-0")
        assert next(watch)
        process.terminate()
        assert not next(watch)
        assert process.wait(DEADLINE_S) == 0
        with pytest.raises(grpc.RpcError) as gone:
            next(health.watch())
        assert gone.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("command", [("status", "--once"), ("status", "--targets"), ("trace",)])
def test_a_job_that_is_not_there_is_named(local_cluster, command):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, embedding_workers=0, parameter_servers=0)
    arguments = [sys.executable, "-m", "persia.launcher", *command, "--job-name", "elsewhere"]
    result = subprocess.run(arguments, env=cluster.env, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "--targets" in command or "'elsewhere'" in result.stderr


def configure(cluster: Any, server_address: str) -> None:
    """As a job does: through an embedding worker."""
    cluster.join(WORKER)
    worker = _native.EmbeddingWorker(
        slots=[_native.SlotConfig(name="user", dim=8)], feature_index_prefix_bit=8, num_servers=1
    )
    worker.set_server(0, server_address)
    cluster.join()
    client = _native.RemoteClient(1)
    client.set_worker(0, f"127.0.0.1:{worker.start('127.0.0.1', 0)}")
    client.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))
    worker.stop()


def test_a_port_in_use_is_named():
    port = HttpPort("127.0.0.1", 0, {})
    with pytest.raises(StorageError, match=f"127.0.0.1:{port.port}: .*; set PERSIA_METRICS_PORT"):
        HttpPort("127.0.0.1", port.port, {})
    with pytest.raises(StorageError, match="PERSIA_HEALTH_PORT"):
        HealthService("127.0.0.1", port.port, {"": lambda: True})
    port.close()


def test_requests_and_bytes_of_calls_are_counted():
    server = _native.ParameterServer(replica_index=0, replica_size=1, capacity=100, num_internal_shards=1)
    worker = _native.EmbeddingWorker(
        slots=[_native.SlotConfig(name="user", dim=8)], feature_index_prefix_bit=8, num_servers=1
    )
    worker.set_server(0, f"127.0.0.1:{server.start('127.0.0.1', 0)}")
    client = _native.RemoteClient(1)
    client.set_worker(0, f"127.0.0.1:{worker.start('127.0.0.1', 0)}")
    client.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))
    ids = np.array([1, 2, 2], dtype=np.uint64)
    message = _native.encode_id_features(3, [("user", ids, np.arange(4, dtype=np.uint32))])
    client.lookup_direct(0, message, requires_grad=True)
    (channel,) = client.channels()
    assert (channel["num_calls"], channel["num_connects"], channel["num_retries"]) == (2, 1, 0)
    assert channel["num_sent_bytes"] > len(message)
    assert channel["num_received_bytes"] > 3 * 8 * 4
    stats, (slot,) = worker.stats(), worker.slots()
    assert (stats["rpc_num_requests"], stats["rpc_num_failed"]) == (2, 0)
    assert stats["rpc_num_received_bytes"] == channel["num_sent_bytes"]
    assert stats["rpc_num_sent_bytes"] == channel["num_received_bytes"]
    assert (slot["num_ids"], slot["num_distinct"]) == (3, 2)
    assert slot["last_distinct_ratio"] == pytest.approx(2 / 3)
    for gradient, key in ((np.full((3, 8), np.nan, np.float32), "num_nonfinite"), (None, "num_skipped")):
        result = client.lookup_direct(0, message, requires_grad=True)
        client.return_gradients(result.reference, [("user", gradient)])
        assert worker.slots()[0][key] == 1
    for role in (server, worker):
        exported = {name: value for name, _, _, value in role.metrics()}
        assert exported["persia_rpc_requests"] == role.stats()["rpc_num_requests"]
        assert exported["persia_rpc_late_requests"] == 0
    rows = server.stats()
    assert rows["configured"] is True
    assert (rows["num_looked_up_rows"], rows["num_missing_rows"], rows["last_missing_ratio"]) == (6, 2, 0.0)
    server.stop()
    worker.stop()


def test_requests_that_are_sent_again_are_counted():
    """The peer breaks every connection once it has read from it."""
    client = _native.RemoteClient(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)

        def break_connections() -> None:
            for _ in range(3):
                connection, _ = listener.accept()
                connection.recv(1)
                connection.close()

        thread = threading.Thread(target=break_connections)
        thread.start()
        client.set_worker(0, f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(UnavailableError):
            client.clear(timeout_s=6.0)
        thread.join()
    (channel,) = client.channels()
    assert channel["num_calls"] == 1
    assert channel["num_pending"] == 0
    assert channel["num_retries"] >= 2
    assert channel["num_connects"] >= 3
