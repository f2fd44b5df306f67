"""Pods that end by themselves: data loaders, NN workers, and those that move rows to new parameter servers.

Pods rather than Jobs: a Job would restart one of its pods by itself, but a rank that is alone cannot join
a group that has failed, and only the operator starts all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from persia_k8s.builders.manifest import (
    Images,
    Manifest,
    Scale,
    make_pod,
    metrics_annotations,
    metrics_ports,
    pod_template,
)
from persia_k8s.job import Job, RoleSpec
from persia_k8s.names import ATTEMPT_LABEL, Role, object_name, pod_name
from persia_k8s.status import Resize

# For so long the training waits after the dump, to be ended by the operator: what it learned later would be
# lost. An operator that is restarted, perhaps on another node, has the time to come back.
HOLD_S = 600
_ARGUMENTS = {"dump": ("--with-dense", f"--hold={HOLD_S}")}


def training_pod(
    job: Job, role: Role, index: int, scale: Scale, images: Images, resume: str | None = None
) -> Manifest:
    """Pod `index` of the data loaders or of the NN workers; `resume`: a checkpoint to continue from."""
    name = pod_name(job.name, role, index)
    spec = job.roles[role]
    if role is Role.NN_WORKER and resume:
        resumes = {"name": "PERSIA_RESUME_CHECKPOINT", "value": resume}
        spec = spec.model_copy(update={"env": [resumes, *spec.env]})
    command = ["persia-launcher", *_arguments(job, role, index, scale.replicas[role])]
    num_processes = job.ranks_per_node if role is Role.NN_WORKER else 1
    more: dict[str, Any] = {}
    if role is Role.NN_WORKER:
        # Gives the pod the name by which the other nodes find node 0.
        more = {"hostname": name, "subdomain": object_name(job.name, role)}
    template = pod_template(
        job,
        role,
        spec,
        scale,
        images,
        command,
        restart_policy="Never",
        container={"ports": metrics_ports(job, num_processes)},
        more_labels={ATTEMPT_LABEL: str(scale.attempt)},
        annotations=metrics_annotations(job, num_processes),
        **more,
    )
    return make_pod(job, name, template)


def _arguments(job: Job, role: Role, index: int, replicas: int) -> list[str]:
    if role is Role.DATA_LOADER:
        return ["data-loader", f"--replica-index={index}", f"--replica-size={replicas}"]
    arguments = [
        "nn-worker",
        f"--nproc-per-node={job.ranks_per_node}",
        f"--nnodes={replicas}",
        f"--node-rank={index}",
    ]
    # A single node needs no address: its ranks meet on the machine.
    if replicas > 1:
        first = pod_name(job.name, role, 0)
        arguments += [
            f"--master-addr={first}.{object_name(job.name, role)}",
            f"--master-port={role.port}",
        ]
    return arguments


def rows_location(job: Job) -> str:
    """A place of the job's own: a dump to where a script keeps its checkpoints would mix with them."""
    return f"{(job.spec.resize_checkpoint or '').rstrip('/')}/{job.namespace}-{job.name}-resize"


def rows_pod_name(job: Job, verb: str) -> str:
    """`verb`: dump, load, remove or resize."""
    return f"{object_name(job.name, Role.ROWS)}-{verb}"


# Of the parameter servers' container, what a pod that moves their rows needs as well.
_OF_ROWS = ("image", "env", "envFrom", "volumeMounts", "securityContext")


def rows_pod(job: Job, verb: str, location: str, scale: Scale, images: Images) -> Manifest:
    """A pod that writes, reads or removes a checkpoint."""
    arguments = ["checkpoint", verb, location, *_ARGUMENTS.get(verb, ())]
    return _pod_beside_servers(job, verb, arguments, scale, images)


def resize_pod(job: Job, resize: Resize, scale: Scale, images: Images) -> Manifest:
    """The coordinator of a resize without a checkpoint."""
    arguments = [
        "resize",
        f"--parameter-servers={resize.replicas}",
        f"--sources={scale.replicas[Role.PARAMETER_SERVER]}",
        f"--generation={resize.generation}",
    ]
    # Only if a resize has failed in between, so that a pod of an older image understands the usual command.
    if scale.generation != resize.generation - 1:
        arguments.append(f"--from-generation={scale.generation}")
    return _pod_beside_servers(job, "resize", arguments, scale, images)


def _pod_beside_servers(
    job: Job, verb: str, arguments: Sequence[str], scale: Scale, images: Images
) -> Manifest:
    """A pod with image, volumes and credentials of the parameter servers, which write and read the files."""
    server = job.spec.embedding_parameter_server
    # Without its resources: the pod only asks the servers, and a second reservation of their memory may not
    # fit.
    spec = server.model_copy(update={"resources": {}, "pod_template": _rows_template(server)})
    command = ["persia-launcher", *arguments]
    template = pod_template(job, Role.ROWS, spec, scale, images, command, restart_policy="Never")
    return make_pod(job, rows_pod_name(job, verb), template)


def _rows_template(server: RoleSpec) -> Manifest:
    """The servers' `podTemplate` without sidecars, and with the container that moves rows for theirs."""
    pod = server.pod_template.get("spec") or {}
    containers = [
        {"name": Role.ROWS.container, **{key: each[key] for key in _OF_ROWS if key in each}}
        for each in pod.get("containers") or ()
        if each.get("name") == Role.PARAMETER_SERVER.container
    ]
    return {**server.pod_template, "spec": {**pod, "containers": containers}}
