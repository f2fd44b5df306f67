"""The counts of each role in the status."""

from __future__ import annotations

from persia_k8s.names import Role
from persia_k8s.reconcile.plan import Situation
from persia_k8s.status import RoleStatus

__all__ = ["count_roles"]


def count_roles(situation: Situation) -> None:
    """Writes `status.roles`."""
    situation.update(
        roles={
            role: RoleStatus(
                replicas=replicas, ready=_num_ready(situation, role), restarts=_num_restarts(situation, role)
            )
            for role, replicas in situation.scale.replicas.items()
        }
    )


def _num_ready(situation: Situation, role: Role) -> int:
    pods = [pod for pod in situation.observed.of_role(role) if not pod.is_deleting]
    return sum(pod.phase == "Succeeded" or (pod.is_ready and not pod.is_finished) for pod in pods)


def _num_restarts(situation: Situation, role: Role) -> int:
    status = situation.plan.status
    if role is Role.DATA_LOADER:
        return status.loader_restarts
    if role is Role.NN_WORKER:
        return status.restarts
    return sum(pod.num_restarts for pod in situation.observed.of_role(role))
