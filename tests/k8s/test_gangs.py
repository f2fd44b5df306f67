"""Gang scheduling, at an API server that has the PodGroup of the scheduler plug-ins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from harness import Kube, Namespace, OperatorProcess, job_manifest, wait_until
from kubelet import FakeKubelet
from persia_k8s.builders.gangs import pod_groups
from test_manifests import load_job, scale_of

GROUP = "scheduling.x-k8s.io"
# As sigs.k8s.io/scheduler-plugins has it, but for the descriptions.
POD_GROUP_CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": f"podgroups.{GROUP}",
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins"},
    },
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {
            "kind": "PodGroup",
            "listKind": "PodGroupList",
            "plural": "podgroups",
            "shortNames": ["pg"],
        },
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "minMember": {"type": "integer", "format": "int32", "minimum": 1},
                                    "minResources": {"type": "object", "additionalProperties": True},
                                    "scheduleTimeoutSeconds": {"type": "integer", "format": "int32"},
                                },
                            },
                            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                        },
                    }
                },
            }
        ],
    },
}


def is_served(kube: Kube) -> bool:
    return kube.get(f"/apis/{GROUP}/v1alpha1/podgroups")[0] == 200


@pytest.fixture(scope="module")
def plug_in(kube: Kube) -> Iterator[None]:
    """Asked for before the operator, which looks for the plug-in once in a minute."""
    kube.create(POD_GROUP_CRD)
    wait_until(lambda: is_served(kube), 120, "pod groups are served")
    yield
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    kube.request("DELETE", f"{crds}/podgroups.{GROUP}")
    wait_until(lambda: not is_served(kube), 120, "pod groups are gone")


def members(namespace: Namespace) -> dict[str, int]:
    return {name: group["spec"]["minMember"] for name, group in namespace.list("podgroups").items()}


def test_pods_of_a_training_are_members_of_two_gangs(
    plug_in: None, namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    job = namespace.apply(job_manifest(nnWorker={"replicas": 3}, dataloader={"replicas": 2}))
    namespace.await_phase("job", "Running")
    assert members(namespace) == {"job-servers": 3, "job-training": 5}
    for group in namespace.list("podgroups").values():
        assert [owner["uid"] for owner in group["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    pods = namespace.list("pods").values()
    groups = [pod["metadata"]["labels"][f"{GROUP}/pod-group"] for pod in pods]
    assert {name: groups.count(name) for name in groups} == members(namespace)

    # A gang is as large as the job is, or new pods would wait for others that nobody makes.
    namespace.patch("persiajobs", "job", {"spec": {"replicas": 2}})
    namespace.await_(lambda: members(namespace)["job-servers"] == 4, "the gang of the servers is larger")
    namespace.patch("persiajobs", "job", {"spec": {"suspend": True}})
    namespace.await_phase("job", "Suspended")
    namespace.await_(lambda: not members(namespace), "a suspended job has no gangs")
    namespace.patch("persiajobs", "job", {"spec": {"suspend": False}})
    namespace.await_phase("job", "Running")
    assert members(namespace) == {"job-servers": 4, "job-training": 5}
    namespace.delete("persiajobs", "job")
    namespace.await_(lambda: not members(namespace), "the gangs are gone with the job")


def test_gangs_end_with_the_training(
    plug_in: None, namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    assert members(namespace) == {"job-servers": 3, "job-training": 2}
    kubelet.finish("job-nn-worker-0")
    kubelet.finish("job-dataloader-0")
    namespace.await_phase("job", "Succeeded")
    namespace.await_(lambda: not members(namespace), "the gangs are gone")


def test_servers_of_predictions_are_no_gang() -> None:
    job = load_job("infer_job.yml")
    assert pod_groups(job, scale_of(job)) == []
