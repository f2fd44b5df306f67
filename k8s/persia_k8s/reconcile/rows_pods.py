"""What resizes of the parameter servers share: the pods that move rows, and the condition that reports."""

from __future__ import annotations

from persia_k8s.builders.manifest import Manifest
from persia_k8s.builders.pods import rows_pod_name
from persia_k8s.names import Role
from persia_k8s.observation import PodView
from persia_k8s.reconcile.plan import Situation, parse_time
from persia_k8s.status import Resize

CONDITION = "Resized"
FIELD = Role.PARAMETER_SERVER.field


def enter(situation: Situation, resize: Resize) -> None:
    situation.update(resize=resize)
    report(situation, resize)
    situation.plan.look_again_s = 0.5


def note_failure(situation: Situation, resize: Resize) -> None:
    """What was tried is not tried again; the spec may have been corrected since, and is tried then."""
    wish = resize.wish
    # Of an earlier operator, or the definition of its version: only the number is known.
    if not wish and resize.replicas == situation.job.roles[Role.PARAMETER_SERVER].replicas:
        wish = situation.job.wish
    situation.update(failed_resize=wish)


def report(situation: Situation, resize: Resize, trouble: str = "") -> None:
    """The stage, and what hinders it."""
    text = f"{FIELD}.replicas: {resize.replicas} wanted{trouble and '; '}{trouble}"
    situation.set_condition(CONDITION, False, resize.stage.value, text)


def delete_rows_pods(situation: Situation) -> None:
    pods = situation.observed.of_role(Role.ROWS)
    situation.plan.delete_pods += [pod for pod in pods if not pod.is_deleting]


def provide_pod(situation: Situation, verb: str, manifest: Manifest) -> PodView | None:
    """The pod that moves rows, created where it is missing."""
    resize = situation.before.resize
    assert resize is not None, "a resize is under way"
    name = rows_pod_name(situation.job, verb)
    pods = {pod.name: pod for pod in situation.observed.of_role(Role.ROWS)}
    left_s = 0.0
    if resize.retry_time:
        left_s = (parse_time(resize.retry_time) - situation.now).total_seconds()
    # A pod of an earlier try holds the name until it is gone.
    if name not in pods or pods[name].is_deleting:
        if left_s <= 0 and name not in pods:
            situation.plan.create_pods.append(manifest)
        situation.plan.look_again_s = min(2.0, max(left_s, 0.5))
        return None
    if not pods[name].is_finished:
        report(situation, resize, pods[name].trouble and f"{name}: {pods[name].trouble}")
    return pods[name]
