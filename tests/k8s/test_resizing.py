"""Resizes of a job by the operator, at a real API server; pods do as the test says."""

from __future__ import annotations

import json
import signal
import urllib.parse

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from harness import PODS, Namespace, OperatorProcess, create_quota, job_manifest, limit_pods
from kubelet import FakeKubelet


def condition(namespace: Namespace, kind: str) -> tuple[str, str]:
    """Status and reason."""
    conditions = namespace.status("job").get("conditions", [])
    return next(((c["status"], c["reason"]) for c in conditions if c["type"] == kind), ("", ""))


COORDINATOR = "job-rows-resize"
NEW = {f"job-embedding-ps-g1-{index}" for index in range(2)}


def uids(namespace: Namespace) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}


def want_servers(namespace: Namespace, number: int) -> None:
    namespace.patch("persiajobs", "job", {"spec": {"embeddingParameterServer": {"replicas": number}}})


def test_a_resize_that_is_given_up_leaves_the_old_parameter_servers(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    before = uids(namespace)
    want_servers(namespace, 2)
    namespace.await_(lambda: kubelet.has(COORDINATOR), "the coordinator runs")
    first = uids(namespace)
    assert set(first) == {*PODS, *NEW, COORDINATOR}
    kubelet.finish(COORDINATOR, 137)
    namespace.await_(lambda: uids(namespace).get(COORDINATOR, "") not in ("", first[COORDINATOR]), "another")
    command = namespace.list("pods")[COORDINATOR]["spec"]["containers"][0]["command"]
    assert command[-1] == "--generation=1"
    namespace.await_(lambda: kubelet.has(COORDINATOR), "it runs")
    kubelet.finish(COORDINATOR, 3, message="they have a storage tier")
    assert "they have a storage tier" in namespace.await_event("job", "ResizeFailed")
    namespace.await_(lambda: not NEW & set(namespace.list("pods")), "the old servers continue")
    assert condition(namespace, "Resized") == ("False", "ResizeFailed")
    namespace.await_(lambda: condition(namespace, "SpecApplied") == ("False", "ResizeRefused"), "it is said")
    after = uids(namespace)
    assert {name: after[name] for name in before} == before
    want_servers(namespace, 1)
    namespace.await_(lambda: condition(namespace, "SpecApplied")[0] == "True", "taken back")


def test_a_resize_whose_coordinator_is_refused_says_so_and_can_be_taken_back(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    create_quota(namespace, len(PODS) + len(NEW))
    want_servers(namespace, 2)
    namespace.await_(lambda: condition(namespace, "PodsAccepted") == ("False", "Refused"), "refused")
    namespace.await_(lambda: condition(namespace, "Resized") == ("False", "Moving"), "it waits")
    want_servers(namespace, 1)
    namespace.await_(lambda: condition(namespace, "Resized") == ("False", "BrokenOff"), "taken back")
    namespace.await_(lambda: set(namespace.list("pods")) == PODS, "the new servers have ended")
    limit_pods(namespace, 2 * len(PODS))
    want_servers(namespace, 2)  # under new names
    namespace.await_(lambda: kubelet.has(COORDINATOR), "the coordinator runs")
    kubelet.finish(COORDINATOR)
    namespace.await_(lambda: condition(namespace, "Resized") == ("True", "Ready"), "resized")
    assert namespace.status("job")["serverGeneration"] == 2
    assert not {name for name in namespace.status("job")["servers"] if "-g1-" in name}


def test_parameter_servers_are_resized_by_an_operator_that_dies(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    before = uids(namespace)
    want_servers(namespace, 2)
    namespace.await_(lambda: kubelet.has(COORDINATOR), "the coordinator runs")
    operator.stop(signal.SIGKILL)
    kubelet.finish(COORDINATOR)
    operator.start()
    namespace.await_(lambda: condition(namespace, "Resized") == ("True", "Ready"), "resized")
    namespace.await_(lambda: "job-embedding-ps-0" not in namespace.list("pods"), "the old one has ended")
    status = namespace.status("job")
    assert (status["phase"], status["serverGeneration"], "resize" in status) == ("Running", 1, False)
    assert status["roles"]["embeddingParameterServer"] == {"replicas": 2, "ready": 2, "restarts": 0}
    after = uids(namespace)
    kept = before.keys() - {"job-embedding-ps-0"}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert not {"ServerRestarted", "ServersNotReady"} & {reason for reason, _ in namespace.events("job")}


def test_parameter_servers_are_resized_through_a_checkpoint(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest(resizeCheckpoint="s3://bucket/rows/"))
    namespace.await_phase("job", "Running")
    old = namespace.list("pods")
    namespace.patch("persiajobs", "job", {"spec": {"embeddingParameterServer": {"replicas": 2}}})
    dump = namespace.await_(lambda: namespace.list("pods").get("job-rows-dump"), "rows are dumped")
    location = f"s3://bucket/rows/{namespace.name}-job-resize"
    command = ["persia-launcher", "checkpoint", "dump", location, "--with-dense", "--hold=600"]
    assert dump["spec"]["containers"][0]["command"] == command
    assert namespace.status("job")["resize"]["stage"] == "Dumping"
    pods = namespace.list("pods")
    server = "job-embedding-ps-0"
    assert pods["job-nn-worker-0"]["metadata"]["uid"] == old["job-nn-worker-0"]["metadata"]["uid"]
    assert pods[server]["metadata"]["uid"] == old[server]["metadata"]["uid"]
    operator.stop(signal.SIGKILL)  # at any moment
    operator.start()
    namespace.await_(lambda: kubelet.has("job-rows-dump"), "it runs")
    kubelet.finish("job-rows-dump")
    namespace.await_(lambda: kubelet.has("job-rows-load"), "rows are loaded")
    pods = namespace.list("pods")
    assert pods[server]["metadata"]["uid"] != old[server]["metadata"]["uid"]
    assert "job-embedding-ps-1" in pods
    kubelet.finish("job-rows-load")
    status = namespace.await_phase("job", "Running")
    assert (status["resizes"], status["restarts"]) == (1, 0)
    assert status["roles"]["embeddingParameterServer"] == {"replicas": 2, "ready": 2, "restarts": 0}
    assert "resize" not in status
    assert (status["resizeCheckpoint"], status["progress"]["lastCheckpoint"]) == (location, location)
    worker = "job-embedding-worker-0"
    assert namespace.list("pods")[worker]["metadata"]["uid"] != old[worker]["metadata"]["uid"]
    assert ("Resized", "2 parameter servers have the rows") in namespace.events("job")
    kubelet.finish("job-nn-worker-0")
    kubelet.finish("job-dataloader-0")
    namespace.await_(lambda: kubelet.has("job-rows-remove"), "the checkpoint is removed")
    kubelet.finish("job-rows-remove")
    namespace.await_(lambda: "resizeCheckpoint" not in namespace.status("job"), "it is gone")


def test_standbys_are_as_many_as_their_servers_and_stay(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    servers = {"replicas": 1, "standbys": 1}
    namespace.apply(job_manifest(resizeCheckpoint="/rows", embeddingParameterServer=servers))
    namespace.await_phase("job", "Running")
    old = namespace.list("pods")
    assert set(old) == {*PODS, "job-standby-0"}
    namespace.patch("persiajobs", "job", {"spec": {"embeddingParameterServer": {"standbys": 0}}})
    assert "standbys: 0 takes effect in a new job" in namespace.await_event("job", "Deferred")
    namespace.patch("persiajobs", "job", {"spec": {"embeddingParameterServer": {"replicas": 2}}})
    for pod in ("job-rows-dump", "job-rows-load"):
        namespace.await_(lambda pod=pod: kubelet.has(pod), f"{pod} runs")
        kubelet.finish(pod)
    namespace.await_phase("job", "Running")
    pods = namespace.list("pods")
    assert {"job-standby-0", "job-standby-1", "job-embedding-ps-1"} <= set(pods)
    assert pods["job-standby-0"]["metadata"]["uid"] != old["job-standby-0"]["metadata"]["uid"]
    namespace.patch("persiajobs", "job", {"spec": {"suspend": True}})
    namespace.await_(lambda: not namespace.list("pods"), "suspended")
    namespace.patch("persiajobs", "job", {"spec": {"suspend": False}})
    namespace.await_phase("job", "Running")
    assert not any("standby" in pod for pod in namespace.list("pods"))


def test_embedding_workers_come_and_go_while_the_training_runs(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest())
    namespace.await_phase("job", "Running")
    before = {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}
    for wanted in (3, 1):
        namespace.patch("persiajobs", "job", {"spec": {"embeddingWorker": {"replicas": wanted}}})
        namespace.await_(lambda wanted=wanted: has_resized_to(namespace, wanted), f"{wanted} workers")
        assert namespace.status("job")["roles"]["embeddingWorker"]["replicas"] == wanted
    assert namespace.status("job")["phase"] == "Running"
    after = {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}
    assert after == before  # nothing else was started anew
    reasons = [reason for reason, _ in namespace.events("job")]
    assert {"Resizing", "Resized"} <= set(reasons)
    assert not {"ServersNotReady", "ServerRestarted", "Deferred"} & set(reasons)


@pytest.mark.parametrize("role", ["embeddingWorker", "inference"])
def test_an_autoscaler_sets_the_number_of_stateless_servers(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess, role: str
) -> None:
    """A real one, without metrics: it keeps to its limits, and looks for the pods."""
    inference = {"inference": {"replicas": 1, "checkpoint": "/c"}, "nnWorker": None, "dataloader": None}
    namespace.apply(job_manifest(**(inference if role == "inference" else {})))
    namespace.await_phase("job", "Running")
    _, scale = namespace.kube.get(f"{namespace.path('persiajobs', 'job')}/scale")
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (1, 1)
    selected = urllib.parse.quote(scale["status"]["selector"])
    _, pods = namespace.kube.get(f"{namespace.path('pods')}?labelSelector={selected}")
    pod = {"embeddingWorker": "job-embedding-worker-0", "inference": "job-inference-0"}[role]
    assert [item["metadata"]["name"] for item in pods["items"]] == [pod]
    target = {"apiVersion": "persia.com/v1", "kind": "PersiaJob", "name": "job"}
    autoscaler = {
        "apiVersion": "autoscaling/v1",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "workers", "namespace": namespace.name},
        "spec": {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 3},
    }
    path = f"/apis/autoscaling/v1/namespaces/{namespace.name}/horizontalpodautoscalers/workers"
    namespace.kube.create(autoscaler)

    def is_scaled() -> bool:
        counts = namespace.status("job")["roles"][role]
        return (counts["replicas"], counts["ready"]) == (2, 2)

    # It learns of new resources every 30 s.
    namespace.await_(is_scaled, "as many as it wants at least", seconds=240)

    def why_it_cannot_measure() -> str | None:
        notes = namespace.kube.get(path)[1]["metadata"].get("annotations", {})
        conditions = json.loads(notes.get("autoscaling.alpha.kubernetes.io/conditions", "[]"))
        return next((c["reason"] for c in conditions if c["type"] == "ScalingActive"), None)

    reason = namespace.await_(why_it_cannot_measure, "a look at the pods")
    assert reason == "FailedGetResourceMetric"  # and not InvalidSelector
    namespace.kube.request("DELETE", path)
    namespace.patch("persiajobs", "job", {"spec": {role: {"replicas": 1}}})
    assert namespace.get("persiajobs", "job")["spec"]["replicas"] == 2  # the role's own is the old one
    namespace.patch("persiajobs", "job", {"spec": {role: {"replicas": 3}}})
    namespace.await_(lambda: namespace.status("job")["replicas"] == 3, "the later change counts")
    assert namespace.get("persiajobs", "job")["spec"]["replicas"] == 3


def has_resized_to(namespace: Namespace, num_workers: int) -> bool:
    workers = [name for name in namespace.list("pods") if "embedding-worker" in name]
    conditions = namespace.status("job")["conditions"]
    said = [(c["type"], c["status"], c.get("message")) for c in conditions]
    is_said = ("Resized", "True", f"embeddingWorker.replicas: {num_workers}") in said
    return is_said and len(workers) == num_workers


def test_a_changed_number_of_loaders_takes_effect_with_the_next_start(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest(restartPolicy="OnFailure", backoffSeconds=0))
    namespace.await_phase("job", "Running")
    namespace.patch("persiajobs", "job", {"spec": {"dataloader": {"replicas": 2}}})
    assert "dataloader.replicas: 2 takes effect" in namespace.await_event("job", "Deferred")
    assert set(namespace.list("pods")) == PODS
    namespace.delete("pods", "job-nn-worker-0")
    namespace.await_(lambda: namespace.status("job").get("restarts") == 1, "restarted")
    status = namespace.await_phase("job", "Running")
    assert status["roles"]["dataloader"] == {"replicas": 2, "ready": 2, "restarts": 0}


def test_before_training_starts_every_resize_is_live(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.apply(job_manifest())
    namespace.await_(lambda: len(namespace.list("pods")) == 3, "servers are there")
    namespace.patch(
        "persiajobs",
        "job",
        {"spec": {"embeddingParameterServer": {"replicas": 2}, "embeddingWorker": {"replicas": 3}}},
    )

    def is_resized() -> bool:
        commands = {
            name: pod["spec"]["containers"][0]["command"][-1] for name, pod in namespace.list("pods").items()
        }
        servers = [command for name, command in commands.items() if "embedding-ps" in name]
        return len(commands) == 6 and all("--replica-size=2" in command for command in servers)

    namespace.await_(is_resized, "new servers of the new size")
