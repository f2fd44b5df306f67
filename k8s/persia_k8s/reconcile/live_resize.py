"""Resize of the parameter servers while the training continues (ADR 60).

    Starting -> Moving -> Ending

New servers start in a StatefulSet of their own. The coordinator, a pod, has the old ones send them their rows
and hand over (ADR 34). Its exit code decides: the new servers have the rows, or the old ones continue. If it
ends otherwise, another one finds out from the servers what to do. The phase of the job stays.
"""

from __future__ import annotations

from dataclasses import replace

from persia_k8s.builders.pods import resize_pod, rows_pod_name
from persia_k8s.builders.servers import stateful_set
from persia_k8s.names import Role, object_name
from persia_k8s.observation import PodView
from persia_k8s.reconcile import refuse
from persia_k8s.reconcile import resize as numbers
from persia_k8s.reconcile.plan import Situation, parse_time, time_text
from persia_k8s.reconcile.rows_pods import (
    CONDITION,
    FIELD,
    delete_rows_pods,
    enter,
    note_failure,
    provide_pod,
    report,
)
from persia_k8s.status import Phase, Resize, Stage

_NOT_RESIZED = 3  # the exit code of a coordinator: the old servers continue
_USAGE = 2  # of one whose image does not know the command
_HAS_RUN = 2  # Resize.tries from which on rows may have moved; 1: a coordinator is created
_FAILED = "ResizeFailed"
_RETRY_S = 5.0


def go_on(situation: Situation) -> None:
    """One pass of a resize under way; begins one where the spec asks for it."""
    stages = {Stage.STARTING: _start, Stage.MOVING: _move, Stage.ENDING: _end}
    if situation.before.is_moving():
        resize = _resize(situation)
        stages[resize.stage](situation, resize)
    elif _is_wanted(situation):
        _begin(situation)
    elif _wanted(situation) == situation.scale.replicas[Role.PARAMETER_SERVER]:
        situation.update(failed_resize=0)  # reverted: the same wish is a new one


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


def _rebalance(situation: Situation) -> int:
    return situation.job.spec.embedding_parameter_server.rebalance


def _is_wanted(situation: Situation) -> bool:
    job, before, replicas = situation.job, situation.before, situation.scale.replicas
    return (
        before.phase is Phase.RUNNING
        and before.resize is None
        and before.failed_resize != job.wish
        and job.spec.resize_checkpoint is None
        and Role.STANDBY not in replicas
        and (
            _wanted(situation) != replicas[Role.PARAMETER_SERVER] or _rebalance(situation) > before.rebalance
        )
        # Both report in the same condition.
        and not numbers.is_going_on(situation)
        and not situation.others
    )


def _begin(situation: Situation) -> None:
    wanted, has = _wanted(situation), situation.scale.replicas[Role.PARAMETER_SERVER]
    wish = f"rebalance: {_rebalance(situation)}" if wanted == has else f"replicas: {wanted} instead of {has}"
    situation.event("Resizing", f"{FIELD}.{wish}, while the training continues")
    delete_rows_pods(situation)  # those of an earlier resize hold the names
    # Never one that has failed: a server of it may still run where its node cannot be reached.
    generation = max(situation.before.server_generation, situation.before.last_generation) + 1
    resize = Resize(stage=Stage.STARTING, replicas=wanted, wish=situation.job.wish, generation=generation)
    situation.update(rebalance=_rebalance(situation))  # also of one that fails: raised again, it begins again
    _enter(situation, resize, Stage.STARTING)


def _enter(situation: Situation, resize: Resize, stage: Stage) -> None:
    enter(situation, replace(resize, stage=stage, since=time_text(situation.now)))


def _obstacle(situation: Situation, resize: Resize, trouble: str) -> tuple[str, str] | None:
    """Reason and text, if a resize whose rows do not move yet is not wanted any more, or takes too long."""
    if _wanted(situation) != resize.replicas:
        return "BrokenOff", f"{FIELD}.replicas has changed again"
    begun = parse_time(resize.since) if resize.since else situation.now
    left_s = situation.job.spec.progress_deadline_seconds - (situation.now - begun).total_seconds()
    if left_s <= 0:
        return _FAILED, f"{resize.stage.value} takes longer than progressDeadlineSeconds: {trouble}"
    situation.plan.due_s = min(situation.plan.due_s, left_s)
    return None


