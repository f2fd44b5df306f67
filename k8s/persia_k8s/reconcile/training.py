"""Data loaders and NN workers: their start, their failures, and the start anew of all of them."""

from __future__ import annotations

from collections.abc import Iterator

from persia_k8s.builders.pods import training_pod
from persia_k8s.names import Role, pod_name
from persia_k8s.observation import Observation, PodView
from persia_k8s.reconcile import finish, servers
from persia_k8s.reconcile.plan import Situation, parse_time, time_text
from persia_k8s.status import JobStatus, Phase

_LONGEST_PAUSE_S = 300
_BATCHES_NOT_TAKEN = 75  # the exit code of a loader after an error in an NN worker


def has_started(before: JobStatus, observed: Observation) -> bool:
    """True if loaders or NN workers of the current attempt exist, or the job is running."""
    return before.is_training or any(
        pod.role.is_training and pod.attempt == before.attempt for pod in observed.pods
    )


def _names(situation: Situation) -> Iterator[tuple[Role, int, str]]:
    """Role, number and name of all pods that there should be."""
    for role, replicas in situation.scale.replicas.items():
        if role.is_training:
            for index in range(replicas):
                yield role, index, pod_name(situation.job.name, role, index)


def _pods(situation: Situation) -> dict[str, PodView]:
    return {pod.name: pod for pod in situation.observed.pods if pod.role.is_training}


def provide(situation: Situation) -> None:
    existing = _pods(situation)
    # The first start has none; whatever a later one finds, the job itself has left there.
    resume = situation.before.progress.get("lastCheckpoint") if situation.before.attempt else None
    going = {pod.name for pod in situation.plan.delete_pods}
    for role, index, name in _names(situation):
        # One that is being deleted holds the name: the next pass finds it free.
        if name not in existing or name in going:
            pod = training_pod(situation.job, role, index, situation.scale, situation.images, resume)
            situation.plan.create_pods.append(pod)


def all_started(situation: Situation) -> bool:
    """True if each pod runs, or has run."""
    pods = _pods(situation)
    return all(name in pods and pods[name].phase != "Pending" for _, _, name in _names(situation))


def has_succeeded(situation: Situation) -> bool:
    """The NN workers decide: loaders may still be ending."""
    pods = _pods(situation)
    names = [name for role, _, name in _names(situation) if role is Role.NN_WORKER]
    return all(name in pods and pods[name].phase == "Succeeded" for name in names)


def has_failed(situation: Situation) -> bool:
    """Looks for failures and answers them. Returns True when nothing is to be started in this pass."""
    if situation.plan.status.phase.is_final:  # the servers have failed
        return True
    if _resumes_after_lost_rows(situation):
        return True
    lost = _lost_nn_workers(situation)
    failed = [
        pod
        for pod in _pods(situation).values()
        if pod.phase == "Failed" and not pod.is_deleting and not _was_refused(pod)
    ]
    reasons = [*lost, *(f"{pod.name}: {pod.trouble or 'failed'}" for pod in failed)]
    if not reasons:
        return False
    message = "; ".join(reasons[:4])
    spec = situation.job.spec
    # A rank cannot be replaced alone: the others wait for it in a collective, so the whole training starts
    # anew. A loader can.
    has_lost_ranks = bool(lost) or any(pod.role is Role.NN_WORKER for pod in failed)
    num_restarts = situation.before.restarts if has_lost_ranks else situation.before.loader_restarts
    if spec.restart_policy == "Never" or num_restarts >= spec.backoff_limit:
        finish.fail(situation, "TrainingFailed" if has_lost_ranks else "DataLoaderFailed", message)
        return True
    if has_lost_ranks:
        _begin_restart(situation, message)
        return True
    # A loader started again asks the ranks which of its batches they have received.
    situation.update(loader_restarts=situation.before.loader_restarts + len(failed))
    situation.plan.delete_pods += failed
    situation.event("DataLoaderRestarted", f"started again at once: {message}", is_warning=True)
    return False


def _was_refused(pod: PodView) -> bool:
    """Whether a loader has ended as an NN worker has failed, whose own end says why."""
    return pod.role is Role.DATA_LOADER and pod.exit_code == _BATCHES_NOT_TAKEN


def _resumes_after_lost_rows(situation: Situation) -> bool:
    """Restarts a training whose rows are lost, where it has reported a checkpoint to continue from."""
    spec, before = situation.job.spec, situation.before
    checkpoint = before.progress.get("lastCheckpoint")
    may_restart = spec.restart_policy != "Never" and before.restarts < spec.backoff_limit
    has_lost = before.is_training and bool(servers.lost_rows(situation))
    if not (has_lost and may_restart and checkpoint) or has_succeeded(situation):
        return False
    _begin_restart(situation, f"a parameter server has lost its rows; {checkpoint} has them")
    return True


def _lost_nn_workers(situation: Situation) -> list[str]:
    """NN workers of a running job whose pods are gone or going without having succeeded."""
    if not situation.before.is_training:
        return []
    pods = _pods(situation)
    lost = []
    for role, _, name in _names(situation):
        if role is Role.NN_WORKER:
            pod = pods.get(name)
            # DDP cannot take a rank in again, so one lost rank ends the group.
            if pod is None or (pod.is_deleting and not pod.is_finished):
                lost.append(f"{name}: deleted")
    return lost


def _begin_restart(situation: Situation, message: str) -> None:
    """Everything that trains ends; it begins again after a pause that grows."""
    # Doubled: a job that fails at once must not keep the cluster busy with starting it.
    pause_s = min(_LONGEST_PAUSE_S, situation.job.spec.backoff_seconds * 2**situation.before.restarts)
    situation.update(phase=Phase.RESTARTING, restart_time=time_text(situation.after(pause_s)))
    text = f"the training has failed and is started again after {pause_s} s: {message}"
    situation.event("Restarting", text, is_warning=True)
    restart(situation)


def restart(situation: Situation) -> None:
    """Waits until all old pods are gone and the pause is over; then the job is as at its beginning.

    The next pass finds embedding workers of an older attempt, and replaces them.
    """
    plan = situation.plan
    old = list(_pods(situation).values())
    plan.delete_pods += [pod for pod in old if not pod.is_deleting]
    left_s = (parse_time(plan.status.restart_time) - situation.now).total_seconds()
    # A rank of the new group must not meet one of the old group at the same address.
    if old or left_s > 0:
        plan.look_again_s = max(left_s, 0.5)
        return
    situation.update(
        phase=Phase.PENDING, restarts=situation.before.restarts + 1, loader_restarts=0, restart_time=""
    )
    plan.look_again_s = 0.0
