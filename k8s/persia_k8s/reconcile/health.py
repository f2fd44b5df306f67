"""Conditions that say how a job is: whole or short of pods, recovering, and with all of its rows or not."""

from __future__ import annotations

from persia_k8s.reconcile import resize
from persia_k8s.reconcile.plan import Situation
from persia_k8s.status import Phase


def report_lost_rows(situation: Situation, servers: str) -> None:
    """A parameter server of a running training was replaced or restarted."""
    checkpoint = situation.before.progress.get("lastCheckpoint")
    known = f"the last checkpoint is {checkpoint}" if checkpoint else "the job has reported no checkpoint"
    text = f"{servers} restarted: its rows begin from their initial values, or its storage tier; {known}"
    situation.set_condition("RowsComplete", False, "ServerRestarted", text)


def report_start(situation: Situation) -> None:
    """The training starts: rows are complete at the first start, and after one that resumes a checkpoint."""
    condition = situation.plan.status.condition("RowsComplete")
    checkpoint = situation.before.progress.get("lastCheckpoint")
    if condition is None:
        situation.set_condition("RowsComplete", True, "Started")
    elif not condition.status and checkpoint:
        text = f"training started again from {checkpoint}"
        situation.set_condition("RowsComplete", True, "Resumed", text)


def report(situation: Situation) -> None:
    """`Recovering` and `Degraded`, from what the pass has found."""
    status = situation.plan.status
    if status.phase.is_final or status.phase is Phase.SUSPENDED:
        _end(situation)
        return
    short = [
        f"{role.field} {counts.ready} of {counts.replicas}"
        for role, counts in status.roles.items()
        # New embedding workers that start are no loss, nor are servers that hand over.
        if counts.ready < counts.replicas and not resize.explains_absence(situation, role)
    ]
    text = "; ".join(short)
    if status.is_training:
        situation.set_condition("Degraded", bool(short), "PodsMissing" if short else "AllReady", text)
    if situation.before.is_training and status.is_training and short:
        situation.set_condition("Recovering", True, "PodsRestart", text)
    elif status.phase is Phase.RESTARTING or (status.phase is Phase.PENDING and status.restarts):
        checkpoint = status.progress.get("lastCheckpoint")
        text = (
            f"training restarts from {checkpoint}" if checkpoint else "training restarts from its beginning"
        )
        situation.set_condition("Recovering", True, "TrainingRestarts", text)
    else:
        situation.set_condition("Recovering", False, "Running" if status.is_training else "Starting")


def _end(situation: Situation) -> None:
    reason = situation.plan.status.phase.value
    for kind in ("ServersReady", "Recovering", "Degraded"):
        if situation.plan.status.condition(kind) is not None:
            situation.set_condition(kind, False, reason, "the job runs no pods")
