"""A job that trains, watched by everything there is: Prometheus, dashboards, alerts, the launcher."""

from __future__ import annotations

import itertools
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from persia._native import DURATION_BOUNDS_S
from persia.embedding.data import IDTypeFeatureWithSingleID, NonIDTypeFeature, PersiaBatch
from persia.messaging.subjects import DATA_LOADER, EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER
from persia.observability.status import fetch_json
from persia.testing import LocalCluster
from tests.ports import free_port

from .conftest import EMBEDDING_CONFIG, JOBS
from .test_serving import Served
from .watching import DEADLINE_S, MONITORING, Prometheus, all_processes, get, prometheus, wait_until

BATCHES = "1000000"  # more than are trained while the tests run

# As published: name, type, label besides the process' own.
PUBLISHED = {
    EMBEDDING_PARAMETER_SERVER: [
        ("index_miss_count", "counter"),
        ("index_miss_ratio", "gauge"),
        ("set_embedding_time_cost_sec", "gauge"),
        ("decode_indices_time_cost_sec", "gauge"),
        ("encode_embedding_time_cost_sec", "gauge"),
        ("lookup_inference_batch_time_cost_sec", "gauge"),
        ("lookup_hashmap_time_cost_sec", "gauge"),
        ("gradient_id_miss_count", "counter"),
    ],
    EMBEDDING_WORKER: [
        ("batch_unique_indices_rate", "gauge"),
        ("estimated_distinct_id", "gauge"),
        ("num_pending_batches", "gauge"),
        ("staleness", "gauge"),
        ("nan_count", "counter"),
        ("nan_grad_skipped", "counter"),
        ("lookup_preprocess_time_cost_sec", "gauge"),
        ("lookup_rpc_time_cost_sec", "gauge"),
        ("lookup_postprocess_time_cost_sec", "gauge"),
        ("lookup_total_time_cost_sec", "gauge"),
        ("update_gradient_time_cost_sec", "gauge"),
    ],
    NN_WORKER: [
        ("forward_client_to_gpu_time_cost_sec", "gauge"),
        ("forward_client_time_cost_sec", "gauge"),
        ("forward_error", "counter"),
        ("backward_client_time_cost_sec", "gauge"),
        ("get_train_batch_time_cost_more_than_1ms_sec", "gauge"),
        ("update_gradient_batched_time_cost_more_than_1ms_sec", "gauge"),
    ],
    DATA_LOADER: [],
}
WITH_FEAT = ("batch_unique_indices_rate", "estimated_distinct_id", "nan_count", "nan_grad_skipped")


# Of what takes long where a machine has much else to do.
OF_TIME = {"PersiaServingSlow", "PersiaPredictionsSlow", "PersiaFollowerLate", "PersiaPacketsLate"}

# Phases that the job need not have gone through in the last minute; it has no slots in step.
SELDOM = {"checkpoint dump", "checkpoint load", "lookup in step", "queue of requests", "set"}


class WatchedJob:
    def __init__(self, cluster: LocalCluster, folder: Path, health_ports: dict[str, int]) -> None:
        self.cluster = cluster
        self.health_ports = health_ports  # by role
        self.folder = folder  # model/, a checkpoint, and packets/
        self.processes = all_processes(cluster, 5)

    def page(self, role: str, index: int = 0) -> str:
        (info,) = [info for info in self.processes if (info.role, info.index) == (role, index)]
        return get(f"http://{info.status_address}/metrics")

    def launcher(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "persia.launcher", *arguments]
        return subprocess.run(
            command, env=self.cluster.env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )


