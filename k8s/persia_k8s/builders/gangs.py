"""Gang scheduling: the pod groups of the scheduler plug-ins (scheduling.x-k8s.io), for a training.

Servers are one gang, data loaders and NN workers another: these start once the servers are ready, so one gang
of both would wait for itself. Servers of predictions are none: each of them is of use alone.
"""

from __future__ import annotations

from persia_k8s.builders.manifest import Manifest, Scale, make_manifest
from persia_k8s.job import Job
from persia_k8s.names import pod_group_name


def pod_groups(job: Job, scale: Scale) -> list[Manifest]:
    """A PodGroup of each gang, of which the scheduler places all pods or none."""
    if job.is_inference:
        return []
    members: dict[str, int] = {}
    for role, replicas in scale.replicas.items():
        name = pod_group_name(job.name, role)
        members[name] = members.get(name, 0) + replicas
    return [
        make_manifest("PodGroup", job, None, {"minMember": number}, name) for name, number in members.items()
    ]
