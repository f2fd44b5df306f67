"""Services (the broker's address, DNS names of single pods) and disruption budgets of node drains."""

from __future__ import annotations

from typing import Any

from persia_k8s.builders.manifest import Manifest, Scale, labels, metadata, with_hash
from persia_k8s.job import Job
from persia_k8s.names import Role, object_name


def services(job: Job) -> list[Manifest]:
    """All services of a job."""
    is_reached = {Role.PARAMETER_SERVER, Role.EMBEDDING_WORKER, Role.NN_WORKER, Role.INFERENCE}
    roles = [role for role in job.roles if role in is_reached]
    return [_service(job, role) for role in ([Role.NATS, *roles] if job.has_own_nats else roles)]


def _service(job: Job, role: Role) -> Manifest:
    spec: dict[str, Any] = {
        "selector": labels(job, role),
        "ports": [{"name": "rpc", "port": role.port, "targetPort": role.port, "protocol": "TCP"}],
    }
    if role not in (Role.NATS, Role.INFERENCE):
        # Headless, for names of pods. The ranks meet at node 0 before it can be called ready.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return with_hash(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(job, role, object_name(job.name, role)),
            "spec": spec,
        }
    )


def disruption_budget(job: Job, role: Role, scale: Scale) -> Manifest:
    """The budget of a role. A number of pods to keep: single pods have no controller that knows a share."""
    kept = max(0, scale.replicas[role] - (0 if role is Role.NATS else job.roles[role].max_unavailable))
    return with_hash(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(job, role, object_name(job.name, role)),
            "spec": {"minAvailable": kept, "selector": {"matchLabels": labels(job, role)}},
        }
    )
