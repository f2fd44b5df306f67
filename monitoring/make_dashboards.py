"""Writes the Grafana dashboards: `python monitoring/make_dashboards.py`.

A table of panels is easier to read and to change than Grafana's JSON. A test compares the files with it, and
runs every query against a job.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
_JOB = 'persia_job=~"$persia_job"'
_RATE = "$__rate_interval"
_PANELS_A_ROW = 3
_WIDTH, _HEIGHT = 24 // _PANELS_A_ROW, 8

Panel = tuple[str, str, list[tuple[str, str]]]  # title, unit, [(query, legend)]


def per_second(metric: str, by: str = "role, replica", where: str = "") -> str:
    selector = f"{metric}{{{_JOB}{', ' + where if where else ''}}}"
    return f"sum by ({by}) (rate({selector}[{_RATE}]))"


def mean_s(metric: str, by: str, where: str = "") -> str:
    """Mean of a histogram."""
    total, count = per_second(f"{metric}_sum", by, where), per_second(f"{metric}_count", by, where)
    return f"{total} / {count}"


def quantile_s(quantile: float, metric: str, by: str, where: str = "") -> str:
    return f"histogram_quantile({quantile}, {per_second(f'{metric}_bucket', f'le, {by}', where)})"


def gauge(metric: str) -> str:
    return f"{metric}{{{_JOB}}}"


_PROCESS = "{{role}} {{replica}}"
_PHASE = "persia_phase_seconds"
_NO_QUEUE = 'phase!~"queue.*"'

TRAINING: list[tuple[str, list[Panel]]] = [
    (
        "Job",
        [
            (
                "Batches trained",
                "ops",
                [(per_second("persia_nn_batches_trained_total", "replica"), "rank {{replica}}")],
            ),
            ("Reported by the script", "none", [(gauge("persia_reported"), "{{name}} (rank {{replica}})")]),
            ("Ready", "none", [(gauge("persia_ready"), _PROCESS)]),
            (
                "Staleness: batches in flight",
                "none",
                [
                    (gauge("staleness"), "worker {{replica}}"),
                    (gauge("persia_nn_in_flight"), "rank {{replica}}"),
                ],
            ),
            (
                "Staleness: updates between lookup and update",
                "none",
                [
                    (
                        f"{per_second('persia_update_staleness_total', 'replica')} / "
                        f"{per_second('persia_updates_total', 'replica')}",
                        "server {{replica}}",
                    )
                ],
            ),
            (
                "Batches that wait",
                "none",
                [
                    (gauge("num_pending_batches"), "worker {{replica}}, for their lookup"),
                    (gauge("persia_queue_depth"), "rank {{replica}}, {{queue}}"),
                ],
            ),
        ],
    ),
    (
        "The step of a rank",
        [
            (
                "Phases, mean",
                "s",
                [
                    (
                        mean_s(
                            _PHASE,
                            "phase",
                            'role="nn-worker", phase!~"client.*|queue.*"',
                        ),
                        "{{phase}}",
                    )
                ],
            ),
            (
                "Lookup and gradient return, mean",
                "s",
                [(mean_s(_PHASE, "phase", 'role="nn-worker", phase=~"client.*"'), "{{phase}}")],
            ),
            (
                "Time in queues, mean",
                "s",
                [(mean_s(_PHASE, "phase, role", 'phase=~"queue.*"'), "{{role}}: {{phase}}")],
            ),
            (
                "Published times, latest",
                "s",
                [
                    (gauge("forward_client_time_cost_sec"), "lookup (rank {{replica}})"),
                    (gauge("forward_client_to_gpu_time_cost_sec"), "to device (rank {{replica}})"),
                    (gauge("backward_client_time_cost_sec"), "hand in (rank {{replica}})"),
                    (gauge("get_train_batch_time_cost_more_than_1ms_sec"), "wait (rank {{replica}})"),
                    (
                        gauge("update_gradient_batched_time_cost_more_than_1ms_sec"),
                        "gradient return (rank {{replica}})",
                    ),
                ],
            ),
            (
                "Outcomes",
                "ops",
                [
                    (per_second("persia_nn_batches_failed_total", "replica"), "failed (rank {{replica}})"),
                    (
                        per_second("persia_nn_batches_released_total", "replica"),
                        "given up (rank {{replica}})",
                    ),
                    (per_second("forward_error", "replica"), "lookup failed (rank {{replica}})"),
                ],
            ),
            (
                "Loaders: batches sent",
                "ops",
                [(per_second("persia_loader_batches_sent_total", "replica"), "loader {{replica}}")],
            ),
            (
                "Loaders: time to send a batch",
                "s",
                [(mean_s(_PHASE, "replica", 'role="data-loader"'), "loader {{replica}}")],
            ),
        ],
    ),
    (
        "Embedding workers",
        [
            (
                "Phases, mean",
                "s",
                [(mean_s(_PHASE, "phase", f'role="embedding-worker", {_NO_QUEUE}'), "{{phase}}")],
            ),
            (
                "Lookup, 99th percentile",
                "s",
                [
                    (
                        quantile_s(0.99, _PHASE, "replica", 'role="embedding-worker", phase="lookup total"'),
                        "worker {{replica}}",
                    )
                ],
            ),
            (
                "Published times, latest",
                "s",
                [
                    (gauge("lookup_preprocess_time_cost_sec"), "preprocess {{replica}}"),
                    (gauge("lookup_rpc_time_cost_sec"), "rpc {{replica}}"),
                    (gauge("lookup_postprocess_time_cost_sec"), "postprocess {{replica}}"),
                    (gauge("lookup_total_time_cost_sec"), "total {{replica}}"),
                    (gauge("update_gradient_time_cost_sec"), "update {{replica}}"),
                ],
            ),
            (
                "Distinct IDs of a batch",
                "percentunit",
                [(gauge("batch_unique_indices_rate"), "{{feat}} (worker {{replica}})")],
            ),
            (
                "Distinct IDs so far, estimated",
                "none",
                [(gauge("estimated_distinct_id"), "{{feat}} (worker {{replica}})")],
            ),
            (
                "Gradients dropped",
                "ops",
                [
                    (per_second("nan_count", "feat"), "{{feat}}: NaN or Inf"),
                    (per_second("nan_grad_skipped", "feat"), "{{feat}}: none"),
                ],
            ),
        ],
    ),
    (
        "Parameter servers",
        [
            (
                "Rows a second",
                "none",
                [
                    (per_second("persia_lookup_rows_total", "replica"), "looked up {{replica}}"),
                    (per_second("persia_updated_rows_total", "replica"), "updated {{replica}}"),
                ],
            ),
            (
                "Hit ratio",
                "percentunit",
                [
                    (
                        f"1 - {per_second('index_miss_count', 'replica')} / "
                        f"{per_second('persia_lookup_rows_total', 'replica')}",
                        "server {{replica}}",
                    ),
                    (f"1 - {gauge('index_miss_ratio')}", "server {{replica}}, latest lookup"),
                ],
            ),
            (
                "Rows made, evicted, refused",
                "ops",
                [
                    (per_second("persia_inserted_rows_total", "replica"), "made {{replica}}"),
                    (per_second("persia_evicted_rows_total", "replica"), "evicted {{replica}}"),
                    (per_second("persia_unadmitted_rows_total", "replica"), "not admitted {{replica}}"),
                    (per_second("gradient_id_miss_count", "replica"), "gone before their update {{replica}}"),
                ],
            ),
            ("Rows", "none", [(gauge("persia_rows"), "server {{replica}}")]),
            (
                "Phases, mean",
                "s",
                [(mean_s(_PHASE, "phase", f'role="embedding-parameter-server", {_NO_QUEUE}'), "{{phase}}")],
            ),
            (
                "Published times, latest",
                "s",
                [
                    (gauge("lookup_hashmap_time_cost_sec"), "lookup {{replica}}"),
                    (gauge("decode_indices_time_cost_sec"), "decode {{replica}}"),
                    (gauge("encode_embedding_time_cost_sec"), "encode {{replica}}"),
                    (gauge("set_embedding_time_cost_sec"), "set {{replica}}"),
                    (gauge("lookup_inference_batch_time_cost_sec"), "inference {{replica}}"),
                ],
            ),
            (
                "Since the last checkpoint",
                "s",
                [(gauge("persia_checkpoint_lag_seconds"), "server {{replica}}")],
            ),
            (
                "Checkpoint operations",
                "ops",
                [
                    (
                        per_second("persia_checkpoints_total", "replica, operation, outcome"),
                        "{{operation}} {{outcome}}, server {{replica}}",
                    )
                ],
            ),
        ],
    ),
    (
        "Packets of changes, for followers",
        [
            (
                "Packets",
                "ops",
                [
                    (per_second("persia_packets_written_total", "replica"), "written (rank {{replica}})"),
                    (per_second("persia_packet_failures_total", "replica"), "failed (rank {{replica}})"),
                    (
                        per_second("persia_packet_restarts_total", "replica"),
                        "breaks in the sequence (rank {{replica}})",
                    ),
                    (
                        per_second("persia_packet_checkpoints_total", "replica"),
                        "checkpoints for followers (rank {{replica}})",
                    ),
                ],
            ),
            (
                "Oldest change that is in no packet yet",
                "s",
                [(gauge("persia_packet_lag_seconds"), "rank {{replica}}")],
            ),
            ("Newest packet", "none", [(gauge("persia_packet_number"), "rank {{replica}}")]),
            (
                "Rows in packets",
                "ops",
                [(per_second("persia_packet_rows_total", "replica"), "rank {{replica}}")],
            ),
            (
                "Bytes in packets",
                "Bps",
                [(per_second("persia_packet_bytes_total", "replica"), "rank {{replica}}")],
            ),
        ],
    ),
    (
        "RPC and processes",
        [
            (
                "Calls, 99th percentile",
                "s",
                [(quantile_s(0.99, "persia_rpc_call_seconds", "role, peer"), "{{role}} to {{peer}}")],
            ),
            (
                "Bytes a second",
                "Bps",
                [
                    (per_second("persia_rpc_call_sent_bytes_total", "role"), "sent by {{role}}"),
                    (per_second("persia_rpc_call_received_bytes_total", "role"), "received by {{role}}"),
                ],
            ),
            (
                "Retries and waiting requests",
                "none",
                [
                    (per_second("persia_rpc_retries_total", "role, peer"), "{{role}} to {{peer}}, retries/s"),
                    (gauge("persia_rpc_waiting_requests"), _PROCESS + ", waiting"),
                ],
            ),
            ("Memory", "bytes", [(gauge("persia_resident_bytes"), _PROCESS)]),
            ("Memory of rows", "bytes", [(gauge("persia_rows_bytes"), "server {{replica}}")]),
            ("Processors", "none", [(per_second("persia_cpu_seconds_total"), _PROCESS)]),
        ],
    ),
]

_PREDICTION = "persia_serving_request_seconds"

_DIRECT = 'role="embedding-worker", method="LookupDirect"'
_HANDLER = "persia_rpc_handler_seconds"

SERVING: list[tuple[str, list[Panel]]] = [
    (
        "Predictions (persia-launcher serve)",
        [
            (
                "Requests",
                "ops",
                [
                    (
                        per_second("persia_serving_requests_total", "replica, status"),
                        "{{status}}, server {{replica}}",
                    )
                ],
            ),
            (
                "Latency",
                "s",
                [
                    (quantile_s(0.5, _PREDICTION, "replica"), "median of server {{replica}}"),
                    (quantile_s(0.95, _PREDICTION, "replica"), "95 % of server {{replica}}"),
                    (quantile_s(0.99, _PREDICTION, "replica"), "99 % of server {{replica}}"),
                ],
            ),
            (
                "Computing a batch",
                "s",
                [
                    (mean_s("persia_serving_batch_seconds", "replica"), "mean of server {{replica}}"),
                    (
                        quantile_s(0.99, "persia_serving_batch_seconds", "replica"),
                        "99 % of server {{replica}}",
                    ),
                ],
            ),
            (
                "Samples of a batch, mean",
                "none",
                [(mean_s("persia_serving_batch_samples", "replica"), "server {{replica}}")],
            ),
            (
                "Requests that wait",
                "none",
                [
                    (f'persia_queue_depth{{{_JOB}, role="serving"}}', "server {{replica}}, waiting"),
                    (gauge("persia_serving_running_requests"), "server {{replica}}, computed"),
                ],
            ),
            (
                "IDs without a row",
                "ops",
                [(per_second("persia_serving_missing_rows_total", "replica"), "server {{replica}}")],
            ),
            (
                "Version",
                "none",
                [
                    (gauge("persia_serving_version_info"), "{{model}} {{model_version}}, server {{replica}}"),
                    (gauge("persia_serving_version_refused"), "the next is refused, server {{replica}}"),
                ],
            ),
        ],
    ),
    (
        "Following a training",
        [
            (
                "From an update to its prediction, last packet",
                "s",
                [(gauge("inc_update_delay_sec"), _PROCESS)],
            ),
            ("Packets behind", "none", [(gauge("persia_inc_behind"), _PROCESS)]),
            (
                "Packets",
                "ops",
                [
                    (per_second("persia_inc_packets_applied_total"), f"{_PROCESS}, applied"),
                    (per_second("persia_inc_packet_retries_total"), f"{_PROCESS}, tried again"),
                    (per_second("persia_inc_packets_failed_total"), f"{_PROCESS}, given up"),
                ],
            ),
            ("Packet in use", "none", [(gauge("persia_inc_applied_number"), _PROCESS)]),
            (
                "Stuck, pinned",
                "none",
                [
                    (gauge("persia_inc_stuck"), f"{_PROCESS}, stuck"),
                    (gauge("persia_inc_pinned"), f"{_PROCESS}, pinned"),
                ],
            ),
            (
                "Storage errors, beginnings loaded",
                "ops",
                [
                    (per_second("persia_inc_storage_errors_total"), f"{_PROCESS}, storage errors"),
                    (per_second("persia_inc_checkpoints_loaded_total"), f"{_PROCESS}, loaded"),
                ],
            ),
        ],
    ),
    (
        "Lookups of embedding workers",
        [
            (
                "Lookups",
                "ops",
                [(per_second(f"{_HANDLER}_count", "replica", _DIRECT), "worker {{replica}}")],
            ),
            (
                "Lookup latency",
                "s",
                [
                    (quantile_s(0.5, _HANDLER, "role", _DIRECT), "median"),
                    (quantile_s(0.95, _HANDLER, "role", _DIRECT), "95 %"),
                    (quantile_s(0.99, _HANDLER, "role", _DIRECT), "99 %"),
                ],
            ),
            ("Failed requests", "ops", [(per_second("persia_rpc_failed_requests_total"), _PROCESS)]),
            ("Ready", "none", [(gauge("persia_ready"), _PROCESS)]),
            ("Requests that wait", "none", [(gauge("persia_rpc_waiting_requests"), _PROCESS)]),
            ("Connections", "none", [(gauge("persia_rpc_connections"), _PROCESS)]),
        ],
    ),
    (
        "Rows",
        [
            (
                "Parameter servers: lookup latency",
                "s",
                [
                    (
                        quantile_s(0.99, _PHASE, "replica", 'phase="inference lookup"'),
                        "99 % of server {{replica}}",
                    ),
                    (mean_s(_PHASE, "replica", 'phase="inference lookup"'), "mean of server {{replica}}"),
                ],
            ),
            (
                "Rows not found",
                "percentunit",
                [
                    (
                        f"{per_second('index_miss_count', 'replica')} / "
                        f"{per_second('persia_lookup_rows_total', 'replica')}",
                        "server {{replica}}",
                    )
                ],
            ),
            ("Rows", "none", [(gauge("persia_rows"), "server {{replica}}")]),
            ("Memory", "bytes", [(gauge("persia_resident_bytes"), _PROCESS)]),
            ("Processors", "none", [(per_second("persia_cpu_seconds_total"), _PROCESS)]),
            (
                "Retries",
                "ops",
                [(per_second("persia_rpc_retries_total", "role, peer"), "{{role}} to {{peer}}")],
            ),
        ],
    ),
]

DASHBOARDS = {"training": ("persia training", TRAINING), "serving": ("persia serving", SERVING)}


def dashboard(name: str, title: str, rows: list[tuple[str, list[Panel]]]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row_title, row in rows:
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"type": "row", "title": row_title, "gridPos": place, "collapsed": False, "panels": []})
        top += 1
        for number, panel in enumerate(row):
            x, y = number % _PANELS_A_ROW * _WIDTH, top + number // _PANELS_A_ROW * _HEIGHT
            panels.append(_graph(panel, {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT}))
        top += -(-len(row) // _PANELS_A_ROW) * _HEIGHT
    for number, one in enumerate(panels, start=1):
        one["id"] = number
    return {
        "uid": f"persia-{name}",
        "title": title,
        "tags": ["persia"],
        "schemaVersion": 37,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    query = "label_values(persia_process_info, persia_job)"
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "persia_job",
            "type": "query",
            "label": "Job",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": query, "refId": "jobs"},
            "definition": query,
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _graph(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    title, unit, queries = panel
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + number), "datasource": source, "expr": query, "legendFormat": legend}
        for number, (query, legend) in enumerate(queries)
    ]
    return {
        "type": "timeseries",
        "title": title,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def dashboards() -> dict[Path, str]:
    """The files and what they hold."""
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard(name, title, rows), indent=1) + "\n"
        for name, (title, rows) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for path, text in dashboards().items():
        path.write_text(text, encoding="utf-8")
        print(path)
