"""The end of a job: its result, what is left of it, and when it goes."""

from __future__ import annotations

from persia_k8s.builders.pods import rows_pod_name
from persia_k8s.names import Role
from persia_k8s.reconcile.plan import Situation, parse_time, time_text
from persia_k8s.status import Phase

_LOADER_GRACE_S = 30.0  # for loaders to notice the end, and to end well


def succeed(situation: Situation) -> None:
    """Ends the job as succeeded: all NN workers have ended with 0."""
    situation.set_condition("Complete", True, "Succeeded")
    _end(situation, Phase.SUCCEEDED)
    situation.event("Succeeded", "all NN workers have succeeded")


def fail(situation: Situation, reason: str, message: str) -> None:
    """Ends the job as failed. Nothing is started in this pass any more."""
    situation.set_condition("Failed", True, reason, message)
    _end(situation, Phase.FAILED)
    # The servers may have been planned before the failure was found.
    situation.plan.apply.clear()
    situation.plan.create_pods.clear()
    situation.event("Failed", message, is_warning=True)


def has_run_out(situation: Situation) -> bool:
    """Fails a job that has used up `activeDeadlineSeconds`."""
    limit_s = situation.job.spec.active_deadline_seconds
    if limit_s is None or situation.job.spec.suspend or situation.before.phase is Phase.SUSPENDED:
        return False
    resumed = situation.before.condition("Suspended")
    begin = parse_time(situation.job.created if resumed is None else resumed.since)
    left_s = limit_s - (situation.now - begin).total_seconds()
    situation.plan.due_s = max(left_s, 0.5)
    if left_s <= 0:
        fail(
            situation, "DeadlineExceeded", f"the job has not ended within {limit_s} s (activeDeadlineSeconds)"
        )
    return left_s <= 0


def _end(situation: Situation, phase: Phase) -> None:
    now = time_text(situation.now)
    situation.update(phase=phase, completion_time=now, start_time=situation.before.start_time or now)
    situation.plan.look_again_s = 0.0


def clean_up(situation: Situation, *, is_tidy: bool) -> None:
    """Frees what the job held. Pods that have ended stay, for their logs, until the job is deleted.

    `is_tidy`: nothing else is to be done before it may be deleted.
    """
    plan = situation.plan
    # From the status rather than a timer: the operator may have been restarted since.
    passed_s = (situation.now - parse_time(situation.before.completion_time)).total_seconds()
    has_failed = situation.before.phase is Phase.FAILED
    removal = rows_pod_name(situation.job, "remove")
    active = [
        pod
        for pod in situation.observed.pods
        if (pod.is_lingering or not pod.is_finished)
        and (pod.role.is_training or (pod.role is Role.ROWS and (has_failed or pod.name != removal)))
    ]
    is_over = has_failed or passed_s >= _LOADER_GRACE_S
    if active and is_over:
        plan.delete_pods += [pod for pod in active if not pod.is_deleting]
    # Loaders that are still ending need the servers.
    if is_over or not any(pod.role is Role.DATA_LOADER for pod in active):
        plan.delete_objects += sorted(situation.observed.objects)
    # Pods that end wake the task, too; this is for a watch that has missed one.
    plan.look_again_s = 3600.0 if not active else 2.0
    if is_tidy:
        _delete_after_ttl(situation, passed_s)
    else:
        plan.look_again_s = min(plan.look_again_s, 2.0)


def _delete_after_ttl(situation: Situation, passed_s: float) -> None:
    ttl_s = situation.job.spec.ttl_seconds_after_finished
    if ttl_s is None:
        return
    if passed_s >= ttl_s:
        situation.plan.delete_job = True
    else:
        situation.plan.due_s = ttl_s - passed_s
