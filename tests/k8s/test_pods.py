"""What users make of a job's pods, and what closes them to others."""

from __future__ import annotations

import base64
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from persia_k8s.builders.manifest import Images, Manifest, Scale
from persia_k8s.builders.merge import merge
from persia_k8s.builders.pods import rows_pod, training_pod
from persia_k8s.builders.security import job_secret, network_policies
from persia_k8s.builders.servers import stateful_set
from persia_k8s.names import Role
from test_manifests import all_manifests, load_job, scale_of

IMAGES = Images(cpu="cpu", cuda="cuda")
TEMPLATE = {
    "metadata": {"labels": {"team": "ads"}, "annotations": {"mesh/inject": "false"}},
    "spec": {
        "serviceAccountName": "trainer",
        "automountServiceAccountToken": True,
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "batch",
        "schedulerName": "volcano",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "securityContext": {"runAsUser": 1234},
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "initContainers": [{"name": "fetch", "image": "fetch"}],
        "containers": [
            {
                "name": "nn-worker",
                "envFrom": [{"configMapRef": {"name": "settings"}}],
                "env": [{"name": "LOG_LEVEL", "value": "debug"}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            },
            {"name": "logs", "image": "logs"},
        ],
    },
}


def pod_with(template: dict[str, Any]) -> Manifest:
    job = load_job("full_job.yml", nnWorker={"replicas": 1, "podTemplate": template})
    return training_pod(job, Role.NN_WORKER, 0, scale_of(job), IMAGES)


def test_a_template_is_merged_over_the_operator_s_pod() -> None:
    pod = pod_with(TEMPLATE)
    assert pod["metadata"]["labels"] == {
        "persia_job": "full",
        "persia.com/role": "nn-worker",
        "persia.com/attempt": "0",
        "scheduling.x-k8s.io/pod-group": "full-training",
        "team": "ads",
    }
    assert pod["metadata"]["annotations"]["mesh/inject"] == "false"
    assert pod["metadata"]["annotations"]["prometheus.io/scrape"] == "true"
    spec = pod["spec"]
    plain = ("serviceAccountName", "automountServiceAccountToken", "imagePullSecrets", "priorityClassName")
    for name in (*plain, "schedulerName", "topologySpreadConstraints", "initContainers"):
        assert spec[name] == TEMPLATE["spec"][name]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (1234, True)
    assert [volume["name"] for volume in spec["volumes"]] == ["persia-job-secret", "scratch"]
    own, sidecar = spec["containers"]
    assert (own["name"], sidecar) == ("nn-worker", {"name": "logs", "image": "logs"})
    assert own["command"][1] == "nn-worker"
    assert own["envFrom"] == [{"configMapRef": {"name": "settings"}}]
    levels = [variable["value"] for variable in own["env"] if variable["name"] == "LOG_LEVEL"]
    assert levels == ["debug"]
    assert [mount["mountPath"] for mount in own["volumeMounts"]] == ["/var/run/persia", "/scratch"]


def test_null_removes_and_lists_without_a_key_are_replaced() -> None:
    base = {"a": {"b": 1, "c": 2}, "tolerations": [{"key": "x"}], "env": [{"name": "A", "value": "1"}]}
    patch = {"a": {"b": None}, "tolerations": [], "env": [{"name": "B"}, {"name": "A", "value": None}]}
    assert merge(base, patch) == {"a": {"c": 2}, "tolerations": [], "env": [{"name": "A"}, {"name": "B"}]}
    assert base["a"] == {"b": 1, "c": 2}


def test_pods_that_move_rows_have_the_credentials_of_the_servers_and_not_their_sidecars() -> None:
    server = {"name": "emb-server", "envFrom": [{"secretRef": {"name": "s3"}}], "resources": {"limits": {}}}
    template = {"spec": {"serviceAccountName": "rows", "containers": [server, {"name": "logs"}]}}
    job = load_job("full_job.yml", embeddingParameterServer={"replicas": 1, "podTemplate": template})
    pod = rows_pod(job, "dump", "s3://b/c", scale_of(job), IMAGES)
    assert pod["spec"]["serviceAccountName"] == "rows"
    (container,) = pod["spec"]["containers"]
    assert (container["name"], container["envFrom"]) == ("rows", [{"secretRef": {"name": "s3"}}])
    assert container["resources"] == {}
    assert container["command"][1:3] == ["checkpoint", "dump"]


@pytest.mark.parametrize("name", ["published_job", "full_job", "infer_job"])
def test_pods_meet_the_pod_security_standard_restricted(name: str) -> None:
    """As https://kubernetes.io/docs/concepts/security/pod-security-standards lists it."""
    for manifest in all_manifests(load_job(f"{name}.yml")):
        if manifest["kind"] not in ("Pod", "StatefulSet"):
            continue
        spec = manifest["spec"] if manifest["kind"] == "Pod" else manifest["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def mounted_key(manifest: Manifest) -> str:
    spec = manifest["spec"] if manifest["kind"] == "Pod" else manifest["spec"]["template"]["spec"]
    (volume,) = (volume for volume in spec["volumes"] if "secret" in volume)
    (item,) = volume["secret"]["items"]
    assert item["path"] == "secret"
    return str(item["key"])


def test_pods_mount_the_secret_of_their_role() -> None:
    job, scale = load_job("full_job.yml"), Scale(replicas=dict.fromkeys(Role, 1), suspensions=2)
    secret = job_secret(job, 2, bytes(range(32)))
    keys = {
        mounted_key(training_pod(job, Role.DATA_LOADER, 0, scale, IMAGES)): "loader",
        mounted_key(rows_pod(job, "dump", "/c", scale, IMAGES)): "admin",
        mounted_key(training_pod(job, Role.NN_WORKER, 0, scale, IMAGES)): "job",
        mounted_key(stateful_set(job, Role.PARAMETER_SERVER, scale, IMAGES)): "job",
    }
    assert set(keys) == set(secret["data"])
    for key, role in keys.items():
        text = base64.b64decode(secret["data"][key]).decode()
        assert text.startswith(f"persia1.{role}.")
        assert (bytes(range(32)).hex() in text) == (role == "job")
    assert secret["metadata"]["name"] == "full-secret-11111111-2"


def test_limited_credentials_are_those_that_persia_derives() -> None:
    security = pytest.importorskip("persia.security.secret", reason="persia has no job secret yet")
    data = job_secret(load_job("full_job.yml"), 0, bytes(range(32)))["data"]
    whole = security.parse(base64.b64decode(data["secret"]).decode(), "test")
    for role in ("loader", "admin"):
        assert base64.b64decode(data[role]).decode() == whole.limited_to(role).text


def test_only_the_job_its_clients_and_prometheus_reach_its_pods() -> None:
    (whole,) = network_policies(load_job("full_job.yml"))
    own, metrics = whole["spec"]["ingress"]
    assert whole["spec"]["podSelector"]["matchLabels"] == {"persia_job": "full"}
    assert own == {"from": [{"podSelector": {"matchLabels": {"persia_job": "full"}}}]}
    assert [port["port"] for port in metrics["ports"]] == list(range(9100, 9108))  # of eight ranks
    (quiet,) = network_policies(load_job("full_job.yml", enableMetrics=False))
    assert quiet["spec"]["ingress"] == [own]
    _, requests = network_policies(load_job("infer_job.yml"))
    assert requests["spec"]["podSelector"]["matchLabels"]["persia.com/role"] == "inference"
    assert requests["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8001}]}]
