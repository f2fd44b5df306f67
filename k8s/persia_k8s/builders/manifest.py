"""What all manifests have: metadata, owner, hash. What all pods have: environment, container, security."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persia_k8s.builders.merge import merge
from persia_k8s.job import Job, RoleSpec
from persia_k8s.names import (
    GROUP,
    HASH_ANNOTATION,
    JOB_LABEL,
    KIND,
    METRICS_PORT,
    NATS_PORT,
    POD_GROUP_LABEL,
    POD_GROUPS,
    ROLE_LABEL,
    VERSION,
    Role,
    object_name,
    pod_group_name,
    secret_name,
    tls_name,
)
from persia_k8s.status import JobStatus

Manifest = dict[str, Any]
_API_VERSIONS = {
    "Pod": "v1",
    "Secret": "v1",
    "Service": "v1",
    "StatefulSet": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodGroup": f"{POD_GROUPS}/v1alpha1",
}
_GPU = "nvidia.com/gpu"
_SECRET_FOLDER = "/var/run/persia"
_SECRET_VOLUME = "persia-job-secret"
_TLS_FOLDER = "/var/run/persia-tls"
_TLS_VOLUME = "persia-tls"
SECRET_FILE = "secret"  # also the key of the whole secret
# Keys of the credentials of roles that only call others. All others check callers of several roles.
SECRET_KEYS = {Role.DATA_LOADER: "loader", Role.ROWS: "admin"}
# What the Pod Security Standard "restricted" asks for, and a group that may read the job's secret.
_POD_SECURITY = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
    "fsGroup": 1000,
    "fsGroupChangePolicy": "OnRootMismatch",  # or each start would change the owner of all files of a volume
}


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images of roles that name none."""

    cpu: str
    cuda: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Number of pods of each role, and the number of this start of the training, from 0.

    `suspensions`: counts the job secrets: pods of different secrets cannot talk to each other. `tls`: the
    pods have certificates, all of them or none. `generation`: of the parameter servers; `sources`: from how
    many older ones they gather their rows first, 0 for servers that begin without.
    """

    replicas: Mapping[Role, int]
    attempt: int = 0
    suspensions: int = 0
    tls: bool = False
    generation: int = 0
    sources: int = 0


def uses_tls(job: Job, status: JobStatus) -> bool:
    """Whether the pods have certificates: all pods of one start alike, whatever the spec says later."""
    return job.spec.security.tls if status.tls is None else status.tls


def labels(job: Job, role: Role | None) -> dict[str, str]:
    """Labels by which services, budgets and the operator find the pods of a role, or of the whole job."""
    return {JOB_LABEL: job.name, **({} if role is None else {ROLE_LABEL: role.suffix})}


def label_selector(job: Job, role: Role) -> str:
    """The labels as a selector for requests and the scale subresource."""
    return ",".join(f"{name}={value}" for name, value in labels(job, role).items())


def make_manifest(kind: str, job: Job, role: Role | None, spec: Manifest, name: str) -> Manifest:
    """An object of a role, or of the whole job, with a hash of itself.

    The job is its owner: Kubernetes deletes the object with the job.
    """
    # Pods of a StatefulSet carry the hash of their template alone: they do not change with their number.
    if kind == "StatefulSet":
        _note_hash(spec["template"])
    metadata = object_metadata(job, name, labels(job, role))
    return _note_hash({"apiVersion": _API_VERSIONS[kind], "kind": kind, "metadata": metadata, "spec": spec})


def make_pod(job: Job, name: str, template: Manifest) -> Manifest:
    """A single pod of a template."""
    metadata = {**template["metadata"], **object_metadata(job, name, template["metadata"]["labels"])}
    pod = {"apiVersion": _API_VERSIONS["Pod"], "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    return _note_hash(pod)


def object_metadata(job: Job, name: str, its_labels: Mapping[str, str]) -> Manifest:
    """Metadata of an object that the job owns."""
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        # Garbage collection goes by this owner, and so does the operator: labels can be copied by anybody.
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"name": name, "namespace": job.namespace, "labels": dict(its_labels), "ownerReferences": [owner]}


def _note_hash(manifest: Manifest) -> Manifest:
    # Of the manifest as built: the API server adds defaults, so that its object cannot be compared with ours.
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    manifest["metadata"].setdefault("annotations", {})[HASH_ANNOTATION] = digest
    return manifest


def spec_hash(manifest: Mapping[str, Any]) -> str | None:
    """The hash noted in a manifest or in an object made of one."""
    annotations: Mapping[str, str] = manifest["metadata"].get("annotations") or {}
    return annotations.get(HASH_ANNOTATION)


def pod_template(
    job: Job,
    role: Role,
    spec: RoleSpec,
    scale: Scale,
    images: Images,
    command: Sequence[str],
    *,
    restart_policy: str,
    container: Mapping[str, Any] | None = None,
    more_labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **more: Any,
) -> Manifest:
    """The pods of a role: what the operator needs, merged with the user's `podTemplate`.

    `container`, `more`: further fields of the role's container, of the pod.
    """
    # The label of the pod's group. Also where no group is: the plug-in may be installed later.
    is_gang = not job.is_inference and role is not Role.ROWS
    gang = {POD_GROUP_LABEL: pod_group_name(job.name, role)} if is_gang else {}
    base_labels = {**labels(job, role), **gang, **(more_labels or {})}
    mounted = {mount["name"] for mount in spec.volume_mounts}
    volumes = [dict(volume) for volume in job.spec.volumes if volume["name"] in mounted]
    base = {
        "metadata": {"labels": base_labels, "annotations": dict(annotations or {})},
        "spec": {
            # No process of a job talks to the API server.
            "automountServiceAccountToken": False,
            # One variable for every service of the namespace is of no use, and PERSIA_... must be ours.
            "enableServiceLinks": False,
            "securityContext": dict(_POD_SECURITY),
            "restartPolicy": restart_policy,
            "volumes": [*volumes, *_secret_volumes(job, role, scale)],
            "nodeSelector": dict(spec.node_selector),
            "tolerations": [dict(toleration) for toleration in spec.tolerations],
            "affinity": dict(spec.affinity),
            "containers": [_role_container(job, role, spec, scale, images, command, container or {})],
            **more,
        },
    }
    return merge(base, spec.pod_template)


def _role_container(
    job: Job,
    role: Role,
    spec: RoleSpec,
    scale: Scale,
    images: Images,
    command: Sequence[str],
    more: Mapping[str, Any],
) -> Manifest:
    needs_gpu = any(_GPU in (spec.resources.get(kind) or {}) for kind in ("limits", "requests"))
    secrets = {_SECRET_VOLUME: _SECRET_FOLDER, **({_TLS_VOLUME: _TLS_FOLDER} if scale.tls else {})}
    mounts = [
        *(_volume_mount(mount) for mount in spec.volume_mounts),
        *({"name": name, "mountPath": folder, "readOnly": True} for name, folder in secrets.items()),
    ]
    return {
        "name": role.container,
        "image": spec.image or (images.cuda if needs_gpu else images.cpu),
        "imagePullPolicy": job.spec.image_pull_policy,
        "command": list(command),
        "env": _environment(job, spec, scale),
        "resources": dict(spec.resources),
        "volumeMounts": mounts,
        # A container that fails without a message of its own ends with the last lines of its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **more,
    }


def _secret_volumes(job: Job, role: Role, scale: Scale) -> list[Manifest]:
    name = secret_name(job.name, job.uid, scale.suspensions)
    items = [{"key": SECRET_KEYS.get(role, SECRET_FILE), "path": SECRET_FILE}]
    # Not for others: persia refuses a secret that any user of the container can read.
    secrets: Manifest = {_SECRET_VOLUME: {"secretName": name, "defaultMode": 0o440, "items": items}}
    if scale.tls:
        # All of its keys and no subPath: the kubelet then replaces the files of a running pod.
        name = tls_name(job.name, job.uid, role.suffix)
        secrets[_TLS_VOLUME] = {"secretName": name, "defaultMode": 0o440}
    return [{"name": volume, "secret": secret} for volume, secret in secrets.items()]


def metrics_ports(job: Job, num_processes: int = 1) -> list[dict[str, Any]]:
    """The ports of the processes of a pod, for its container; none where metrics are off."""
    if not job.spec.enable_metrics:
        return []
    names = ["metrics", *(f"metrics-{rank}" for rank in range(1, num_processes))]
    return [{"name": name, "containerPort": METRICS_PORT + rank} for rank, name in enumerate(names)]


def metrics_annotations(job: Job, num_processes: int = 1) -> dict[str, str]:
    """Annotations by which a Prometheus that discovers pods finds them.

    One that is told no port takes all ports of the container, which those of several ranks all are.
    """
    if not job.spec.enable_metrics:
        return {}
    port = {"prometheus.io/port": str(METRICS_PORT)} if num_processes == 1 else {}
    return {"prometheus.io/scrape": "true", "prometheus.io/path": "/metrics", **port}


def _environment(job: Job, spec: RoleSpec, scale: Scale) -> list[dict[str, Any]]:
    """Ours, then the job's, then the role's, then what probes and `enableMetrics` rely on.

    Of equal names the last wins, as only it is kept.
    """
    own_nats = f"nats://{object_name(job.name, Role.NATS)}:{NATS_PORT}" if job.has_own_nats else None
    if job.spec.enable_metrics:
        metrics = [_value("PERSIA_METRICS_PORT", str(METRICS_PORT))]
    else:
        metrics = [_value("PERSIA_METRICS_PORT", "off"), _value("PERSIA_METRICS_GATEWAY_ADDR", "")]
    variables = [
        _downward("POD_NAME", "metadata.name"),
        _downward("POD_IP", "status.podIP"),
        # Both parts without '_': two jobs of one broker never have the same name.
        _value("PERSIA_JOB_NAME", f"{job.namespace}_{job.name}"),
        _value("PERSIA_NATS_URL", job.spec.nats.url or own_nats),
        _value("PERSIA_BIND_HOST", "$(POD_IP)"),
        _value("PERSIA_JOB_SECRET_FILE", f"{_SECRET_FOLDER}/{SECRET_FILE}"),
        _value("PERSIA_TLS_DIR", _TLS_FOLDER if scale.tls else None),
        _value("PERSIA_EMBEDDING_CONFIG", job.embedding_config),
        _value("PERSIA_GLOBAL_CONFIG", job.global_config),
        _value("PERSIA_NN_WORKER_ENTRY", job.spec.persia_env.nn_worker_entry),
        _value("PERSIA_DATALOADER_ENTRY", job.spec.persia_env.dataloader_entry),
        _value("LOG_LEVEL", job.spec.log_level),
        _value("PYTHONUNBUFFERED", "1"),
        *(dict(variable) for variable in job.spec.env),
        *(dict(variable) for variable in spec.env),
        *metrics,
    ]
    # Server-side apply refuses equal names in a list that it merges by name.
    last = {variable["name"]: index for index, variable in enumerate(variables)}
    return [
        variable
        for index, variable in enumerate(variables)
        if last[variable["name"]] == index and ("valueFrom" in variable or variable.get("value") is not None)
    ]


def _value(name: str, value: str | None) -> dict[str, Any]:
    return {"name": name, "value": value}


def _downward(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _volume_mount(mount: Mapping[str, Any]) -> dict[str, Any]:
    """The published documentation spells `read_only`, which Kubernetes would drop: a mount to write to."""
    translated = {key: value for key, value in mount.items() if key != "read_only"}
    if "read_only" in mount:
        translated.setdefault("readOnly", mount["read_only"])
    return translated
