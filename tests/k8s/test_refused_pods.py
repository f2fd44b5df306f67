"""A StatefulSet that cannot create its pods, at a real API server with a quota."""

from __future__ import annotations

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from harness import Namespace, OperatorProcess, create_quota, job_manifest, limit_pods
from kubelet import FakeKubelet


def test_a_quota_that_stops_the_servers_is_a_condition_and_ends_the_job(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    """Each pod alone has room in the quota, so the check before the start accepts them."""
    create_quota(namespace, 2)
    namespace.apply(job_manifest(progressDeadlineSeconds=20))
    status = namespace.await_phase("job", "Failed", 240)
    conditions = {condition["type"]: condition for condition in status["conditions"]}
    assert conditions["PodsAccepted"]["status"] == "False"
    assert "exceeded quota: pods" in conditions["PodsAccepted"]["message"]
    assert conditions["Failed"]["reason"] == "PodsRefused"


def test_a_job_goes_on_once_the_quota_has_room(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    create_quota(namespace, 2)
    namespace.apply(job_manifest(progressDeadlineSeconds=3600))

    def is_refused() -> bool:
        conditions = namespace.status("job").get("conditions", [])
        return any(c["type"] == "PodsAccepted" and c["status"] == "False" for c in conditions)

    namespace.await_(is_refused, "the refusal is a condition", 240)
    limit_pods(namespace, 5)
    namespace.await_phase("job", "Running", 240)
    assert not is_refused()
