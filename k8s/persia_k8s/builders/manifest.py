"""Parts of all manifests: metadata, owner, hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persia_k8s.job import Job
from persia_k8s.names import GROUP, HASH_ANNOTATION, JOB_LABEL, KIND, ROLE_LABEL, VERSION, Role

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images of roles that name none."""

    cpu: str
    cuda: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Number of pods of each role, and the number of this start of the training, from 0."""

    replicas: Mapping[Role, int]
    attempt: int = 0


def labels(job: Job, role: Role) -> dict[str, str]:
    """Labels by which services, budgets and the operator find the pods of a role."""
    return {JOB_LABEL: job.name, ROLE_LABEL: role.suffix}


def label_selector(job: Job, role: Role) -> str:
    """The labels as a selector for requests and the scale subresource."""
    return ",".join(f"{name}={value}" for name, value in labels(job, role).items())


def metadata(job: Job, role: Role, name: str) -> dict[str, Any]:
    """Metadata with the job as owner: Kubernetes deletes the object with the job."""
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": labels(job, role),
        "ownerReferences": [owner],
    }


def with_hash(manifest: Manifest) -> Manifest:
    """Notes the hash of the manifest in its annotations.

    Pods of a StatefulSet carry that of their template alone: they do not change with their number.
    """
    if manifest["kind"] == "StatefulSet":
        _note_hash(manifest["spec"]["template"])
    return _note_hash(manifest)


def _note_hash(manifest: Manifest) -> Manifest:
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    manifest["metadata"].setdefault("annotations", {})[HASH_ANNOTATION] = digest
    return manifest


def spec_hash(manifest: Mapping[str, Any]) -> str | None:
    """The hash noted in a manifest or in an object made of one."""
    annotations: Mapping[str, str] = manifest["metadata"].get("annotations") or {}
    return annotations.get(HASH_ANNOTATION)
