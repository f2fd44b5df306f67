"""Which pods a Prometheus that follows docs/kubernetes.md watches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md"


def is_watched(**labels: str) -> bool:
    """Applies the document's rules, which only keep and drop: Prometheus matches whole values."""
    (block,) = re.findall(r"```yaml\n(scrape_configs:\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (scrape,) = yaml.safe_load(block)["scrape_configs"]
    for rule in scrape["relabel_configs"]:
        (source,) = rule["source_labels"]
        value = labels.get(source.removeprefix("__meta_kubernetes_pod_"), "")
        if (re.fullmatch(rule["regex"], value) is not None) != {"keep": True, "drop": False}[rule["action"]]:
            return False
    return True


@pytest.mark.parametrize(
    ("phase", "watched"), [("Running", True), ("Pending", True), ("Failed", True), ("Succeeded", False)]
)
def test_pods_that_ended_in_order_are_not_watched(phase: str, watched: bool) -> None:
    for port in ("metrics", "metrics-1"):
        assert is_watched(label_persia_job="job", container_port_name=port, phase=phase) is watched


def test_other_ports_and_pods_are_not_watched() -> None:
    assert not is_watched(label_persia_job="job", container_port_name="rpc", phase="Running")
    assert not is_watched(container_port_name="metrics", phase="Running")
