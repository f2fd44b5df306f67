"""Disruption budgets: a node drain waits for the job rather than ending one of its pods."""

from __future__ import annotations

from persia_k8s.builders.manifest import Manifest, Scale, labels, metadata, with_hash
from persia_k8s.job import Job
from persia_k8s.names import Role, object_name

__all__ = ["disruption_budget"]


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
