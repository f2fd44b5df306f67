"""Pods of the roles that end by themselves: data loaders and NN workers.

Pods rather than Jobs: a Job would start one of its pods anew by itself, but a rank that is alone cannot join
a group that has failed, and only the operator starts all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from persia_k8s.builders.manifest import Images, Manifest, Scale, metadata, with_hash
from persia_k8s.builders.pod import container, metrics_annotations, metrics_ports, pod_spec
from persia_k8s.job import Job
from persia_k8s.names import ATTEMPT_LABEL, Role, object_name, pod_name


def training_pod(
    job: Job, role: Role, index: int, scale: Scale, images: Images, resume: str | None = None
) -> Manifest:
    """Pod `index` of the data loaders or of the NN workers; `resume`: a checkpoint to go on from."""
    name = pod_name(job.name, role, index)
    spec = job.roles[role]
    if role is Role.NN_WORKER and resume:
        resumes = {"name": "PERSIA_RESUME_CHECKPOINT", "value": resume}
        spec = replace(spec, env=[resumes, *spec.env])
    command = ["persia-launcher", *_arguments(job, role, index, scale.replicas[role])]
    num_processes = job.ranks_per_node if role is Role.NN_WORKER else 1
    role_container = container(job, role, spec, images, command, ports=metrics_ports(job, num_processes))
    more: dict[str, Any] = {}
    if role is Role.NN_WORKER:
        # Gives the pod the name by which the other nodes find node 0.
        more = {"hostname": name, "subdomain": object_name(job.name, role)}
    pod_metadata = metadata(job, role, name)
    pod_metadata["labels"][ATTEMPT_LABEL] = str(scale.attempt)
    pod_metadata["annotations"] = metrics_annotations(job, num_processes)
    return with_hash(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": pod_metadata,
            "spec": pod_spec(job, spec, role_container, restart_policy="Never", **more),
        }
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
    if replicas > 1:
        first = pod_name(job.name, role, 0)
        arguments += [
            f"--master-addr={first}.{object_name(job.name, role)}",
            f"--master-port={role.port}",
        ]
    return arguments
