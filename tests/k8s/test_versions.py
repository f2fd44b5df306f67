"""Two versions of a model behind one Service, as docs/kubernetes.md has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from harness import Namespace, OperatorProcess, job_manifest
from kubelet import FakeKubelet

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md"


def serving(version: str, replicas: int) -> dict[str, Any]:
    """A job of the document's canary, of some version."""
    (block,) = re.findall(r"```yaml\n(inference:\n.*?version: v2.*?)```", DOCUMENT.read_text(), re.DOTALL)
    job = job_manifest(version, **yaml.safe_load(block.replace("version: v2", f"version: {version}")))
    job["spec"]["inference"]["replicas"] = replicas
    for role in ("nnWorker", "dataloader"):
        del job["spec"][role]
    return job


def addresses(namespace: Namespace, service: str) -> set[str]:
    """Ready pods that the Service selects; Kubernetes takes no addresses of loopback into Endpoints."""
    found = namespace.get("services", service)
    selector = found["spec"]["selector"] if found else {"none": "none"}
    query = ",".join(f"{name}={value}" for name, value in selector.items())
    _, answer = namespace.kube.get(f"{namespace.path('pods')}?labelSelector={quote(query)}")
    pods = [pod for pod in answer["items"] if not pod["metadata"].get("deletionTimestamp")]
    ready = {"type": "Ready", "status": "True"}
    return {
        pod["metadata"]["name"]
        for pod in pods
        if any(ready.items() <= condition.items() for condition in pod["status"].get("conditions") or ())
    }


def test_a_canary_has_the_share_of_its_servers(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    block, *_ = re.findall(r"```yaml\n(apiVersion: v1\nkind: Service.*?)```", DOCUMENT.read_text(), re.DOTALL)
    service = yaml.safe_load(block)
    service["metadata"]["namespace"] = namespace.name
    namespace.kube.create(service)
    namespace.apply(serving("v1", 3))
    namespace.await_phase("v1", "Running")
    old = {f"v1-inference-{index}" for index in range(3)}
    namespace.await_(lambda: addresses(namespace, "ads") == old, "the old version answers")
    namespace.apply(serving("v2", 1))
    namespace.await_phase("v2", "Running")
    both = old | {"v2-inference-0"}
    namespace.await_(lambda: addresses(namespace, "ads") == both, "the new version has a quarter")
    assert addresses(namespace, "v2-inference") == {"v2-inference-0"}
    # As `kubectl scale` does.
    for job, replicas in (("v2", 2), ("v1", 1)):
        path = f"{namespace.path('persiajobs', job)}/scale"
        assert namespace.kube.merge(path, {"spec": {"replicas": replicas}})[0] == 200
    share = {"v1-inference-0", "v2-inference-0", "v2-inference-1"}
    namespace.await_(lambda: addresses(namespace, "ads") == share, "the new version has two thirds")
    namespace.delete("persiajobs", "v2")
    namespace.await_(lambda: addresses(namespace, "ads") == {"v1-inference-0"}, "it is rolled back")
