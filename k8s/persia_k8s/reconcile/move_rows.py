"""Resize of the parameter servers: the job goes through a checkpoint, and the training starts again from it.

    Running -> Dumping -> Stopping -> Replacing -> Loading -> Pending

Rank 0 dumps dense part and rows between two batches, and then waits to be ended, so that nothing is learned
after the dump. Nothing is ended that holds the only copy of the rows: where the dump fails, the training goes
on; a load that fails is tried again, as the rows are in the checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from persia_k8s.builders.pods import HOLD_S, rows_location, rows_pod, rows_pod_name
from persia_k8s.names import ROLE_LABEL, Role
from persia_k8s.observation import PodView
from persia_k8s.reconcile import finish, servers, training
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

_NOT_YET = 75  # the exit code of a dump that may succeed later
_RETRY_S = 10.0
# Of the time for which the training waits after a dump: for clocks that differ, and for pods to be ended.
_HOLD_MARGIN_S = 60.0


def is_wanted(situation: Situation) -> bool:
    """True if the spec changes the number of parameter servers of a running job, and it can be done."""
    job, before = situation.job, situation.before
    return (
        before.phase is Phase.RUNNING
        and not job.is_inference
        and job.spec.resize_checkpoint is not None
        and before.failed_resize != job.wish
        and before.resize is None
        and job.roles[Role.PARAMETER_SERVER].replicas != situation.scale.replicas[Role.PARAMETER_SERVER]
    )


def begin(situation: Situation) -> None:
    """Asks for the dump. What an earlier resize has left holds the names."""
    wanted = situation.job.roles[Role.PARAMETER_SERVER].replicas
    has = situation.scale.replicas[Role.PARAMETER_SERVER]
    location = rows_location(situation.job)
    text = (
        f"{FIELD}.replicas: {wanted} instead of {has}; the training is dumped to {location}, stops, and "
        "continues from there"
    )
    situation.event("Resizing", text)
    situation.update(phase=Phase.RESIZING)
    delete_rows_pods(situation)
    enter(situation, Resize(stage=Stage.DUMPING, replicas=wanted, wish=situation.job.wish, location=location))


def go_on(situation: Situation) -> None:
    """One pass of a resize whose training has been ended."""
    stages = {Stage.STOPPING: _stop, Stage.REPLACING: _replace, Stage.LOADING: _load}
    stages[_resize(situation).stage](situation)


def dump(situation: Situation) -> None:
    """One pass of a resize whose training still runs, and continues if the dump fails."""
    resize = _resize(situation)
    # Until the training is stopped the resize can be taken back at no cost.
    if situation.job.roles[Role.PARAMETER_SERVER].replicas != resize.replicas:
        break_off(situation, f"{FIELD}.replicas has changed again", phase=Phase.RUNNING)
        return
    pod = _rows_pod(situation, "dump")
    if pod is None:
        return
    if _is_outdated(situation, pod):
        _dump_again(situation)
    elif pod.phase == "Succeeded":
        enter(situation, replace(resize, stage=Stage.STOPPING, tries=0))
    elif pod.phase == "Failed" and pod.exit_code == _NOT_YET:
        _wait(situation, pod)
    elif pod.phase == "Failed":
        text = f"the training could not be dumped, and continues as it is: {pod.trouble}"
        break_off(situation, text, phase=Phase.RUNNING)
        note_failure(situation, resize)
        situation.event("ResizeFailed", text, is_warning=True)


def break_off(situation: Situation, why: str, *, phase: Phase | None = None) -> None:
    """Gives up the dump under way, if there is one, which has changed nothing. `phase`: the next one."""
    if situation.before.is_dumping:
        situation.update(resize=None, **({} if phase is None else {"phase": phase}))
        situation.set_condition(CONDITION, False, "BrokenOff", why)
        delete_rows_pods(situation)
        # Planned earlier in this pass, before the reason to stop was found.
        situation.plan.create_pods = [
            pod
            for pod in situation.plan.create_pods
            if pod["metadata"]["labels"][ROLE_LABEL] != Role.ROWS.suffix
        ]
        situation.plan.look_again_s = min(situation.plan.look_again_s, 1.0)


def remove_checkpoint(situation: Situation) -> bool:
    """Of a job that has succeeded; one that has failed may need it. Returns whether all is done."""
    before, location = situation.before, situation.before.resize_checkpoint
    if not location or before.phase is not Phase.SUCCEEDED:
        return True
    pods = {pod.name: pod for pod in situation.observed.of_role(Role.ROWS)}
    pod = pods.get(rows_pod_name(situation.job, "remove"))
    if pod is None:
        situation.plan.create_pods.append(
            rows_pod(situation.job, "remove", location, situation.scale, situation.images)
        )
        return False
    if not pod.is_finished:
        return False
    if pod.phase == "Failed":
        text = f"{location} stays behind, it could not be removed: {pod.trouble}"
        situation.event("ResizeCheckpointLeft", text, is_warning=True)
    situation.update(resize_checkpoint="")
    delete_rows_pods(situation)
    return True


def _resize(situation: Situation) -> Resize:
    resize = situation.before.resize
    assert resize is not None, "a job that is Resizing has one"
    return resize


def _stop(situation: Situation) -> None:
    """Pods of an earlier resize go as well: they hold the names. A training that has just ended has ended."""
    if training.has_succeeded(situation):
        situation.update(resize=None)
        situation.set_condition(CONDITION, False, "Ended", "the training has ended first")
        finish.succeed(situation)
        return
    old = [pod for pod in situation.observed.pods if not pod.role.is_server]
    is_untouched = not any(pod.is_deleting for pod in old)
    if is_untouched and any(_is_outdated(situation, pod) for pod in old if pod.role is Role.ROWS):
        _dump_again(situation)
        return
    # The dump's pod last: it tells how old the dump is, should this be interrupted.
    old.sort(key=lambda pod: pod.role is Role.ROWS)
    situation.plan.delete_pods += [pod for pod in old if not pod.is_deleting]
    if not old:
        enter(situation, replace(_resize(situation), stage=Stage.REPLACING))


def _is_outdated(situation: Situation, pod: PodView) -> bool:
    """True if the training that `pod` has dumped may have continued, because it was not ended in time."""
    if pod.phase != "Succeeded" or pod.finished_at is None:
        return False
    age_s = (situation.now - parse_time(pod.finished_at)).total_seconds()
    return age_s > HOLD_S - _HOLD_MARGIN_S


def _dump_again(situation: Situation) -> None:
    text = (
        f"the training was dumped more than {HOLD_S - _HOLD_MARGIN_S:g} s ago and may have continued: it is "
        "dumped again, so that nothing is lost"
    )
    # An operator that was away: the training has waited its time and then continued.
    situation.event("ResizeLate", text)
    delete_rows_pods(situation)
    resize = replace(_resize(situation), stage=Stage.DUMPING)
    enter(situation, resize)
    report(situation, resize, text)


def _wait(situation: Situation, pod: PodView) -> None:
    """The training has not begun, or does something else between two batches."""
    resize = _resize(situation)
    text = f"the training cannot be dumped yet, which is tried again: {pod.trouble}"
    if resize.tries == 0:
        situation.event("ResizeWaits", text)
    delete_rows_pods(situation)
    retry_time = time_text(situation.after(_RETRY_S))
    enter(situation, replace(resize, tries=resize.tries + 1, retry_time=retry_time))
    report(situation, resize, text)


def _replace(situation: Situation) -> None:
    lacking = servers.replace_parameter_servers(situation)
    if lacking:
        report(situation, _resize(situation), lacking)
    else:
        enter(situation, replace(_resize(situation), stage=Stage.LOADING))


def _load(situation: Situation) -> None:
    pod, resize = _rows_pod(situation, "load"), _resize(situation)
    if pod is None:
        return
    if pod.phase == "Succeeded":
        text = f"{FIELD}.replicas: {resize.replicas}"
        situation.set_condition(CONDITION, True, "Ready", text)
        situation.event("Resized", f"{resize.replicas} parameter servers have the rows")
        _start_training(situation)
    elif pod.phase == "Failed":
        text = f"the rows are in {resize.location} and could not be loaded: {pod.trouble}"
        # The rows are safe in the checkpoint, so the job may fail and leave them to its owner.
        if resize.tries >= situation.job.spec.backoff_limit:
            finish.fail(situation, "ResizeFailed", text)
            return
        situation.event("ResizeFailed", f"{text}; it is tried again", is_warning=True)
        situation.plan.delete_pods.append(pod)
        enter(situation, replace(resize, tries=resize.tries + 1))


def _start_training(situation: Situation) -> None:
    """With embedding workers that know the servers: those of another attempt are replaced."""
    before, location = situation.before, _resize(situation).location
    situation.update(
        phase=Phase.PENDING,
        resize=None,
        # A resize is an attempt of its own: pods of the one before are told by their number, and replaced.
        resizes=before.resizes + 1,
        loader_restarts=0,
        resize_checkpoint=location,
        progress={**before.progress, "lastCheckpoint": location},  # what the training continues from
    )
    situation.plan.look_again_s = 0.0


def _rows_pod(situation: Situation, verb: str) -> PodView | None:
    location = _resize(situation).location
    return provide_pod(
        situation, verb, rows_pod(situation.job, verb, location, situation.scale, situation.images)
    )