def samples(page: str, name: str) -> dict[str, float]:
    """By the text of their labels."""
    found = re.findall(rf"^{name}{{(.*)}} (\S+)$", page, flags=re.MULTILINE)
    return {labels: float(value) for labels, value in found}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    env = {"OMP_NUM_THREADS": "1", "PERSIA_DEADLINE_SEC": "240"}
    folder = tmp_path_factory.mktemp("job")
    packets = {"enable_incremental_update": True, "incremental_dir": str(folder / "packets")}
    settings = {"embedding_parameter_server_config": {**packets, "incremental_dense_interval_sec": 1}}
    ports = {role: free_port() for role in (DATA_LOADER, NN_WORKER)}
    health = {role: {"PERSIA_HEALTH_PORT": str(port)} for role, port in ports.items()}
    with LocalCluster(
        embedding_config=EMBEDDING_CONFIG, global_config=settings, env=env, parameter_servers=2
    ) as cluster:
        place = {"replica_index": 0, "replica_size": 1}
        cluster.start_loader(JOBS / "loader.py", "--batches", BATCHES, **place, env=health[DATA_LOADER])
        ranks = cluster.start_nn_worker(
            JOBS / "watched.py", str(folder / "model"), nproc=1, env=health[NN_WORKER]
        )
        wait_until(lambda: "under way" in ranks.output or ranks.exit_code is not None, "training")
        assert ranks.exit_code is None, ranks.output
        yield WatchedJob(cluster, folder, ports)


def test_every_role_shows_the_published_metrics(job):
    assert len(job.processes) == 5
    for role, metrics in PUBLISHED.items():
        page = job.page(role)
        for name, kind in metrics:
            assert f"# TYPE {name} {kind}\n" in page
            values = samples(page, name)
            expected = ["items", "user"] if name in WITH_FEAT else [None]
            assert sorted(re.findall(r'feat="(\w+)"', " ".join(values))) == [e for e in expected if e]
            assert len(values) == len(expected), (name, values)


def test_the_values_are_those_of_the_job(job):
    server, worker, rank = (job.page(r) for r in (EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER))
    (missed,) = samples(server, "index_miss_count").values()
    (rows,) = samples(server, "persia_rows").values()
    assert 0 < rows <= 250  # of two servers, 50 users and 200 items
    assert missed >= rows  # evaluations miss rows without making them
    for page, names in (
        (server, ("lookup_hashmap_time_cost_sec", "lookup_inference_batch_time_cost_sec")),
        (worker, ("lookup_total_time_cost_sec", "update_gradient_time_cost_sec")),
        (rank, ("forward_client_time_cost_sec", "forward_client_to_gpu_time_cost_sec")),
    ):
        for name in names:
            (seconds,) = samples(page, name).values()
            assert 0 < seconds < 100, name
    estimates = samples(worker, "estimated_distinct_id")
    (users,) = [value for labels, value in estimates.items() if 'feat="user"' in labels]
    assert users == pytest.approx(50, rel=0.1)
    (in_flight,) = samples(worker, "staleness").values()
    assert 0 <= in_flight <= 4
    (step,) = [v for labels, v in samples(rank, "persia_reported").items() if 'name="step"' in labels]
    assert step >= 20


def test_a_histogram_is_cumulative_and_complete(job):
    page = job.page(EMBEDDING_PARAMETER_SERVER)
    buckets = samples(page, "persia_phase_seconds_bucket")
    counts = [count for labels, count in buckets.items() if 'phase="update"' in labels]
    assert len(counts) == len(DURATION_BOUNDS_S) + 1
    assert counts == sorted(counts)
    total = [v for labels, v in samples(page, "persia_phase_seconds_count").items() if '"update"' in labels]
    assert total == [counts[-1]]
    assert counts[-1] > 0