def _start(situation: Situation, resize: Resize) -> None:
    limit = situation.job.spec.backoff_limit
    started = [pod for pod in situation.others if pod.phase == "Running" and not pod.trouble]
    troubles = [f"{pod.name}: {pod.trouble}" for pod in situation.others if pod.trouble]
    trouble = "; ".join([f"{len(started)} new servers have started", *troubles[:3]])
    obstacle = _obstacle(situation, resize, trouble)
    if any(pod.num_restarts > limit for pod in situation.others):
        obstacle = obstacle or (_FAILED, f"new parameter servers fail: {trouble}")
    if obstacle is not None:
        _give_up(situation, *obstacle)
        return
    name = object_name(situation.job.name, Role.PARAMETER_SERVER, resize.generation)
    if ("StatefulSet", name) not in situation.observed.objects:
        has = situation.scale.replicas[Role.PARAMETER_SERVER]
        _apply_set(situation, resize, sources=has)
    if len(started) == resize.replicas and _coordinator(situation) is None:
        _enter(situation, resize, Stage.MOVING)
        return
    report(situation, resize, trouble)
    situation.plan.look_again_s = min(situation.plan.look_again_s, 2.0)


def _coordinator(situation: Situation) -> PodView | None:
    name = rows_pod_name(situation.job, "resize")
    return next((pod for pod in situation.observed.pods if pod.name == name), None)


def _move(situation: Situation, resize: Resize) -> None:
    if resize.tries < _HAS_RUN:
        advanced = _begin_to_move(situation, resize)
        if advanced is None:
            return
        resize = advanced
        situation.update(resize=resize)
    pod = provide_pod(
        situation, "resize", resize_pod(situation.job, resize, situation.scale, situation.images)
    )
    if pod is None or not pod.is_finished:
        return
    if pod.phase == "Succeeded":
        # Those that start again begin without rows.
        _apply_set(situation, resize, sources=0)
        early = max((pod.num_restarts for pod in situation.others), default=0)
        situation.update(server_generation=resize.generation, early_restarts=early)
        _enter(situation, resize, Stage.ENDING)
    elif pod.exit_code == _NOT_RESIZED or (pod.exit_code == _USAGE and resize.tries == _HAS_RUN):
        _give_up(situation, _FAILED, f"the old parameter servers continue: {pod.trouble}")
    else:
        situation.plan.delete_pods.append(pod)
        retry_time = time_text(situation.after(_RETRY_S))
        enter(situation, replace(resize, tries=resize.tries + 1, retry_time=retry_time))
        report(situation, resize, f"the coordinator ended, and another one follows: {pod.trouble}")


def _begin_to_move(situation: Situation, resize: Resize) -> Resize | None:
    """Until a coordinator has been seen to run: the resize as it continues in this pass, if it does."""
    pod = _coordinator(situation)
    if pod is not None and pod.phase != "Pending":
        return replace(resize, tries=_HAS_RUN)
    trouble = _refusal(situation) if pod is None else f"{pod.name}: {pod.trouble}"
    obstacle = _obstacle(situation, resize, trouble)
    situation.plan.look_again_s = 0.5
    if obstacle is None:
        # Noted before it is created: who finds 0 knows that there was none. One that the API server would
        # refuse is not noted, as nothing could tell later that it has never run.
        if resize.tries:
            return resize
        if pod is None:  # a cancelled one that still ends holds the name, which is no refusal
            situation.update(resize=replace(resize, tries=1))
            situation.plan.trial_pod = resize_pod(situation.job, resize, situation.scale, situation.images)
        return None
    if pod is None and resize.tries:
        return replace(resize, tries=_HAS_RUN)  # it may have run, unseen
    if pod is None:
        _give_up(situation, *obstacle)
        return None
    situation.plan.delete_pods += [] if pod.is_deleting else [pod]
    situation.update(resize=replace(resize, tries=0))  # given up once it is gone and has not run
    return None


def take_refusal(situation: Situation) -> None:
    """The API server would refuse the first coordinator: the resize waits, and can be cancelled."""
    resize = replace(_resize(situation), tries=0)
    situation.update(resize=resize)
    report(situation, resize, f"the coordinator is refused, see condition {refuse.CONDITION}")


def _refusal(situation: Situation) -> str:
    condition = situation.before.condition(refuse.CONDITION)
    return "" if condition is None or condition.status else condition.message


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
    resize = _resize(situation)
    last_generation = max(situation.before.last_generation, resize.generation)
    situation.update(resize=None, last_generation=last_generation)
    situation.set_condition(CONDITION, False, reason, why)
    situation.plan.look_again_s = 0.5
    if reason == _FAILED:
        note_failure(situation, resize)
        situation.event(reason, why, is_warning=True)
