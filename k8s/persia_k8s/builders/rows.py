"""The pods that carry a job from old parameter servers to new ones, through a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from persia_k8s.builders.manifest import Images, Manifest, metadata, with_hash
from persia_k8s.builders.pod import container, pod_spec
from persia_k8s.job import Job
from persia_k8s.names import Role, object_name

# For so long the training waits after the dump, to be ended by the operator: what it learned later would be
# lost. An operator that is started anew, perhaps on another node, has the time to come back.
HOLD_S = 600
_ARGUMENTS = {"dump": ("--with-dense", f"--hold={HOLD_S}")}


def rows_location(job: Job) -> str:
    """A place of the job's own: a dump to where a script keeps its checkpoints would mix with them."""
    return f"{(job.spec.resize_checkpoint or '').rstrip('/')}/{job.namespace}-{job.name}-resize"


def rows_pod_name(job: Job, verb: str) -> str:
    """`verb`: dump, load or remove."""
    return f"{object_name(job.name, Role.ROWS)}-{verb}"


def rows_pod(job: Job, verb: str, location: str, images: Images) -> Manifest:
    """A pod with image, volumes and credentials of the parameter servers, which write and read the files."""
    spec = replace(job.spec.embedding_parameter_server, resources={})
    command = ["persia-launcher", "checkpoint", verb, location, *_ARGUMENTS.get(verb, ())]
    role_container = container(job, Role.ROWS, spec, images, command)
    return with_hash(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata(job, Role.ROWS, rows_pod_name(job, verb)),
            "spec": pod_spec(job, spec, role_container, restart_policy="Never"),
        }
    )
