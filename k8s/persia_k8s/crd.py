"""The CustomResourceDefinition of PersiaJob."""

from __future__ import annotations

from typing import Any

import yaml

from persia_k8s.job import JobSpec
from persia_k8s.names import CRD_NAME, GROUP, KIND, MAX_JOB_NAME, PLURAL, VERSION
from persia_k8s.schema import structural_schema
from persia_k8s.status import JobStatus

_HAS_STANDBYS = {"required": ["standbys"], "properties": {"standbys": {"minimum": 1}}}


def object_schema() -> dict[str, Any]:
    """The schema of a whole PersiaJob."""
    spec = structural_schema(JobSpec)
    # Either spelling of the only path that a job cannot do without.
    named = {
        "properties": {"persiaEnv": {"required": ["PERSIA_EMBEDDING_CONFIG"]}},
        "required": ["persiaEnv"],
    }
    # Rules between fields, which pydantic checks in `Job.from_object` only: kubectl apply is to refuse them
    # at once.
    spec["allOf"] = [
        {"anyOf": [named, {"required": ["embeddingConfigPath"]}]},
        {"anyOf": [{"required": ["nnWorker"]}, {"required": ["inference"]}]},
        {"not": {"required": ["nnWorker", "inference"]}},
        {"not": {"required": ["dataloader", "inference"]}},
        {"not": {"required": ["inference"], "properties": {"embeddingParameterServer": _HAS_STANDBYS}}},
    ]
    return {
        "type": "object",
        "description": "A job of persia: training, or inference.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # Names of services, pods and labels are made of it.
            "metadata": {
                "type": "object",
                "properties": {
                    "name": {
                        "type": "string",
                        "maxLength": MAX_JOB_NAME,
                        "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$",
                    }
                },
            },
            "spec": spec,
            "status": structural_schema(JobStatus, of_status=True),
        },
    }


def crd_manifest() -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["pj"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": object_schema()},
                    "subresources": {"status": {}, "scale": _SCALE},
                    "additionalPrinterColumns": _COLUMNS,
                }
            ],
        },
    }


# `kubectl scale` and autoscalers set the servers without a state of their own. Training and inference have
# different ones, and a definition has one path for all jobs.
_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, "priority": priority}


_COLUMNS = [
    _column("Phase", ".status.phase"),
    _column("PS", ".status.roles.embeddingParameterServer.ready", "integer"),
    _column("Workers", ".status.roles.embeddingWorker.ready", "integer"),
    _column("NN", ".status.roles.nnWorker.ready", "integer"),
    _column("Loaders", ".status.roles.dataloader.ready", "integer"),
    _column("Step", ".status.progress.step", "integer"),
    _column("AUC", ".status.progress.auc", "number"),
    _column("Restarts", ".status.restarts", "integer"),
    _column("Age", ".metadata.creationTimestamp", "date"),
    _column("Serving", ".status.roles.inference.ready", "integer", priority=1),
    _column("Samples/s", ".status.progress.samplesPerSecond", "number", priority=1),
    _column("Checkpoint", ".status.progress.lastCheckpoint", priority=1),
]


def crd_yaml() -> str:
    head = "# Written by `persia-k8s-utils gencrd`.\n"
    return head + yaml.dump(crd_manifest(), sort_keys=False, width=110, Dumper=_PlainDumper)


class _PlainDumper(yaml.SafeDumper):
    """Writes schemas that several fields share in full: few readers know YAML's anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
