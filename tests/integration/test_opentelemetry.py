"""Metrics and spans of a real job, received by a collector that speaks OTLP."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from persia.messaging.subjects import DATA_LOADER, EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER
from persia.testing import LocalCluster
from tests.ports import free_port

from .conftest import EMBEDDING_CONFIG, JOBS
from .watching import all_processes, get, wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="pip install 'persia[otel]'")

from .collector import Collector, collecting, values

ONE_IN = 3
GLOBAL_CONFIG = {"common_config": {"metrics_config": {"push_interval_sec": 1}}}
ROLES = {EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER, DATA_LOADER}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """(collector, /metrics of each role) after all have exported for some seconds."""
    env = {"OMP_NUM_THREADS": "1", "PERSIA_DEADLINE_SEC": "240", "PERSIA_OTLP_TRACE_ONE_IN": str(ONE_IN)}
    with collecting() as collector:
        env["PERSIA_OTLP_ENDPOINT"] = collector.endpoint
        with LocalCluster(
            embedding_config=EMBEDDING_CONFIG, global_config=GLOBAL_CONFIG, env=env, parameter_servers=2
        ) as cluster:
            cluster.start_loader(JOBS / "loader.py", "--batches", "1000000", replica_index=0, replica_size=1)
            model = tmp_path_factory.mktemp("job") / "model"
            ranks = cluster.start_nn_worker(JOBS / "watched.py", str(model), nproc=1)
            wait_until(lambda: "under way" in ranks.output or ranks.exit_code is not None, "training")
            assert ranks.exit_code is None, ranks.output
            wait_until(
                lambda: (
                    {p["service.name"] for p, m in collector.metrics if has_updates(m)}
                    >= ROLES - {DATA_LOADER}
                    and len(complete_traces(collector)) >= 3
                ),
                "exports of all roles",
            )
            infos = {info.role: info for info in all_processes(cluster, 5)}
            pages = {role: get(f"http://{info.status_address}/metrics") for role, info in infos.items()}
        yield collector, pages


def has_updates(metric) -> bool:
    return metric.name == "persia_phase_seconds" and any(p.count for p in metric.histogram.data_points)


def by_trace(collector: Collector) -> dict[bytes, list[tuple[str, object]]]:
    traces: dict[bytes, list[tuple[str, object]]] = {}
    for process, span in collector.spans:
        traces.setdefault(span.trace_id, []).append((process["service.name"], span))
    return traces


def complete_traces(collector: Collector) -> list[list[tuple[str, object]]]:
    """Those in which a batch is seen from its lookup to its update."""
    wanted = {
        (NN_WORKER, "batch"),
        (NN_WORKER, "client lookup"),  # absent where the lookup ended before the first export began
        (NN_WORKER, "forward"),
        (NN_WORKER, "backward"),
        (EMBEDDING_WORKER, "lookup rpc"),
        (EMBEDDING_WORKER, "handle ReturnGradients"),
        (EMBEDDING_PARAMETER_SERVER, "handle LookupRows"),
        (EMBEDDING_PARAMETER_SERVER, "update"),
    }
    traces = by_trace(collector).values()
    return [trace for trace in traces if wanted <= {(role, span.name) for role, span in trace}]


def test_metrics_are_those_of_the_page(watched):
    collector, pages = watched
    for role in ROLES:
        names = {metric.name for process, metric in collector.metrics if process["service.name"] == role}
        shown = set(re.findall(r"^# TYPE (\S+) ", pages[role], flags=re.MULTILINE))
        assert {name.removesuffix("_total") for name in shown} == names, role
    instances = {process["service.instance.id"] for process, _ in collector.metrics}
    assert {f"{EMBEDDING_PARAMETER_SERVER}-0", f"{EMBEDDING_PARAMETER_SERVER}-1"} <= instances


def test_kinds_and_labels_of_metrics(watched):
    collector, _ = watched
    latest = {(p["service.instance.id"], metric.name): metric for p, metric in collector.metrics}
    histogram = latest[f"{EMBEDDING_WORKER}-0", "persia_phase_seconds"].histogram
    for point in histogram.data_points:
        assert sum(point.bucket_counts) == point.count
        assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    phases = {values(point.attributes)["phase"]: point for point in histogram.data_points}
    assert phases["lookup total"].count > 0
    assert 0 < phases["lookup total"].sum < 60
    ids = latest[f"{EMBEDDING_WORKER}-0", "persia_ids"].sum
    assert ids.is_monotonic
    assert ids.data_points[0].as_double > 0
    (staleness,) = latest[f"{EMBEDDING_WORKER}-0", "staleness"].gauge.data_points
    assert values(staleness.attributes)["role"] == EMBEDDING_WORKER


def test_a_trace_is_one_batch_through_all_roles(watched):
    collector, _ = watched
    traces = complete_traces(collector)
    assert len(traces) >= 3
    for trace in traces[:20]:
        (batch,) = {values(span.attributes)["batch_id"] for _, span in trace}
        assert batch % ONE_IN == 0
        spans = {span.span_id: span for _, span in trace}
        names = {span.name: span for span in spans.values()}
        assert parent_names(names["handle LookupRows"], spans)[:4] == [
            "lookup rpc",
            "lookup total",
            "handle LookupReference",
            "client lookup",
        ]
        assert "batch" in parent_names(names["update"], spans)
        root = names["batch"]
        assert root.parent_span_id == b""
        for one in (names["forward"], names["backward"], names["client lookup"]):
            assert root.start_time_unix_nano <= one.start_time_unix_nano < one.end_time_unix_nano
            assert one.end_time_unix_nano <= root.end_time_unix_nano


def parent_names(span, spans) -> list[str]:
    found = []
    while span.parent_span_id in spans:
        span = spans[span.parent_span_id]
        found.append(span.name)
    return found


def test_a_collector_that_is_away_is_reported_once_and_stops_nothing(local_cluster):
    cluster = local_cluster(
        embedding_config=EMBEDDING_CONFIG,
        global_config=GLOBAL_CONFIG,
        embedding_workers=0,
        env={"PERSIA_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"},
    )
    name = "embedding-parameter-server-0"
    wait_until(lambda: "PERSIA_OTLP_ENDPOINT" in cluster.logs(name), "the report")
    assert cluster.stop(name) == 0
    assert cluster.logs(name).count("PERSIA_OTLP_ENDPOINT") == 1


def test_missing_packages_are_named_with_what_to_install():
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from persia.observability.otlp import OtlpExporter\n"
        "OtlpExporter('http://127.0.0.1:1', list, None, role='r', index=0, interval_s=1.0, trace_one_in=0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError" in result.stderr
    assert "pip install 'persia[otel]'" in result.stderr
