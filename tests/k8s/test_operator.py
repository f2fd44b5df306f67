"""The operator, with the rights it is deployed with, at a real API server; pods do as the test says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from control_plane import ADMIN, OPERATOR, SERVER, ControlPlane, find_binaries
from harness import PODS, Kube, Namespace, OperatorProcess, job_manifest
from kube_api import Api
from kubelet import FakeKubelet

ELSEWHERE = "nats://elsewhere:4222"


def test_a_job_runs_from_creation_to_success(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    job = namespace.apply(job_manifest())
    status = namespace.await_phase("job", "Running")
    pods = namespace.list("pods")
    assert set(pods) == PODS
    assert {pod["metadata"]["labels"]["persia_job"] for pod in pods.values()} == {"job"}
    assert all(status["roles"][role]["ready"] == 1 for role in status["roles"]), status
    assert len(status["roles"]) == 5
    for kind in ("statefulsets", "services", "poddisruptionbudgets"):
        for name, item in namespace.list(kind).items():
            assert [owner["uid"] for owner in item["metadata"]["ownerReferences"]] == [
                job["metadata"]["uid"]
            ], name

    kubelet.write_log("job-nn-worker-0", 'step\npersia-progress {"step": 3, "auc": 0.75}\n')
    kubelet.finish("job-nn-worker-0")
    kubelet.finish("job-dataloader-0")
    status = namespace.await_phase("job", "Succeeded")
    assert status["progress"] == {"step": 3, "auc": 0.75}
    assert {c["type"]: c["status"] for c in status["conditions"]}["Complete"] == "True"
    # What the job held is freed; what has ended stays, for its logs.
    namespace.await_(
        lambda: set(namespace.list("pods")) == {"job-nn-worker-0", "job-dataloader-0"}, "servers are gone"
    )
    namespace.await_(
        lambda: not any(namespace.list(k) for k in ("statefulsets", "services", "poddisruptionbudgets")),
        "objects are gone",
    )
    namespace.await_event("job", "Succeeded")
    assert {reason for reason, _ in namespace.events("job")} == {"Started", "Succeeded"}


def test_deletion_takes_everything_along(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    namespace.delete("persiajobs", "job")
    for kind in ("persiajobs", "pods", "statefulsets", "services", "poddisruptionbudgets"):
        namespace.await_(lambda kind=kind: not namespace.list(kind), f"no {kind} are left")


def test_training_starts_when_the_servers_are_ready(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.apply(job_manifest())
    namespace.await_(lambda: len(namespace.list("pods")) == 3, "servers are there")
    conditions = namespace.await_(lambda: namespace.status("job").get("conditions"), "conditions")
    ready = next(condition for condition in conditions if condition["type"] == "ServersReady")
    assert ready["status"] == "False"
    assert "embeddingParameterServer 0 of 1" in ready["message"]
    assert not [name for name in namespace.list("pods") if "nn-worker" in name]


def test_never_restart_fails_the_job_with_the_reason(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    kubelet.finish("job-nn-worker-0", 3, "ValueError: no such column")
    status = namespace.await_phase("job", "Failed")
    failed = next(c for c in status["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "TrainingFailed"
    assert "job-nn-worker-0: exit code 3: ValueError: no such column" in failed["message"]
    namespace.await_(lambda: set(namespace.list("pods")) == {"job-nn-worker-0"}, "the others are gone")
    assert failed["message"] in namespace.await_event("job", "Failed")


def test_failed_training_is_started_again_as_a_whole(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest(restartPolicy="OnFailure", backoffLimit=1, backoffSeconds=1))
    namespace.await_phase("job", "Running")
    before = {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}
    kubelet.finish("job-nn-worker-0", 1, "boom")
    namespace.await_(lambda: namespace.status("job").get("restarts") == 1, "restarted")
    namespace.await_phase("job", "Running")
    after = {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}
    kept = {name for name in PODS if before[name] == after[name]}
    assert kept == {"job-nats-0", "job-embedding-ps-0"}  # rows survive; workers and all that trains is new
    assert "boom" in namespace.await_event("job", "Restarting")

    kubelet.finish("job-nn-worker-0", 1, "boom again")
    status = namespace.await_phase("job", "Failed")  # the limit
    assert status["restarts"] == 1


def test_the_end_of_a_pod_is_seen_at_once(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    time.sleep(1.5)  # by now it waits: without a watch of pods, it would look again ten seconds later
    kubelet.finish("job-nn-worker-0")
    namespace.await_phase("job", "Succeeded", seconds=7)


def test_a_deleted_rank_is_a_failed_one(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest(restartPolicy="OnFailure", backoffSeconds=0))
    namespace.await_phase("job", "Running")
    namespace.delete("pods", "job-nn-worker-0")
    namespace.await_(lambda: namespace.status("job").get("restarts") == 1, "restarted")
    namespace.await_phase("job", "Running")


def test_a_failed_loader_is_started_again_alone(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest(restartPolicy="OnFailure"))
    namespace.await_phase("job", "Running")
    before = {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}
    kubelet.finish("job-dataloader-0", 137)
    namespace.await_event("job", "DataLoaderRestarted")

    def after() -> dict[str, str] | None:
        pods = {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}
        return pods if pods.get("job-dataloader-0", "") not in ("", before["job-dataloader-0"]) else None

    pods = namespace.await_(after, "a new loader")
    assert {name for name in PODS if before[name] == pods[name]} == PODS - {"job-dataloader-0"}
    assert namespace.status("job")["phase"] == "Running"


def test_a_server_that_restarts_is_reported_and_not_for_ever(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest(backoffLimit=1))
    namespace.await_phase("job", "Running")
    kubelet.finish("job-embedding-ps-0", 137)
    assert "rows that it held are lost" in namespace.await_event("job", "ServerRestarted")
    assert namespace.status("job")["phase"] == "Running"
    kubelet.finish("job-embedding-ps-0", 2, "bad config")
    status = namespace.await_phase("job", "Failed")
    failed = next(c for c in status["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "ServerFailed"
    assert "job-embedding-ps-0" in failed["message"]


def test_a_job_has_a_secret_and_a_network_policy_and_new_ones_after_a_suspension(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    uid = namespace.apply(job_manifest())["metadata"]["uid"]
    namespace.await_phase("job", "Running")
    first = job_secrets(namespace)
    assert set(first) == {f"job-secret-{uid[:8]}-0"}
    assert set(namespace.list("networkpolicies")) == {"job-job"}
    namespace.patch("persiajobs", "job", {"spec": {"suspend": True}})
    namespace.await_phase("job", "Suspended")
    for kind in ("pods", "statefulsets", "services", "networkpolicies"):
        namespace.await_(lambda kind=kind: not namespace.list(kind), f"no {kind} are left")
    namespace.patch("persiajobs", "job", {"spec": {"suspend": False}})
    namespace.await_phase("job", "Running")
    both = job_secrets(namespace)
    assert set(both) == {f"job-secret-{uid[:8]}-{number}" for number in (0, 1)}
    assert len({secret["data"]["secret"] for secret in both.values()}) == 2
    for pod in namespace.list("pods").values():
        assert [v["secret"]["secretName"] for v in pod["spec"]["volumes"]] == [f"job-secret-{uid[:8]}-1"]
    namespace.delete("persiajobs", "job")
    namespace.await_(lambda: not job_secrets(namespace), "secrets are gone with their job")


def job_secrets(namespace: Namespace) -> dict[str, Any]:
    return {name: item for name, item in namespace.list("secrets").items() if item["type"] == "Opaque"}


def test_a_wrong_change_of_a_job_that_runs_is_shown_and_the_job_is_looked_after(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    wrong = {"embeddingWorker": {"podTemplate": {"spec": {"dnsPolicy": "Sometimes"}}}}
    namespace.patch("persiajobs", "job", {"spec": wrong})
    assert "spec.embeddingWorker" in namespace.await_event("job", "PodsRefused")
    assert set(namespace.list("pods")) == PODS
    kubelet.finish("job-nn-worker-0")
    kubelet.finish("job-dataloader-0")
    namespace.await_phase("job", "Succeeded")


def test_an_operator_that_is_killed_goes_on_where_it_was(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    before = {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}
    operator.stop(signal.SIGKILL)
    kubelet.finish("job-nn-worker-0")  # while nobody looks
    kubelet.finish("job-dataloader-0")
    operator.start()
    namespace.await_phase("job", "Succeeded")
    after = {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}
    assert all(before[name] == uid for name, uid in after.items())  # nothing was started twice


def test_what_somebody_deletes_comes_back(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    namespace.delete("services", "job-nats")
    namespace.delete("pods", "job-embedding-worker-0")  # and an occasion to look
    namespace.await_(lambda: namespace.get("services", "job-nats"), "the service is back")
    namespace.await_(lambda: set(namespace.list("pods")) == PODS, "the pod is back")


def test_a_finished_job_goes_after_its_time(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest(ttlSecondsAfterFinished=1))
    namespace.await_phase("job", "Running")
    kubelet.finish("job-nn-worker-0")
    kubelet.finish("job-dataloader-0")
    namespace.await_(lambda: namespace.get("persiajobs", "job") is None, "the job is gone")
    namespace.await_(lambda: not namespace.list("pods"), "its pods are gone")


def test_a_job_is_not_taken_for_its_namesake_that_was_deleted(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    before = {pod["metadata"]["uid"] for pod in namespace.list("pods").values()}
    namespace.patch("pods", "job-nn-worker-0", {"metadata": {"finalizers": ["test/hold"]}})
    kubelet.finish("job-nn-worker-0")
    namespace.await_phase("job", "Succeeded")
    namespace.delete("persiajobs", "job")
    namespace.await_(lambda: namespace.get("persiajobs", "job") is None, "the job is gone")
    namespace.apply(job_manifest())  # the pod that has succeeded is still there
    namespace.await_(lambda: _ready(namespace, "job-dataloader-0", before), "a new loader")
    assert namespace.status("job")["phase"] == "Pending"
    namespace.patch("pods", "job-nn-worker-0", {"metadata": {"finalizers": None}})
    namespace.await_phase("job", "Running")
    pods = namespace.list("pods")
    assert set(pods) == PODS
    assert before.isdisjoint(pod["metadata"]["uid"] for pod in pods.values())


def _ready(namespace: Namespace, pod: str, other_than: set[str]) -> bool:
    found = namespace.list("pods").get(pod)
    return found is not None and found["metadata"]["uid"] not in other_than


def test_bug_23_half_a_job_is_completed_and_objects_of_others_are_left_alone(
    namespace: Namespace, operator: OperatorProcess
) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "job-nats", "namespace": namespace.name},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "other"}},
    }
    namespace.kube.create(service)
    namespace.apply(job_manifest())
    assert "is there already and not this job's" in namespace.await_event("job", "PodsRefused")
    assert namespace.list("services")["job-nats"]["spec"]["selector"] == {"app": "other"}
    namespace.delete("services", "job-nats")
    namespace.await_(lambda: namespace.get("services", "job-nats"), "it goes on")


def test_bug_23_finalizers_of_others_stay(namespace: Namespace, operator: OperatorProcess) -> None:
    def finalizers() -> list[str]:
        job = namespace.get("persiajobs", "job")
        assert job is not None
        found: list[str] = job["metadata"]["finalizers"]
        return found

    manifest = job_manifest()
    manifest["metadata"]["finalizers"] = ["test/hold"]
    namespace.apply(manifest)
    namespace.await_(lambda: len(finalizers()) == 2, "the operator has its own")
    namespace.delete("persiajobs", "job")
    namespace.await_(lambda: finalizers() == ["test/hold"], "only the operator's own is gone")
    namespace.patch("persiajobs", "job", {"metadata": {"finalizers": None}})
    namespace.await_(lambda: namespace.get("persiajobs", "job") is None, "the job is gone")


@pytest.mark.parametrize("token", [OPERATOR, SERVER])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/namespaces/persia-system/secrets/other"),
        ("GET", "/api/v1/namespaces/default/secrets/persia-operator-master"),
        # The answers to these two may contain the Secret.
        ("PATCH", "/api/v1/namespaces/default/secrets/x"),
        ("DELETE", "/api/v1/namespaces/default/secrets/x"),
        ("GET", "/api/v1/configmaps"),
        ("GET", "/api/v1/nodes"),
        ("POST", "/api/v1/namespaces/default/pods/x/exec"),
        ("PUT", "/apis/persia.com/v1/namespaces/default/persiajobs/x"),
        ("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"),
        ("DELETE", "/apis/apps/v1/namespaces/default/deployments/x"),
    ],
)
def test_rights_end_where_the_work_ends(
    control_plane: ControlPlane, kube: Kube, token: str, method: str, path: str
) -> None:
    user = Api(control_plane.url, token, control_plane.authority)
    assert user.request(method, path, {} if method in ("POST", "PUT", "PATCH") else None)[0] == 403
    user.close()


@pytest.mark.parametrize(
    "settings",
    [{"env": [{"name": "PERSIA_NATS_URL", "value": ELSEWHERE}]}, {"nats": {"url": ELSEWHERE}}],
    ids=["env", "url"],
)
def test_an_external_broker_is_used(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess, settings: dict[str, Any]
) -> None:
    namespace.apply(job_manifest(**settings))
    namespace.await_phase("job", "Running")
    for pod in namespace.list("pods").values():
        env = {variable["name"]: variable.get("value") for variable in pod["spec"]["containers"][0]["env"]}
        assert env["PERSIA_NATS_URL"] == ELSEWHERE
    assert set(namespace.list("pods")) == PODS - {"job-nats-0"}
    assert "job-nats" not in namespace.list("services")


def test_without_the_definition_the_operator_ends_with_a_clear_error(tmp_path: Path) -> None:
    """So that its Deployment starts it again, until somebody installs the definition."""
    binaries = find_binaries()
    if isinstance(binaries, str):
        pytest.skip(binaries)
    with ControlPlane(tmp_path, binaries) as plane:
        finished = subprocess.run(
            [sys.executable, "-m", "persia_k8s.cli", "operator"],
            env={**os.environ, "KUBECONFIG": str(plane.kubeconfig(ADMIN))},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert finished.returncode == 1
    assert "does not know PersiaJob" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_one_operator_serves_all_namespaces(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    other = Namespace.create(namespace.kube)
    kubelet.namespaces.append(other.name)
    namespace.apply(job_manifest())
    other.apply(job_manifest())
    for space in (namespace, other):
        space.await_phase("job", "Running")
        space.delete("persiajobs", "job")
        space.await_(lambda space=space: not space.list("persiajobs"), "the job is gone")
