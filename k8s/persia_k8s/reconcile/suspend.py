"""Suspension: all pods end and the job stays. Rows survive in a checkpoint only."""

from __future__ import annotations

from persia_k8s.reconcile.plan import Situation
from persia_k8s.reconcile.servers import GONE
from persia_k8s.status import Phase

_CONDITION = "Suspended"


def suspend(situation: Situation) -> None:
    """Ends everything that the job has."""
    plan = situation.plan
    if situation.before.phase is not Phase.SUSPENDED:
        situation.update(
            phase=Phase.SUSPENDED,
            resize=None,
            restart_time="",
            servers=dict.fromkeys(situation.before.servers, GONE),  # new pods of these names are no restarts
            tls=None,
            standbys=None,
            certificates_until="",  # a resumed job gets new ones, also if a Secret was lost
        )
        situation.event("Suspended", "all pods end; set spec.suspend to false to start the job again")
    situation.set_condition(_CONDITION, True, "Suspended")
    plan.delete_objects += sorted(situation.observed.objects)
    pods = (*situation.observed.pods, *situation.others)
    plan.delete_pods += [pod for pod in pods if not pod.is_deleting]


def resume(situation: Situation) -> None:
    """Starts the job again once all old pods are gone: they have another job secret."""
    if situation.observed.pods or situation.others:
        situation.plan.look_again_s = 0.5
        return
    situation.update(phase=Phase.PENDING, suspensions=situation.before.suspensions + 1, loader_restarts=0)
    situation.update(rebalance=situation.job.spec.embedding_parameter_server.rebalance)  # as at a first start
    situation.set_condition(_CONDITION, False, "Resumed")
    situation.event("Resumed", "the job starts again")
    situation.plan.look_again_s = 0.0
