"""The resource at a real API server: what it accepts, fills in and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from click.testing import CliRunner
from harness import DEPLOY, Kube, Namespace, job_manifest
from persia_k8s.cli import cli
from persia_k8s.crd import object_schema

from persia import env

PUBLISHED = Path(__file__).with_name("published_job.yml")


def test_the_published_example_is_accepted_unchanged(namespace: Namespace) -> None:
    job = yaml.safe_load(PUBLISHED.read_text())
    stored = namespace.apply(job)["spec"]

    def contains(whole: object, part: object) -> bool:
        if isinstance(part, dict):
            return isinstance(whole, dict) and all(contains(whole.get(k), v) for k, v in part.items())
        if isinstance(part, list):
            return isinstance(whole, list) and all(map(contains, whole, part)) and len(whole) == len(part)
        return whole == part

    assert contains(stored, job["spec"])  # nothing dropped, nothing changed
    assert stored["logLevel"] == "info"
    assert stored["restartPolicy"] == "Never"
    assert stored["imagePullPolicy"] == "Always"
    assert stored["enableMetrics"] is True
    assert stored["nats"]["maxPayload"] == "64MB"


def test_the_older_spelling_of_paths_is_accepted(namespace: Namespace) -> None:
    job = job_manifest(globalConfigPath="/workspace/g.yml", embeddingConfigPath="/workspace/e.yml")
    del job["spec"]["persiaEnv"]
    assert namespace.apply(job)["spec"]["embeddingConfigPath"] == "/workspace/e.yml"


def test_values_of_other_types_are_kept(namespace: Namespace) -> None:
    volume = {"name": "data", "hostPath": {"path": "/nfs/data/", "type": "Directory"}}
    mount = {"name": "data", "mountPath": "/data/", "read_only": True}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    role = {"replicas": 1, "volumeMounts": [mount], "affinity": affinity}
    spec = namespace.apply(job_manifest(volumes=[volume], nnWorker=role))["spec"]
    assert spec["volumes"] == [volume]
    assert spec["nnWorker"]["volumeMounts"] == [mount]
    assert spec["nnWorker"]["affinity"] == affinity


def test_every_log_level_that_processes_take_is_accepted(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = object_schema()["properties"]["spec"]["properties"]["logLevel"]["enum"]
    assert len(levels) == 6
    for level in levels:
        assert namespace.apply(job_manifest(f"job-{level}", logLevel=level))["spec"]["logLevel"] == level
        monkeypatch.setenv("LOG_LEVEL", level)
        assert env.get_log_level() == level


@pytest.mark.parametrize("role", ["embeddingParameterServer", "embeddingWorker", "nnWorker"])
def test_roles_are_required(namespace: Namespace, role: str) -> None:
    job = job_manifest()
    del job["spec"][role]
    status, answer = namespace.kube.request("POST", namespace.path("persiajobs"), job)
    assert (status, f"spec.{role}" in answer["message"]) == (422, True)


@pytest.mark.parametrize("name", ["a" * 36, "0job", "job.x"])
def test_names_that_make_no_object_names_are_refused(namespace: Namespace, name: str) -> None:
    status, answer = namespace.kube.request("POST", namespace.path("persiajobs"), job_manifest(name))
    assert (status, "metadata.name" in answer["message"]) == (422, True)


def test_the_schema_is_structural_and_served(kube: Kube, definer: Kube) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/persiajobs.persia.com"
    _, definition = definer.get(path)
    conditions = {item["type"]: item["status"] for item in definition["status"]["conditions"]}
    assert conditions["Established"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"
    assert definition["status"]["acceptedNames"]["shortNames"] == ["pj"]


def test_kubectl_get_shows_the_columns(namespace: Namespace) -> None:
    namespace.apply(job_manifest())
    path = f"{namespace.path('persiajobs', 'job')}/status"
    status = {"phase": "Running", "progress": {"step": 7, "auc": 0.875}, "restarts": 1}
    code, answer = namespace.kube.merge(path, {"status": status})
    assert code == 200, answer
    as_table = "application/json;as=Table;v=v1;g=meta.k8s.io"
    _, table = namespace.kube.request("GET", namespace.path("persiajobs"), accept=as_table)
    names = [column["name"] for column in table["columnDefinitions"]]
    row = dict(zip(names, table["rows"][0]["cells"], strict=True))
    assert (row["Name"], row["Phase"], row["Step"], row["AUC"]) == ("job", "Running", 7, 0.875)


def test_the_scale_subresource_is_that_of_spec_replicas(namespace: Namespace) -> None:
    namespace.apply(job_manifest(replicas=1))
    path = f"{namespace.path('persiajobs', 'job')}/scale"
    code, answer = namespace.kube.merge(path, {"spec": {"replicas": 3}})
    assert code == 200, answer
    job = namespace.get("persiajobs", "job")
    assert job is not None
    assert job["spec"]["replicas"] == 3


def test_the_deployed_definition_is_the_generated_one(tmp_path: Path) -> None:
    output = tmp_path / "crd.yaml"
    result = CliRunner().invoke(cli, ["gencrd", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert output.read_text() == (DEPLOY / "crd.yaml").read_text(), (
        "run `persia-k8s-utils gencrd --output k8s/deploy/base/crd.yaml`"
    )
