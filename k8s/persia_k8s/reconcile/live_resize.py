"""Resize of the parameter servers while the training continues (ADR 60).

    Starting -> Moving -> Ending

New servers start in a StatefulSet of their own. The coordinator, a pod, has the old ones send them their rows
and hand over (ADR 34). Its exit code decides: the new servers have the rows, or the old ones continue. If it
ends otherwise, another one finds out from the servers, and ends the resize. The phase of the job stays.
"""

from __future__ import annotations

from dataclasses import replace

from persia_k8s.builders.pods import resize_pod, rows_pod_name
from persia_k8s.builders.servers import stateful_set
from persia_k8s.names import Role, object_name
from persia_k8s.reconcile import resize as numbers
from persia_k8s.reconcile.plan import Situation, time_text
from persia_k8s.reconcile.rows_pods import CONDITION, FIELD, delete_rows_pods, enter, provide_pod, report
from persia_k8s.status import Phase, Resize, Stage

_NOT_RESIZED = 3  # the exit code of a coordinator: the old servers continue
_RETRY_S = 5.0


def go_on(situation: Situation) -> None:
    """One pass of a resize under way; begins one where the spec asks for it."""
    stages = {Stage.STARTING: _start, Stage.MOVING: _move, Stage.ENDING: _end}
    if situation.before.is_moving():
        resize = _resize(situation)
        stages[resize.stage](situation, resize)
    elif _is_wanted(situation):
        _begin(situation)


def forget(situation: Situation) -> None:
    """For a job that has ended."""
    if situation.before.is_moving():
        _give_up(situation, "Ended", "the job has ended first")


def _resize(situation: Situation) -> Resize:
    resize = situation.before.resize
    assert resize is not None, "a resize is under way"
    return resize


def _wanted(situation: Situation) -> int:
    return situation.job.roles[Role.PARAMETER_SERVER].replicas


def _is_wanted(situation: Situation) -> bool:
    job, before, replicas = situation.job, situation.before, situation.scale.replicas
    return (
        before.phase is Phase.RUNNING
        and before.resize is None
        and before.failed_resize != job.generation
        and job.spec.resize_checkpoint is None
        and Role.STANDBY not in replicas
        and _wanted(situation) != replicas[Role.PARAMETER_SERVER]
        # Both report in the same condition.
        and not numbers.is_going_on(situation)
        and not situation.others
    )


def _begin(situation: Situation) -> None:
    wanted, has = _wanted(situation), situation.scale.replicas[Role.PARAMETER_SERVER]
    text = f"{FIELD}.replicas: {wanted} instead of {has}, while the training continues"
    situation.event("Resizing", text)
    delete_rows_pods(situation)  # those of an earlier resize hold the names
    generation = situation.before.server_generation + 1
    enter(situation, Resize(stage=Stage.STARTING, replicas=wanted, generation=generation))


def _start(situation: Situation, resize: Resize) -> None:
    if _wanted(situation) != resize.replicas:
        _give_up(situation, "BrokenOff", f"{FIELD}.replicas has changed again")
        return
    name = object_name(situation.job.name, Role.PARAMETER_SERVER, resize.generation)
    if ("StatefulSet", name) not in situation.observed.objects:
        has = situation.scale.replicas[Role.PARAMETER_SERVER]
        _apply_set(situation, resize, sources=has)
    known = situation.plan.status.servers
    # Noted as well: by that, one that is started again later is known to have lost its rows.
    started = [
        pod
        for pod in situation.others
        if pod.phase == "Running" and not pod.trouble and known.get(pod.name) == pod.incarnation
    ]
    coordinator = rows_pod_name(situation.job, "resize")
    is_free = all(pod.name != coordinator for pod in situation.observed.pods)
    if len(started) == resize.replicas and is_free:
        enter(situation, replace(resize, stage=Stage.MOVING))
        return
    troubles = [f"{pod.name}: {pod.trouble}" for pod in situation.others if pod.trouble]
    report(situation, resize, "; ".join([f"{len(started)} new servers have started", *troubles[:3]]))
    situation.plan.look_again_s = min(situation.plan.look_again_s, 2.0)


def _move(situation: Situation, resize: Resize) -> None:
    manifest = resize_pod(situation.job, resize, situation.scale, situation.images)
    pod = provide_pod(situation, "resize", manifest)
    if pod is None:
        if manifest in situation.plan.create_pods:
            situation.update(resize=replace(resize, tries=resize.tries + 1))
    elif pod.phase == "Succeeded":
        # Those that start again begin without rows.
        _apply_set(situation, resize, sources=0)
        situation.update(server_generation=resize.generation)
        enter(situation, replace(resize, stage=Stage.ENDING))
    elif pod.phase == "Failed" and pod.exit_code == _NOT_RESIZED:
        text = f"the old parameter servers continue: {pod.trouble}"
        _give_up(situation, "ResizeFailed", text)
        situation.update(failed_resize=situation.job.generation)
        situation.event("ResizeFailed", text, is_warning=True)
    elif pod.phase == "Failed":
        situation.plan.delete_pods.append(pod)
        enter(situation, replace(resize, retry_time=time_text(situation.after(_RETRY_S))))
        report(situation, resize, f"the coordinator ended, and another one follows: {pod.trouble}")


def _end(situation: Situation, resize: Resize) -> None:
    pods = situation.observed.of_role(Role.PARAMETER_SERVER)
    num_ready = sum(pod.is_ready and not pod.is_deleting for pod in pods)
    if num_ready < resize.replicas:
        report(situation, resize, f"{num_ready} ready")
        situation.plan.look_again_s = min(situation.plan.look_again_s, 2.0)
        return
    situation.update(resize=None)
    situation.set_condition(CONDITION, True, "Ready", f"{FIELD}.replicas: {resize.replicas}")
    situation.event("Resized", f"{resize.replicas} parameter servers have the rows")


def _apply_set(situation: Situation, resize: Resize, sources: int) -> None:
    replicas = {**situation.scale.replicas, Role.PARAMETER_SERVER: resize.replicas}
    scale = replace(situation.scale, replicas=replicas, generation=resize.generation, sources=sources)
    situation.plan.apply.append(stateful_set(situation.job, Role.PARAMETER_SERVER, scale, situation.images))


def _give_up(situation: Situation, reason: str, why: str) -> None:
    """The next pass deletes the new servers."""
    situation.update(resize=None)
    situation.set_condition(CONDITION, False, reason, why)
    situation.plan.look_again_s = 0.5
