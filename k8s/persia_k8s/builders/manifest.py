"""What all manifests have: metadata, owner, hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persia_k8s.job import Job
from persia_k8s.names import GROUP, HASH_ANNOTATION, JOB_LABEL, KIND, ROLE_LABEL, VERSION, Role, object_name

Manifest = dict[str, Any]
_API_VERSIONS = {"Pod": "v1", "Service": "v1", "StatefulSet": "apps/v1", "PodDisruptionBudget": "policy/v1"}


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


def make_manifest(
    kind: str, job: Job, role: Role, spec: Manifest, *, name: str | None = None, **more: Any
) -> Manifest:
    """An object of the job, with a hash of itself. `name`: by default the role's; `more`: further metadata.

    The job is its owner: Kubernetes deletes the object with the job.
    """
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {
        "name": name or object_name(job.name, role),
        "namespace": job.namespace,
        "labels": labels(job, role),
        "ownerReferences": [owner],
        **more,
    }
    # Pods of a StatefulSet carry the hash of their template alone: they do not change with their number.
    if kind == "StatefulSet":
        _note_hash(spec["template"])
    return _note_hash({"apiVersion": _API_VERSIONS[kind], "kind": kind, "metadata": metadata, "spec": spec})


def _note_hash(manifest: Manifest) -> Manifest:
    # Of the manifest as built: the API server adds defaults, so that its object cannot be compared with ours.
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    manifest["metadata"].setdefault("annotations", {})[HASH_ANNOTATION] = digest
    return manifest


def spec_hash(manifest: Mapping[str, Any]) -> str | None:
    """The hash noted in a manifest or in an object made of one."""
    annotations: Mapping[str, str] = manifest["metadata"].get("annotations") or {}
    return annotations.get(HASH_ANNOTATION)
