"""Number of pods of each role: the spec's numbers, as far as they can be applied now."""

from __future__ import annotations

from dataclasses import replace

from persia_k8s.builders.manifest import Scale
from persia_k8s.job import Job
from persia_k8s.names import Role, pod_name
from persia_k8s.observation import Observation
from persia_k8s.reconcile.plan import Situation
from persia_k8s.status import JobStatus, Phase, Stage

_WITH_NEW_SERVERS = (Stage.REPLACING, Stage.LOADING, Stage.ENDING)
_CONDITION, _REASON = "Resized", "Resizing"


def accepted_replicas(
    job: Job, before: JobStatus, observed: Observation, *, has_training: bool
) -> dict[Role, int]:
    """The number of pods of each role.

    Loaders and ranks count each other when they start, and rows stay where they were put. Embedding workers
    come and go while the training runs.
    """
    wanted = job.replicas
    if job.has_own_nats:
        wanted = {Role.NATS: 1, **wanted}
    fixed: set[Role] = set()
    is_still = before.phase in (Phase.RESTARTING, Phase.RESIZING) or before.phase.is_final
    if has_training or is_still:
        fixed = set(wanted)
    # Before a new attempt the servers still hold the rows of the last one, but after a suspension.
    elif before.attempt > 0 and before.phase is not Phase.SUSPENDED:
        fixed = {Role.PARAMETER_SERVER}
    accepted = {
        role: before.roles[role].replicas if role in fixed and role in before.roles else replicas
        for role, replicas in wanted.items()
    }
    # The servers are already being replaced: the spec may have changed since, which waits for the next
    # resize.
    if before.resize is not None and before.resize.stage in _WITH_NEW_SERVERS:
        accepted[Role.PARAMETER_SERVER] = before.resize.replicas
    if Role.STANDBY in accepted:
        accepted[Role.STANDBY] = accepted[Role.PARAMETER_SERVER]
    if has_training and not is_still:
        accepted |= {role: wanted[role] for role in wanted if role is Role.INFERENCE}
        role = Role.EMBEDDING_WORKER
        accepted[role] = _next_num_workers(job, observed, accepted[role], wanted[role])
    return accepted


def _next_num_workers(job: Job, observed: Observation, has: int, wanted: int) -> int:
    """More at once; fewer one by one, from the highest number: others take a lower one that is missing for
    one that will be back. A StatefulSet whose pods are managed in parallel would end them together."""
    if wanted >= has:
        return wanted
    names = {pod_name(job.name, Role.EMBEDDING_WORKER, index) for index in range(has)}
    is_draining = any(pod.name not in names for pod in observed.of_role(Role.EMBEDDING_WORKER))
    return has if is_draining else has - 1


def report(situation: Situation) -> None:
    """Says in the condition `Resized` how far a change of the number of embedding workers is."""
    role = Role.EMBEDDING_WORKER
    wanted, known = situation.job.replicas[role], situation.before.roles.get(role)
    is_new = known is not None and known.replicas != wanted
    if not is_new and not is_going_on(situation):
        return
    pods = situation.observed.of_role(role)
    num_draining = sum(pod.is_deleting for pod in pods)
    num_ready = sum(pod.is_ready and not pod.is_deleting for pod in pods)
    if not is_new and (len(pods), num_ready) == (wanted, wanted):
        situation.set_condition(_CONDITION, True, "Ready", f"{role.field}.replicas: {wanted}")
        situation.event("Resized", f"{wanted} embedding workers are ready")
        return
    text = f"{role.field}.replicas: {wanted} wanted, {num_ready} ready, {num_draining} draining"
    situation.set_condition(_CONDITION, False, _REASON, text)
    if is_new and not is_going_on(situation, before=True):
        situation.event("Resizing", f"{role.field}.replicas: {wanted}, while the job runs")
    situation.plan.look_again_s = min(situation.plan.look_again_s, 2.0)


def counted(situation: Situation) -> Scale:
    """The pods that budgets count: in a resize without a checkpoint, old and new servers."""
    scale, resize = situation.scale, situation.before.resize
    if resize is None or not situation.before.is_moving(Stage.STARTING, Stage.MOVING):
        return scale
    role = Role.PARAMETER_SERVER
    return replace(scale, replicas={**scale.replicas, role: scale.replicas[role] + resize.replicas})


def explains_absence(situation: Situation, role: Role) -> bool:
    """True if servers of this role may be missing because of a resize."""
    if role is Role.PARAMETER_SERVER and situation.before.is_moving(Stage.MOVING, Stage.ENDING):
        return True
    return is_going_on(situation)


def is_going_on(situation: Situation, *, before: bool = False) -> bool:
    """True while embedding workers are added or removed; `before`: as of the last pass."""
    status = situation.before if before else situation.plan.status
    condition = status.condition(_CONDITION)
    return condition is not None and condition.reason == _REASON
