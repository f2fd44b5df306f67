"""What the API server refuses of a job: the condition that says so, and the failure after a time limit."""

from __future__ import annotations

from collections.abc import Sequence

from persia_k8s.reconcile import finish
from persia_k8s.reconcile.plan import Situation, parse_time

_CONDITION = "PodsAccepted"
# So long a quota, an account or a class that is missing may take to appear.
_PATIENCE_S = 600.0
_RETRY_S = 5.0


def judge(situation: Situation, refusals: Sequence[str]) -> None:
    """Sets `PodsAccepted`; fails a job that has never run and was refused for too long.

    A job that has run keeps what it has, and the operator keeps looking after it.
    """
    if not refusals:
        situation.set_condition(_CONDITION, True, "Accepted")
        return
    why = "; ".join(refusals[:4])
    if situation.set_condition(_CONDITION, False, "Refused", why):
        situation.event("PodsRefused", why, is_warning=True)
    condition = situation.plan.status.condition(_CONDITION)
    assert condition is not None, "it was set above"
    situation.plan.look_again_s = min(situation.plan.look_again_s, _RETRY_S)
    refused_s = (situation.now - parse_time(condition.since)).total_seconds()
    if refused_s >= _PATIENCE_S and not situation.before.start_time:
        finish.fail(situation, "PodsRefused", why)
