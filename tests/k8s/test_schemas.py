"""Manifests against the published schemas of Kubernetes 1.29 and later: the API server of the tests is older.

The Helm chart renders to the base (`test_deploy.py`), so the base stands for both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import yaml

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")
pytest.importorskip("kubernetes_validate", reason="needs the 'test' extra of k8s/")

import kubernetes_validate
from harness import DEPLOY
from kubernetes_validate.utils import all_versions, major_minor
from persia_k8s.builders.pods import rows_pod
from persia_k8s.builders.security import job_secret
from persia_k8s.job import Job
from test_deploy import EXAMPLES
from test_manifests import IMAGES, all_manifests, load_job, scale_of

OLDEST = (1, 29)
VERSIONS = sorted({tuple(map(int, major_minor(version).split("."))) for version in all_versions()})
JOBS = ["published_job", "full_job", "infer_job"]


def installed() -> list[dict[str, Any]]:
    """What `kubectl apply -k k8s/deploy/base` creates."""
    paths = sorted(set(DEPLOY.glob("*.yaml")) - {DEPLOY / "kustomization.yaml"})
    return [each for path in paths for each in yaml.safe_load_all(path.read_text()) if each]


@cache
def jobs() -> dict[str, Job]:
    """The jobs of the tests, and each example."""
    found = {name: load_job(f"{name}.yml") for name in JOBS}
    for path in sorted(EXAMPLES.glob("*.y*ml")):
        for resource in yaml.safe_load_all(path.read_text()):
            if resource["kind"] == "PersiaJob":
                resource["metadata"] |= {"uid": "u" * 36, "generation": 1, "namespace": "default"}
                found[path.name] = Job.from_object(resource)
    return found


def created(job: Job) -> list[dict[str, Any]]:
    """What the operator creates for the job."""
    more = [] if job.is_inference else [rows_pod(job, "dump", "/c", scale_of(job), IMAGES)]
    return [*all_manifests(job), *more, job_secret(job, 0, bytes(32))]


@pytest.mark.parametrize("version", [v for v in VERSIONS if v >= OLDEST], ids=lambda v: f"{v[0]}.{v[1]}")
def test_manifests_follow_the_schemas_of(version: tuple[int, int]) -> None:
    examples = [name for name in jobs() if name not in JOBS]
    assert len(examples) >= 3
    for manifest in [*installed(), *(each for job in jobs().values() for each in created(job))]:
        # Strict: unknown fields are errors.
        kubernetes_validate.validate(manifest, f"{version[0]}.{version[1]}", strict=True)


def test_a_wrong_field_is_found() -> None:
    (statefulset, *_) = [m for m in all_manifests(load_job("full_job.yml")) if m["kind"] == "StatefulSet"]
    statefulset["spec"]["template"]["spec"]["hostNetworks"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNetworks"):
        kubernetes_validate.validate(statefulset, "1.29", strict=True)
