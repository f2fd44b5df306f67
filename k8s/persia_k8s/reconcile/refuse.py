"""What the API server refuses of a job: the condition that says so, and the failure after a time limit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from persia_k8s.observation import Observation
from persia_k8s.reconcile import finish
from persia_k8s.reconcile.plan import Situation, parse_time
from persia_k8s.status import JobStatus, Phase

CONDITION = "PodsAccepted"
_FIRST_RETRY_S, _LAST_RETRY_S = 5.0, 300.0
# A StatefulSet may take so long to create its pods before the API server is asked why it has not.
_CREATION_S = 10.0


def judge(situation: Situation, refusals: Sequence[str]) -> None:
    """Sets `PodsAccepted`; fails a job that does not run and was refused for too long.

    A job that runs keeps its pods, and the operator keeps looking after it.
    """
    if not refusals:
        situation.set_condition(CONDITION, True, "Accepted")
        return
    why = "; ".join(refusals[:4])
    if situation.set_condition(CONDITION, False, "Refused", why):
        situation.event("PodsRefused", why, is_warning=True)
    condition = situation.plan.status.condition(CONDITION)
    assert condition is not None, "it was set above"
    refused_s = (situation.now - parse_time(condition.since)).total_seconds()
    # After as long again as it has been refused so far: the pauses double.
    situation.plan.look_again_s = min(max(refused_s, _FIRST_RETRY_S), _LAST_RETRY_S)
    if situation.plan.status.phase not in (Phase.PENDING, Phase.RESTARTING):
        return
    left_s = situation.job.spec.progress_deadline_seconds - refused_s
    situation.plan.due_s = min(situation.plan.due_s, max(left_s, 0.5))
    if left_s <= 0:
        finish.fail(situation, "PodsRefused", why)


def lacks_pods(before: JobStatus, observed: Observation, now: datetime) -> bool:
    """True if a StatefulSet has not created its pods for a while: only its events tell why."""
    ready = before.condition("ServersReady")
    if before.phase is Phase.RESIZING or ready is None or ready.status:
        return False
    missing = [
        role
        for role, counts in before.roles.items()
        if role.is_server and len(observed.of_role(role)) < counts.replicas
    ]
    return bool(missing) and (now - parse_time(ready.since)).total_seconds() >= _CREATION_S
