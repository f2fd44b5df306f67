"""Pods that end by themselves: data loaders, NN workers, and those that move rows to new parameter servers.

Pods rather than Jobs: a Job would restart one of its pods by itself, but a rank that is alone cannot join
a group that has failed, and only the operator starts all of them.
"""

from __future__ import annotations

from typing import Any

from persia_k8s.builders.manifest import (
    Images,
    Manifest,
    Scale,
    labels,
    make_manifest,
    metrics_annotations,
    metrics_ports,
    pod_spec,
)
from persia_k8s.job import Job
from persia_k8s.names import ATTEMPT_LABEL, Role, object_name, pod_name

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
    ports = {"ports": metrics_ports(job, num_processes)}
    return make_manifest(
        "Pod",
        job,
        role,
        pod_spec(job, role, spec, images, command, restart_policy="Never", container=ports, **more),
        name=name,
        labels={**labels(job, role), ATTEMPT_LABEL: str(scale.attempt)},
        annotations=metrics_annotations(job, num_processes),
    )


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
    """`verb`: dump, load or remove."""
    return f"{object_name(job.name, Role.ROWS)}-{verb}"


def rows_pod(job: Job, verb: str, location: str, images: Images) -> Manifest:
    """A pod with image, volumes and credentials of the parameter servers, which write and read the files."""
    # Without its resources: the pod only asks the servers, and a second reservation of their memory may not
    # fit.
    spec = job.spec.embedding_parameter_server.model_copy(update={"resources": {}})
    command = ["persia-launcher", "checkpoint", verb, location, *_ARGUMENTS.get(verb, ())]
    spec_of_pod = pod_spec(job, Role.ROWS, spec, images, command, restart_policy="Never")
    return make_manifest("Pod", job, Role.ROWS, spec_of_pod, name=rows_pod_name(job, verb))