def test_status_tells_rates_and_what_the_script_reports(job):
    result = job.launcher("status", "--once", "--interval", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    for text in ("embedding-parameter-server 1", "nn-worker 0", "batches/s", "rows/s", "loss", "step"):
        assert text in result.stdout
    result = job.launcher("status", "--json")
    assert result.returncode == 0, result.stderr
    statuses = json.loads(result.stdout)
    assert [s["info"]["role"] for s in statuses] == [info.role for info in job.processes]
    assert all(status["values"]["ready"] and status["values"]["configured"] for status in statuses)
    (worker,) = [s["values"]["stats"] for s in statuses if s["info"]["role"] == EMBEDDING_WORKER]
    assert all(load["num_rows"] > 0 and load["num_updated_rows"] > 0 for load in worker["server_loads"])
    assert 1 <= worker["load_imbalance"] < 2  # 2: one of the two servers does all the work


def test_the_live_table_has_rates_until_it_is_left(job):
    """On a terminal."""
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "persia.launcher", "status", "--interval", "0.2"]
    env = {**job.cluster.env, "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(command, env=env, stdout=terminal) as process:
        os.close(terminal)
        shown, deadline = "", time.monotonic() + DEADLINE_S
        while "batches/s" not in shown:  # which two looks tell
            readable, _, _ = select.select([ours], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, shown
            shown += os.read(ours, 1 << 16).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    os.close(ours)


@pytest.mark.parametrize("role", [DATA_LOADER, NN_WORKER])
def test_scripts_have_the_grpc_health_service_as_servers_do(job, role):
    with grpc.insecure_channel(f"127.0.0.1:{job.health_ports[role]}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", "configured"):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = check(request, timeout=DEADLINE_S, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service


def test_a_dump_is_counted_and_ends_the_lag(job, tmp_path):
    before = [samples(job.page(EMBEDDING_PARAMETER_SERVER, i), "persia_checkpoints_total") for i in range(2)]
    dump = job.launcher("checkpoint", "dump", str(tmp_path / "dump"))
    assert dump.returncode == 0, dump.stdout + dump.stderr
    for index in range(2):
        page = job.page(EMBEDDING_PARAMETER_SERVER, index)
        counts = samples(page, "persia_checkpoints_total")
        (done,) = [labels for labels in counts if '"dump"' in labels and '"done"' in labels]
        assert counts[done] == before[index][done] + 1
        assert [n for labels, n in counts.items() if '"failed"' in labels] == [0, 0, 0]
        (lag,) = samples(page, "persia_checkpoint_lag_seconds").values()
        (uptime,) = samples(page, "persia_uptime_seconds").values()
        assert 0 < lag < uptime - 1
        seconds = samples(page, "persia_phase_seconds_count")
        assert [n for labels, n in seconds.items() if '"checkpoint dump"' in labels] == [counts[done]]


def test_doctor_finds_the_job_and_what_is_wrong(job):
    good = job.launcher("doctor", "--json")
    assert good.returncode == 0, good.stdout
    found = [row["what"] for row in json.loads(good.stdout) if row["topic"] == "nats"]
    assert sum("is ready" in what for what in found) == 5
    bad = job.launcher("doctor", "--global-config", "no_such_file.yml")
    assert bad.returncode == 1
    assert "no_such_file.yml" in bad.stdout


def test_a_trace_has_all_phases_of_all_roles(job, tmp_path):
    path = tmp_path / "trace.json"
    result = job.launcher("trace", "--batches", "30", "--output", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    events = json.loads(path.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(processes) == 5
    seen = {(processes[event["pid"]].rpartition(" ")[0], event["name"]) for event in events}
    assert {
        (DATA_LOADER, "send batch"),
        (EMBEDDING_WORKER, "register"),
        (EMBEDDING_WORKER, "lookup preprocess"),
        (EMBEDDING_WORKER, "lookup rpc"),
        (EMBEDDING_WORKER, "lookup postprocess"),
        (EMBEDDING_WORKER, "update reduce"),
        (EMBEDDING_PARAMETER_SERVER, "lookup"),
        (EMBEDDING_PARAMETER_SERVER, "update"),
        (NN_WORKER, "wait for batch"),
        (NN_WORKER, "forward"),
        (NN_WORKER, "backward"),
        (NN_WORKER, "client return gradients"),
    } <= seen
    check_one_batch_is_in_order(events, processes)
    check_queues_are_seen(events, processes)
    check_the_picture(path, path.with_suffix(".svg"))


def draw(trace: Path, picture: Path) -> str:
    command = [sys.executable, str(MONITORING / "draw_trace.py"), str(trace), str(picture)]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert drawn.returncode == 0, drawn.stderr
    assert re.fullmatch(rf"batch \d+: {re.escape(str(picture))}\n", drawn.stdout)
    return picture.read_text()


def test_a_picture_shows_its_batch_where_others_wait_in_the_same_queue(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "nn-worker 0"}}
    ]
    for batch, begin, end in ((1, 0, 5000), (2, 1000, 7000)):
        span = {"name": "queue of ready batches", "pid": 0, "id": batch, "args": {"batch_id": batch}}
        events += [{**span, "ph": "b", "ts": begin}, {**span, "ph": "e", "ts": end}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    drawing = draw(tmp_path / "trace.json", tmp_path / "trace.svg")
    assert drawing.index("fill: #dddddd") < drawing.index("fill: #1f77b4"), "batch 2 covers batch 1"


def check_the_picture(trace: Path, picture: Path) -> None:
    """As the documents draw it: the lanes of one batch in all roles that it goes through."""
    lanes = re.findall(r"<!-- (\S+ \d): (.+) -->", draw(trace, picture))  # matplotlib's, beside the outlines
    assert {
        ("nn-worker 0", "forward"),
        ("embedding-worker 0", "lookup preprocess"),
        ("embedding-worker 0", "update reduce"),
        ("embedding-parameter-server 0", "lookup"),
        ("embedding-parameter-server 1", "update"),
    } <= set(lanes)


def check_one_batch_is_in_order(events, processes) -> None:
    """Of one batch, across processes: its pooling ends before its forward begins, and so on."""
    rank, worker = (f"{role} 0" for role in (NN_WORKER, EMBEDDING_WORKER))
    spans = [event for event in events if event["ph"] == "X"]
    of_rank = [e for e in spans if processes[e["pid"]] == rank and e["name"] == "to device"]
    references = {e["args"]["reference"]: e["args"]["batch_id"] for e in of_rank if "reference" in e["args"]}

    def find(process, name, key, value):
        return [
            e
            for e in spans
            if processes[e["pid"]] == process and e["name"] == name and e["args"].get(key) == value
        ]

    complete = updated = 0
    for reference, batch_id in references.items():
        parts = [
            find(worker, "lookup postprocess", "reference", reference),
            find(rank, "forward", "batch_id", batch_id),
            find(rank, "backward", "batch_id", batch_id),
            find(worker, "update reduce", "reference", reference),
        ]
        if all(len(part) == 1 for part in parts):
            complete += 1
            times = [(part[0]["ts"], part[0]["ts"] + part[0]["dur"]) for part in parts]
            for (_, end), (begin, _) in itertools.pairwise(times):
                assert end <= begin
            updated += rows_of_batch_are_seen(
                spans, processes, batch_id, pooled=times[0][0], reduced=times[3][1]
            )
    assert complete >= 10
    assert updated >= complete - 4  # embedding_staleness: the last ones are updated after the recording


def check_queues_are_seen(events, processes) -> None:
    """Where a batch waits at the rank: from its submission to its lookup, from its pooling to its step."""
    rank = f"{NN_WORKER} 0"
    own = [e for e in events if processes[e["pid"]] == rank and e.get("args", {}).get("batch_id") is not None]
    ends = {(e["name"], e["args"]["batch_id"]): e["ts"] for e in own if e["ph"] == "e"}
    begins = {(e["name"], e["args"]["batch_id"]): e["ts"] for e in own if e["ph"] in "bX"}
    complete = 0
    for (name, batch_id), looked_up in begins.items():
        was_submitted = ("queue of submitted batches", batch_id) in ends  # or before the recording
        if name != "client lookup" or not was_submitted or ("to device", batch_id) not in begins:
            continue
        complete += 1
        assert ends["queue of submitted batches", batch_id] <= looked_up
        assert looked_up < begins["queue of ready batches", batch_id]
        assert ends["queue of ready batches", batch_id] <= begins["to device", batch_id]
    assert complete >= 10


def rows_of_batch_are_seen(spans, processes, batch_id, *, pooled, reduced) -> bool:
    """Servers know the batch: they look its rows up before it is pooled, and update them after the sums.

    Whether all servers that looked up have updated, too.
    """
    of_servers = [
        e
        for e in spans
        if processes[e["pid"]].startswith(EMBEDDING_PARAMETER_SERVER)
        and e["args"].get("batch_id") == batch_id
    ]
    lookups = [e for e in of_servers if e["name"] == "lookup"]
    updates = [e for e in of_servers if e["name"] == "update"]
    assert lookups
    assert all(e["ts"] + e["dur"] <= pooled for e in lookups)
    assert all(e["ts"] >= reduced for e in updates)
    return len(updates) == len(lookups)


def test_a_trace_ends_and_leaves_no_recording(job):
    (rank,) = [info for info in job.processes if info.role == NN_WORKER]
    fetch_json(rank.status_address, "/trace/start?spans=5", method="POST")
    step = f"http://{rank.status_address}/status"
    before = json.loads(get(step))["stats"]["batches_trained"]
    wait_until(lambda: json.loads(get(step))["stats"]["batches_trained"] > before + 5, "more batches")
    recording = fetch_json(rank.status_address, "/trace/stop", method="POST")
    assert len(recording["spans"]) == 5
    assert recording["num_dropped"] > 0
    assert fetch_json(rank.status_address, "/trace/stop", method="POST")["spans"] == []


@pytest.fixture(scope="module")
def served(job, tmp_path_factory):
    """Predictions of the job's model, by packets; the address of its metrics, too."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "slots.yml").write_text(
        yaml.safe_dump(EMBEDDING_CONFIG, sort_keys=False)
    )  # groups are numbered
    watched = f"127.0.0.1:{free_port()}"
    arguments = [
        "--embedding-config",
        str(folder / "slots.yml"),
        "--metrics-port",
        watched.rpartition(":")[2],
    ]
    served = Served(
        folder, str(job.folder / "model"), *arguments, "--incremental-dir", str(job.folder / "packets")
    )
    try:
        following = f"http://{watched}/status"
        wait_until(lambda: json.loads(get(following))["stats"]["following"]["num_applied"] > 0, "packets")
        yield served, watched
    finally:
        served.stop()


def one_sample() -> bytes:
    ids = [IDTypeFeatureWithSingleID(slot, np.array([7], np.uint64)) for slot in ("user", "items")]
    return PersiaBatch(ids, [NonIDTypeFeature(np.zeros((1, 2), np.float32))], requires_grad=False).to_bytes()


@pytest.fixture(scope="module")
def scraped(job, served, tmp_path_factory):
    """As the documents start it, while the job trains and predictions are asked for."""
    server, address = served
    written = job.launcher("status", "--targets")
    assert written.returncode == 0, written.stderr
    targets = json.loads(written.stdout)
    targets[0]["targets"].append(address)  # of another job, which has no broker
    with prometheus(tmp_path_factory.mktemp("prometheus"), json.dumps(targets)) as asked:
        # Rates need two scrapes of each process.
        enough = "min(count_over_time(persia_ready[1m])) >= 3 and count(persia_ready) == 6"
        wait_until(
            lambda: server.infer(one_sample()) and asked.query(enough), "three scrapes of six processes"
        )
        yield asked


def has_numbers(scraped: Prometheus, query: str) -> bool:
    """Whether every answer is a number, but for `SELDOM`: a mean of nothing is NaN, and no data."""
    answer = scraped.query(query)
    missing = [one for one in answer if not math.isfinite(float(one["value"][1]))]
    return len(missing) < len(answer) and all(one["metric"].get("phase") in SELDOM for one in missing)


@pytest.mark.parametrize("name", ["training", "serving"])
def test_every_query_of_a_dashboard_finds_data(scraped, served, name):
    server, _ = served
    board = json.loads((MONITORING / "grafana" / "dashboards" / f"{name}.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 10
    for query in queries:
        asked = query.replace("$__rate_interval", "1m").replace("$persia_job", ".*")
        assert "$" not in asked
        # A busy machine may have done nothing between two scrapes.
        wait_until(
            lambda q=asked: server.infer(one_sample()) and has_numbers(scraped, q), f"data for {query}"
        )


def test_every_alert_watches_a_value_that_is_there(scraped):
    rules = yaml.safe_load((MONITORING / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len(rules) >= 10
    good = {rule["alert"]: "ok" for rule in rules}
    wait_until(lambda: scraped.rules() == good, "an evaluation of each rule")
    for rule in rules:
        for part in re.split(r" (?:and|unless) on \(.*?\) ", rule["expr"]):
            (value,) = re.fullmatch(r"(.*) (?:==|>|<) [0-9.]+", part).groups()
            wait_until(lambda v=value: has_numbers(scraped, v), f"a number for {rule['alert']}")
        firing = scraped.query(rule["expr"])
        assert rule["alert"] in OF_TIME or not firing, (rule["alert"], firing)  # nothing is wrong here
