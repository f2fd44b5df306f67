"""Forty wrong specs: the API server refuses each, or a condition names the field within seconds."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from harness import Namespace, OperatorProcess, job_manifest

# Ten seconds are promised; a test machine may be busy with other things.
LIMIT_S = 120
INFERENCE = {"replicas": 1, "checkpoint": "/c"}
STANDBYS = {"replicas": 1, "standbys": 1}


def role(**template: Any) -> dict[str, Any]:
    """A role whose `podTemplate` has this `spec`."""
    return {"replicas": 1, "podTemplate": {"spec": template}}


def container(**fields: Any) -> dict[str, Any]:
    """The NN workers, with these fields of their container."""
    return {"nnWorker": role(containers=[{"name": "nn-worker", **fields}])}


REFUSED = [
    ({"nnWorker": {"replicas": 0}}, "spec.nnWorker.replicas"),
    ({"nnWorker": {}}, "spec.nnWorker.replicas"),
    ({"nnWorker": {"replicas": "two"}}, "spec.nnWorker.replicas"),
    ({"nnWorker": {"replicas": 1, "nprocPerNode": 0}}, "spec.nnWorker.nprocPerNode"),
    ({"nnWorker": {"replicas": 1, "podTemplate": "x"}}, "spec.nnWorker.podTemplate"),
    ({"nnWorker": role() | {"maxUnavailable": -1}}, "spec.nnWorker.maxUnavailable"),
    ({"nnWorker": {"replicas": 1, "podTemplate": {"metadata": {"labels": {"a": 1}}}}}, "labels.a"),
    ({"dataloader": {"replicas": 1, "tolerations": [{"operator": "Is"}]}}, "spec.dataloader.tolerations"),
    ({"logLevel": "loud"}, "spec.logLevel"),
    ({"restartPolicy": "Sometimes"}, "spec.restartPolicy"),
    ({"backoffLimit": -1}, "spec.backoffLimit"),
    ({"suspend": "yes"}, "spec.suspend"),
    ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds"),
    ({"replicas": 0}, "spec.replicas"),
    ({"persiaEnv": {}}, "PERSIA_EMBEDDING_CONFIG"),
    ({"persiaEnv": {"PERSIA_EMBEDDING_CONFIG": ""}}, "PERSIA_EMBEDDING_CONFIG"),
    ({"env": [{"value": "1"}]}, "spec.env.name"),
    ({"nats": {"maxPayload": "lots"}}, "spec.nats.maxPayload"),
    ({"nats": {"url": "http://nats"}}, "spec.nats.url"),
    ({"embeddingWorker": {"replicas": 1, "resources": {"limits": {"cpu": "four"}}}}, "limits"),
    ({"inference": INFERENCE}, "spec"),  # trains and answers
    ({"inference": {"replicas": 1}, "nnWorker": None, "dataloader": None}, "spec.inference.checkpoint"),
    ({"volumes": [{"hostPath": {"path": "/"}}]}, "spec.volumes.name"),
    ({"embeddingParameterServer": STANDBYS | {"standbys": 2}}, "spec.embeddingParameterServer.standbys"),
    (
        {"inference": INFERENCE, "nnWorker": None, "dataloader": None, "embeddingParameterServer": STANDBYS},
        "spec",
    ),
]
IN_A_CONDITION = [
    ({"nnWorker": role(restartPolicy="Always")}, "spec.nnWorker.podTemplate.spec.restartPolicy"),
    ({"nnWorker": role(hostname="x")}, "spec.nnWorker.podTemplate.spec.hostname"),
    ({"nnWorker": {"replicas": 1, "podTemplate": {"specs": {}}}}, "spec.nnWorker.podTemplate.specs"),
    (
        {"nnWorker": {"replicas": 1, "podTemplate": {"metadata": {"name": "x"}}}},
        "spec.nnWorker.podTemplate.metadata.name",
    ),
    (
        {"nats": {"podTemplate": {"metadata": {"labels": {"persia_job": "x"}}}}},
        "spec.nats.podTemplate.metadata.labels.persia_job",
    ),
    ({"nnWorker": role(serviceAcountName="x")}, "spec.nnWorker: ...serviceAcountName"),
    ({"nnWorker": role(priorityClassName="none-such")}, "spec.nnWorker: ...none-such"),
    ({"nnWorker": role(topologySpreadConstraints=[{"topologyKey": "zone"}])}, "spec.nnWorker: ...maxSkew"),
    ({"nnWorker": role(initContainers=[{"name": "init"}])}, "spec.nnWorker: ...initContainers[0].image"),
    ({"nnWorker": role(containers=[{"image": "mesh"}])}, "spec.nnWorker: ...name"),
    (container(imag="x"), "spec.nnWorker: ...imag"),
    (container(envFrom=[{"configMap": {"name": "x"}}]), "spec.nnWorker: ...configMap"),
    (container(volumeMounts=[{"name": "none", "mountPath": "/x"}]), "spec.nnWorker: ...volumeMounts[1].name"),
    (container(securityContext={"runAsUser": -1}), "spec.nnWorker: ...runAsUser"),
    (container(resources={"limits": {"memory": "much"}}), "spec.nnWorker: ...quantities"),
    (container(env=[{"name": "0=", "value": "x"}]), "spec.nnWorker: ...env"),
    ({"embeddingWorker": role(dnsPolicy="Sometimes")}, "spec.embeddingWorker: ...dnsPolicy"),
    (
        {"embeddingParameterServer": role(volumes=[{"name": "A_b"}])},
        "spec.embeddingParameterServer: ...volumes",
    ),
    (
        {"dataloader": {"replicas": 1, "volumeMounts": [{"name": "n", "mountPath": "/x"}]}},
        "spec.dataloader: ...volumeMounts",
    ),
    ({"nats": {"podTemplate": {"spec": {"tolerations": [{"effect": "x"}]}}}}, "spec.nats: ...tolerations"),
]


def test_there_are_forty() -> None:
    assert len(REFUSED) + len(IN_A_CONDITION) >= 40


@pytest.mark.parametrize(("change", "complaint"), REFUSED)
def test_a_wrong_spec_is_refused_by_name(namespace: Namespace, change: dict, complaint: str) -> None:
    job = job_manifest(**change)
    job["metadata"]["namespace"] = namespace.name
    status, answer = namespace.kube.request("POST", namespace.path("persiajobs"), job)
    assert status == 422
    assert complaint in re.sub(r"\[\d+\]", "", answer["message"])  # newer servers count the items of lists


@pytest.mark.parametrize(("change", "complaint"), IN_A_CONDITION)
def test_a_wrong_pod_is_shown_in_a_condition(
    namespace: Namespace, operator: OperatorProcess, change: dict, complaint: str
) -> None:
    namespace.apply(job_manifest(**change))

    def refusal() -> str | None:
        conditions = namespace.status("job").get("conditions", [])
        return next((c["message"] for c in conditions if c["status"] == "False" and "message" in c), None)

    message = namespace.await_(refusal, "a condition says what is wrong", LIMIT_S)
    for part in complaint.split("..."):
        assert part in message
    assert namespace.list("pods") == {}  # nothing of a job that cannot be whole is started
