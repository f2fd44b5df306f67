"""Every manifest of a job, compared with files that a person has read.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/k8s/test_manifests.py, and read the difference.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from kubernetes import client
from persia_k8s.builders.manifest import Images, Manifest, Scale, spec_hash
from persia_k8s.builders.pods import training_pod
from persia_k8s.builders.security import network_policies
from persia_k8s.builders.servers import disruption_budget, services, stateful_set
from persia_k8s.errors import SpecError
from persia_k8s.job import Job
from persia_k8s.names import Role

HERE = Path(__file__).parent
NAMES = ["published_job", "full_job", "infer_job"]
MORE_WORKERS = {Role.EMBEDDING_WORKER: 7}
IMAGES = Images(cpu="persia-cpu:test", cuda="persia-cuda:test")


def load_job(file_name: str, **spec: Any) -> Job:
    resource = yaml.safe_load((HERE / file_name).read_text())
    resource["metadata"] |= {"uid": "11111111-2222-3333-4444-555555555555", "generation": 1}
    resource["spec"] |= spec
    return Job.from_object(resource)


def scale_of(job: Job, attempt: int = 0) -> Scale:
    replicas = {role: spec.replicas for role, spec in job.roles.items()}
    return Scale(replicas={Role.NATS: 1, **replicas} if job.has_own_nats else replicas, attempt=attempt)


def all_manifests(job: Job) -> list[Manifest]:
    scale = scale_of(job)
    manifests = [*network_policies(job), *services(job)]
    for role, replicas in scale.replicas.items():
        manifests.append(disruption_budget(job, role, scale))
        if role.is_server:
            manifests.append(stateful_set(job, role, scale, IMAGES))
        else:
            manifests += [training_pod(job, role, index, scale, IMAGES) for index in range(replicas)]
    return manifests


@pytest.mark.parametrize("name", NAMES)
def test_manifests_are_as_read(name: str) -> None:
    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, _data: Any) -> bool:
            return True

    text = yaml.dump_all(all_manifests(load_job(f"{name}.yml")), Dumper=Dumper, sort_keys=False, width=110)
    golden = HERE / "golden" / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_manifests_are_what_today_s_kubernetes_knows(name: str) -> None:
    """The API server of the tests is an old one; the client library has the fields of a new one."""
    if not hasattr(client.V1Pod, "model_validate"):
        pytest.skip("needs a kubernetes client whose models check what they are made of")
    api = client.ApiClient(client.Configuration())
    for manifest in all_manifests(load_job(f"{name}.yml")):
        model = getattr(client, f"V1{manifest['kind']}").from_dict(manifest)
        assert without_empty(api.sanitize_for_serialization(model)) == without_empty(manifest)


def without_empty(value: Any) -> Any:
    """Models leave empty maps and lists out, or not: they mean nothing."""
    if isinstance(value, dict):
        items = {key: without_empty(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item not in ({}, [], None)}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


def test_published_names_and_labels() -> None:
    job = load_job("full_job.yml")
    manifests = {(m["kind"], m["metadata"]["name"]): m for m in all_manifests(job)}
    published = {
        "StatefulSet": {"full-embedding-ps": "emb-server", "full-embedding-worker": "embedding-worker"},
        "Pod": {
            "full-nn-worker-0": "nn-worker",
            "full-nn-worker-1": "nn-worker",
            "full-dataloader-0": "data-loader",
            "full-dataloader-1": "data-loader",
        },
    }
    for kind, names in published.items():
        for name, container in names.items():
            manifest = manifests[kind, name]
            pod = manifest if kind == "Pod" else manifest["spec"]["template"]
            assert pod["metadata"]["labels"]["persia_job"] == "full"
            assert [c["name"] for c in pod["spec"]["containers"]] == [container]


def container_of(manifest: Manifest) -> dict[str, Any]:
    pod = manifest["spec"]["template"] if manifest["kind"] == "StatefulSet" else manifest
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def environment_of(manifest: Manifest) -> dict[str, Any]:
    variables = container_of(manifest)["env"]
    names = [variable["name"] for variable in variables]
    assert len(names) == len(set(names)), "the API server refuses the same name twice"
    return {variable["name"]: variable.get("value") for variable in variables}


def test_the_more_specific_environment_wins() -> None:
    job = load_job("full_job.yml")
    scale = scale_of(job)
    server = environment_of(stateful_set(job, Role.PARAMETER_SERVER, scale, IMAGES))
    worker = environment_of(stateful_set(job, Role.EMBEDDING_WORKER, scale, IMAGES))
    assert (server["PERSIA_DEADLINE_SEC"], worker["PERSIA_DEADLINE_SEC"]) == ("60", "120")
    assert server["PERSIA_NATS_URL"] == "nats://full-nats:4222"
    published = load_job("published_job.yml")
    pod = training_pod(published, Role.NN_WORKER, 0, scale_of(published), IMAGES)
    assert environment_of(pod)["PERSIA_NATS_URL"] == "nats://persia-nats-service:4222"


def test_jobs_of_equal_names_do_not_meet_on_a_broker() -> None:
    def name(namespace: str, job_name: str) -> Any:
        resource = yaml.safe_load((HERE / "full_job.yml").read_text())
        metadata = {"namespace": namespace, "name": job_name, "uid": "u", "generation": 1}
        job = Job.from_object({**resource, "metadata": metadata})
        return environment_of(training_pod(job, Role.NN_WORKER, 0, scale_of(job), IMAGES))["PERSIA_JOB_NAME"]

    assert name("a-b", "c") != name("a", "b-c")


@pytest.mark.parametrize(
    ("resources", "image"),
    [
        ({}, "persia-cpu:test"),
        ({"limits": {"nvidia.com/gpu": "1"}}, "persia-cuda:test"),
        ({"requests": {"nvidia.com/gpu": 1}}, "persia-cuda:test"),
        ({"limits": None, "requests": {"cpu": "1"}}, "persia-cpu:test"),
    ],
)
def test_roles_with_gpus_get_the_cuda_image(resources: dict[str, Any], image: str) -> None:
    job = load_job("full_job.yml", nnWorker={"replicas": 1, "resources": resources})
    assert container_of(training_pod(job, Role.NN_WORKER, 0, scale_of(job), IMAGES))["image"] == image


def probes_of(manifest: Manifest) -> set[str]:
    probes = (container_of(manifest)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
    return {next(iter(probe)) for probe in probes}


def test_metrics_can_be_turned_off_and_their_port_is_not_the_user_s() -> None:
    variables = [
        {"name": "PERSIA_METRICS_PORT", "value": "1"},
        {"name": "PERSIA_METRICS_GATEWAY_ADDR", "value": "gateway:9091"},
    ]
    for enabled, port, gateway in ((True, "9100", "gateway:9091"), (False, "off", "")):
        job = load_job("full_job.yml", enableMetrics=enabled, env=variables)
        server = stateful_set(job, Role.PARAMETER_SERVER, scale_of(job), IMAGES)
        rank = training_pod(job, Role.NN_WORKER, 0, scale_of(job), IMAGES)
        for manifest in (server, rank):
            environment = environment_of(manifest)
            assert environment["PERSIA_METRICS_PORT"] == port
            assert environment["PERSIA_METRICS_GATEWAY_ADDR"] == gateway
        predictions = load_job("infer_job.yml", enableMetrics=enabled)
        inference = stateful_set(predictions, Role.INFERENCE, scale_of(predictions), IMAGES)
        assert probes_of(server) == probes_of(inference) == {"httpGet" if enabled else "tcpSocket"}
        assert len(container_of(rank)["ports"]) == (8 if enabled else 0)
        annotations = rank["metadata"]["annotations"]
        assert ("prometheus.io/scrape" in annotations) is enabled
        assert "prometheus.io/port" not in annotations  # of eight ranks, all ports


@pytest.mark.parametrize(
    ("value", "seconds"), [("60", 90), ("0.5", 31), ("nonsense", 30), ("inf", 30), (None, 330)]
)
def test_embedding_workers_are_left_the_time_to_serve_their_batches(value: str | None, seconds: int) -> None:
    env = [] if value is None else [{"name": "PERSIA_DEADLINE_SEC", "value": value}]
    job = load_job("full_job.yml", env=env, embeddingWorker={"replicas": 1})
    manifest = stateful_set(job, Role.EMBEDDING_WORKER, scale_of(job), IMAGES)
    assert manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds


def test_the_hash_follows_what_it_is_of() -> None:
    job = load_job("full_job.yml")
    first = stateful_set(job, Role.PARAMETER_SERVER, scale_of(job), IMAGES)
    assert spec_hash(first) == spec_hash(stateful_set(job, Role.PARAMETER_SERVER, scale_of(job), IMAGES))
    more = stateful_set(job, Role.EMBEDDING_WORKER, replace(scale_of(job), replicas=MORE_WORKERS), IMAGES)
    fewer = stateful_set(job, Role.EMBEDDING_WORKER, scale_of(job), IMAGES)
    assert spec_hash(more) != spec_hash(fewer)
    assert spec_hash(more["spec"]["template"]) == spec_hash(fewer["spec"]["template"])  # pods stay
    again = stateful_set(job, Role.PARAMETER_SERVER, scale_of(job, attempt=1), IMAGES)
    assert spec_hash(first) == spec_hash(again)  # rows survive a start of the training
    workers = [stateful_set(job, Role.EMBEDDING_WORKER, scale_of(job, attempt=a), IMAGES) for a in (0, 1)]
    assert spec_hash(workers[0]) != spec_hash(workers[1])  # buffers must not
    louder = load_job("full_job.yml", logLevel="error")
    assert spec_hash(first) != spec_hash(stateful_set(louder, Role.PARAMETER_SERVER, scale_of(job), IMAGES))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"nnWorker": None}, "spec.nnWorker is missing, or spec.inference"),
        ({"inference": {"replicas": 1, "checkpoint": "/c"}}, "a job trains, or answers requests"),
        (
            {"inference": {"replicas": 1, "checkpoint": "/c"}, "nnWorker": None},
            "spec.dataloader is of no use",
        ),
        ({"nnWorker": {}}, "spec.nnWorker.replicas is missing"),
        ({"nnWorker": {"replicas": "2"}}, "spec.nnWorker.replicas is '2': it must be a valid integer"),
        ({"nnWorker": {"replicas": True}}, "spec.nnWorker.replicas is True"),
        ({"nats": "x"}, "spec.nats is 'x': it must be an object"),
        ({"persiaEnv": {}}, "spec.persiaEnv.PERSIA_EMBEDDING_CONFIG is missing"),
    ],
)
def test_objects_of_an_older_schema_are_refused_by_field(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_job("full_job.yml", **spec)
    assert message in str(caught.value)
