"""Prometheus' own tools on our rules and configuration, and the Compose stack around them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia.pipeline.counters import CounterValues

REPOSITORY = Path(__file__).parents[2]
PROMETHEUS = REPOSITORY / "monitoring" / "prometheus"


def promtool(*arguments: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: `./run extras` installs it")
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def labels(series: str) -> dict[str, str]:
    """`a="1",b="2"` as a mapping."""
    return {key: json.loads(value) for key, _, value in (part.partition("=") for part in series.split(","))}


# What makes each alert fire: series and their values by the minute, and the labels that the alert then has.
CASES: dict[str, tuple[list[tuple[str, str]], str]] = {
    "PersiaProcessDown": ([('up{job="persia",instance="h:1"}', "0x30")], 'job="persia",instance="h:1"'),
    "PersiaNotReady": (
        [('persia_ready{role="embedding-worker",replica="0"}', "0x30")],
        'role="embedding-worker",replica="0"',
    ),
    "PersiaTrainingStalled": (
        [('persia_nn_batches_trained_total{persia_job="j"}', "100x30")],
        'persia_job="j"',
    ),
    "PersiaBatchesFailed": (
        [('persia_nn_batches_failed_total{persia_job="j",replica="0"}', "0+1x30")],
        'persia_job="j",replica="0"',
    ),
    "PersiaGradientsNotFinite": (
        [('nan_count{persia_job="j",feat="user"}', "0+1x30")],
        'persia_job="j",feat="user"',
    ),
    "PersiaBatchesExpired": (
        [('persia_batches_expired_total{persia_job="j",replica="0"}', "0+1x30")],
        'persia_job="j",replica="0"',
    ),
    "PersiaStaleness": (
        [
            ('persia_update_staleness_total{persia_job="j"}', "0+20000x30"),
            ('persia_updates_total{persia_job="j"}', "0+100x30"),
        ],
        'persia_job="j"',
    ),
    "PersiaEvictions": (
        [
            ('persia_evicted_rows_total{persia_job="j",replica="0"}', "0+5x30"),
            ('persia_lookup_rows_total{persia_job="j",replica="0"}', "0+100x30"),
        ],
        'persia_job="j",replica="0"',
    ),
    "PersiaGradientsMissed": (
        [
            ('gradient_id_miss_count{persia_job="j",replica="0"}', "0+20x30"),
            ('persia_updated_rows_total{persia_job="j",replica="0"}', "0+100x30"),
        ],
        'persia_job="j",replica="0"',
    ),
    "PersiaCheckpointFailed": (
        [
            (
                'persia_checkpoints_total{persia_job="j",replica="0",operation="dump",outcome="failed"}',
                "0+1x30",
            )
        ],
        'persia_job="j",replica="0",operation="dump"',
    ),
    "PersiaCheckpointOld": (
        [('persia_checkpoint_lag_seconds{replica="0"}', "90000x30")],
        'replica="0"',
    ),
    "PersiaRpcRetries": (
        [('persia_rpc_retries_total{persia_job="j",role="nn-worker",peer="embedding-worker 0"}', "0+120x30")],
        'persia_job="j",role="nn-worker",peer="embedding-worker 0"',
    ),
    "PersiaRequestsWait": (
        [('persia_rpc_waiting_requests{role="embedding-worker",replica="0"}', "17x30")],
        'role="embedding-worker",replica="0"',
    ),
    "PersiaServingSlow": (
        [
            ('persia_rpc_handler_seconds_bucket{persia_job="j",method="LookupDirect",le="0.5"}', "0+100x30"),
            ('persia_rpc_handler_seconds_bucket{persia_job="j",method="LookupDirect",le="0.1"}', "0+90x30"),
            ('persia_rpc_handler_seconds_bucket{persia_job="j",method="LookupDirect",le="+Inf"}', "0+100x30"),
        ],
        'persia_job="j"',
    ),
    "PersiaPredictionsSlow": (
        [
            (
                'persia_serving_request_seconds_bucket{persia_job="j",replica="0",model="ads",le="0.5"}',
                "0+100x30",
            ),
            (
                'persia_serving_request_seconds_bucket{persia_job="j",replica="0",model="ads",le="0.1"}',
                "0+90x30",
            ),
            (
                'persia_serving_request_seconds_bucket{persia_job="j",replica="0",model="ads",le="+Inf"}',
                "0+100x30",
            ),
            (
                'persia_serving_request_seconds_bucket{persia_job="j",replica="0",model="feed",le="0.1"}',
                "0+9000x30",
            ),
            (
                'persia_serving_request_seconds_bucket{persia_job="j",replica="0",model="feed",le="+Inf"}',
                "0+9000x30",
            ),
        ],
        'persia_job="j",replica="0",model="ads"',
    ),
    "PersiaPredictionsFail": (
        [
            ('persia_serving_requests_total{persia_job="j",replica="0",model="ads",status="OK"}', "0+90x30"),
            (
                'persia_serving_requests_total{persia_job="j",replica="0",model="ads",status="UNAVAILABLE"}',
                "0+2x30",
            ),
            (
                'persia_serving_requests_total{persia_job="j",replica="0",model="feed",status="OK"}',
                "0+900x30",
            ),
        ],
        'persia_job="j",replica="0",model="ads"',
    ),
    "PersiaVersionRefused": (
        [('persia_serving_version_refused{role="serving",replica="0",model="ads"}', "1x30")],
        'role="serving",replica="0",model="ads"',
    ),
    "PersiaFollowerStuck": (
        [('persia_inc_stuck{role="serving",replica="0"}', "1x30")],
        'role="serving",replica="0"',
    ),
    "PersiaFollowerLate": (
        [
            ('inc_update_delay_sec{role="serving",replica="0"}', "61x30"),
            ('persia_inc_packets_applied_total{role="serving",replica="0"}', "0+1x30"),
            ('persia_inc_pinned{role="serving",replica="0"}', "0x30"),
        ],
        'role="serving",replica="0"',
    ),
    "PersiaPacketsFailed": (
        [('persia_packet_failures_total{persia_job="j",replica="0"}', "0+1x30")],
        'persia_job="j",replica="0"',
    ),
    "PersiaPacketsLate": (
        [('persia_packet_lag_seconds{role="nn-worker",replica="0"}', "61x30")],
        'role="nn-worker",replica="0"',
    ),
}


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0][
        "rules"
    ]
    return found


def test_each_alert_has_a_case() -> None:
    assert [rule["alert"] for rule in rules()] == list(CASES)
    for rule in rules():
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"], "an alert that says nothing to do wakes people for nothing"


@pytest.mark.parametrize("alert", list(CASES))
def test_an_alert_fires(alert: str, tmp_path: Path) -> None:
    """And is silent at the start, for lack of time or of data."""
    series, expected = CASES[alert]
    judge(alert, series, expected, tmp_path)


@pytest.mark.parametrize(("applied", "pinned"), [("7x30", "0x30"), ("0+1x30", "1x30")])
def test_a_follower_is_late_only_while_it_follows(applied: str, pinned: str, tmp_path: Path) -> None:
    """The delay stays that of the last packet when the training has ended, or a pin holds the follower."""
    of = '{role="serving",replica="0"}'
    values = {
        "inc_update_delay_sec": "3600x30",
        "persia_inc_packets_applied_total": applied,
        "persia_inc_pinned": pinned,
    }
    judge("PersiaFollowerLate", [(name + of, value) for name, value in values.items()], None, tmp_path)


def judge(alert: str, series: list[tuple[str, str]], expected: str | None, tmp_path: Path) -> None:
    """That the alert fires with these labels after a while, or never."""
    (rule,) = [rule for rule in rules() if rule["alert"] == alert]
    # Annotations have numbers in them; that they are there is tested elsewhere.
    bare = {**rule, "annotations": {}}
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "one", "rules": [bare]}]}))
    firing = [] if expected is None else [{"exp_labels": {**labels(expected), **rule["labels"]}}]
    test = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series],
                "alert_rule_test": [
                    {"eval_time": "0m", "alertname": alert, "exp_alerts": []},
                    {"eval_time": "25m", "alertname": alert, "exp_alerts": firing},
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(json.dumps(test))
    promtool("test", "rules", str(tmp_path / "test.yml"))


def test_the_configuration_is_prometheus(tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    shutil.copytree(PROMETHEUS, folder)
    (folder / "token").write_text(
        "token"
    )  # which `persia-launcher secret token` prints, for the operator to store
    promtool("check", "config", str(folder / "prometheus.yml"))


def test_the_stack_mounts_what_is_there_and_pushes_where_it_is_scraped() -> None:
    stack = yaml.safe_load((REPOSITORY / "docker-compose.metrics.yml").read_text())
    job = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    services = stack["services"]
    added = {"prometheus", "pushgateway", "grafana"}
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in stack["volumes"] or (REPOSITORY / source).is_dir(), volume
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "Prometheus and Grafana ask for no password here"
    pushing = {
        name for name, one in services.items() if "PERSIA_METRICS_GATEWAY_ADDR" in one.get("environment", {})
    }
    assert set(services) - added == pushing
    assert pushing <= set(job["services"])
    addresses = {services[name]["environment"]["PERSIA_METRICS_GATEWAY_ADDR"] for name in pushing}
    scrapes = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert addresses <= {
        t for scrape in scrapes for c in scrape.get("static_configs", []) for t in c["targets"]
    }


@pytest.mark.parametrize("name", ["training", "serving"])
def test_a_dashboard_asks_for_metrics_that_exist(name: str) -> None:
    """By their names; tests/integration/test_watching_a_job.py runs each query against a job."""
    sources = [*(REPOSITORY / "persia" / "observability").glob("*.py")]
    sources += [REPOSITORY / "persia" / "serving" / name for name in ("models.py", "statistics.py")]
    # Counters of servers are declared where they are counted.
    native = (REPOSITORY / "native" / "src").rglob("*.*")
    sources += [path for path in native if path.suffix in (".h", ".cc") and "_test" not in path.name]
    known = set(re.findall(r'"([a-z0-9_]+)"', "".join(path.read_text() for path in sources)))
    known |= {f"persia_nn_{outcome}" for outcome in CounterValues.__dataclass_fields__}
    board = json.loads((REPOSITORY / "monitoring" / "grafana" / "dashboards" / f"{name}.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > len(panels) > 20
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            asked = re.findall(r"([a-z0-9_]+){([^}]*)}", target["expr"])
            assert asked, target["expr"]
            for metric, where in asked:
                assert re.sub(r"_(total|bucket|sum|count)$", "", metric) in known or metric in known, metric
                assert 'persia_job=~"$persia_job"' in where


def test_grafana_finds_prometheus_and_the_dashboards_in_the_stack() -> None:
    services = yaml.safe_load((REPOSITORY / "docker-compose.metrics.yml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    provisioning = REPOSITORY / "monitoring" / "grafana" / "provisioning"
    assert (
        mounts["./monitoring/grafana/provisioning"]
        == services["grafana"]["environment"]["GF_PATHS_PROVISIONING"]
    )
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert services["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "persia.yml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["./monitoring/grafana/dashboards"]


def test_the_stack_follows_the_specification() -> None:
    checker = pytest.importorskip("compose_spec", reason="needs compose-spec: pip install compose-spec")
    stack = yaml.safe_load((REPOSITORY / "docker-compose.metrics.yml").read_text())
    checker.PyCompose.from_yaml(yaml.safe_dump(stack))  # which resolves the anchors
