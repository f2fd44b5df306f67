"""Decisions of the operator while a job's number of servers changes, its rows with it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from passes import NOW, RUNNING, everything, make_job, one_pass, pod
from persia_k8s.builders.pods import HOLD_S
from persia_k8s.job import Job
from persia_k8s.names import Role, pod_name
from persia_k8s.observation import Observation, PodView
from persia_k8s.reconcile import Plan, time_text
from persia_k8s.status import JobStatus, Phase, Resize, RoleStatus, Stage


def workers(job: Job, *indices: int, draining: int | None = None) -> Observation:
    """A job that runs with these embedding workers."""
    observed = everything(job)
    (one,) = observed.of_role(Role.EMBEDDING_WORKER)
    others = tuple(p for p in observed.pods if p is not one)
    name = partial(pod_name, "job", Role.EMBEDDING_WORKER)
    views = tuple(replace(one, name=name(i), uid=f"w{i}", is_deleting=i == draining) for i in indices)
    return replace(observed, pods=(*others, *views))


def num_workers(plan: Plan) -> int:
    return plan.status.roles[Role.EMBEDDING_WORKER].replicas


def running_with(num_embedding_workers: int) -> JobStatus:
    role = Role.EMBEDDING_WORKER
    return replace(RUNNING, roles={**RUNNING.roles, role: RoleStatus(replicas=num_embedding_workers)})


def test_embedding_workers_go_one_by_one_from_the_highest_number() -> None:
    job = make_job(embeddingWorker={"replicas": 1})
    first = one_pass(job, running_with(3), workers(job, 0, 1, 2))
    assert num_workers(first) == 2
    draining = one_pass(job, first.status, workers(job, 0, 1, 2, draining=2))
    assert num_workers(draining) == 2  # not two at once
    second = one_pass(job, draining.status, workers(job, 0, 1))
    assert num_workers(second) == 1
    condition = second.status.condition("Resized")
    assert condition is not None
    assert (condition.status, condition.reason) == (False, "Resizing")
    done = one_pass(job, second.status, workers(job, 0))
    condition = done.status.condition("Resized")
    assert condition is not None
    assert condition.status
    plans = (first, draining, second, done)
    assert [event.reason for plan in plans for event in plan.events] == ["Resizing", "Resized"]
    assert all(plan.delete_pods == [] for plan in plans)  # the StatefulSet ends them


def test_new_embedding_workers_are_no_trouble_and_change_no_others() -> None:
    job = make_job(embeddingWorker={"replicas": 3})
    plan = one_pass(job, RUNNING, workers(make_job(), 0))
    (manifest,) = (m for m in plan.apply if m["kind"] == "StatefulSet")
    assert manifest["spec"]["replicas"] == 3
    assert plan.delete_pods == []
    assert [event.reason for event in plan.events] == ["Resizing"]
    done = one_pass(job, plan.status, workers(job, 0, 1, 2))
    assert [event.reason for event in done.events] == ["Resized"]
    assert one_pass(job, done.status, workers(job, 0, 1, 2)).events == []


def test_a_worker_that_comes_back_after_a_resize_was_not_started_anew() -> None:
    with_two, with_one = make_job(embeddingWorker={"replicas": 2}), make_job()
    status = one_pass(with_two, running_with(2), workers(with_two, 0, 1)).status
    status = one_pass(with_one, status, workers(with_one, 0, 1)).status
    status = one_pass(with_one, status, workers(with_one, 0)).status
    assert num_workers(one_pass(with_one, status, workers(with_one, 0))) == 1
    observed = workers(with_two, 0, 1)
    new = tuple(replace(p, uid="new") if p.uid == "w1" else p for p in observed.pods)
    plan = one_pass(with_two, status, replace(observed, pods=new))
    assert [event.reason for event in plan.events] == ["Resizing"]


PLACE = "/rows/n-job-resize"


def resizing(stage: Stage, **spec: Any) -> tuple[Job, JobStatus]:
    """A job that goes from one parameter server to two."""
    job = make_job(embeddingParameterServer={"replicas": 2}, resizeCheckpoint="/rows", **spec)
    return job, replace(RUNNING, phase=Phase.RESIZING, resize=Resize(stage=stage, replicas=2, location=PLACE))


def with_rows_pod(observed: Observation, verb: str, phase: str, exit_code: int = 1) -> Observation:
    """While it is dumped, the training runs."""
    others = tuple(p for p in observed.pods if verb == "dump" or p.role.is_server)
    trouble = {"Failed": "full", "Pending": "no node"}.get(phase, "")
    code = exit_code if phase == "Failed" else None
    view = pod(Role.ROWS, name=f"job-rows-{verb}", phase=phase, trouble=trouble, exit_code=code)
    return replace(observed, pods=(*others, view))


def only_servers(observed: Observation) -> Observation:
    return replace(observed, pods=tuple(p for p in observed.pods if p.role.is_server))


def test_old_servers_and_the_training_stay_until_the_dump_is_complete() -> None:
    job, _ = resizing(Stage.DUMPING)
    old = everything(make_job())
    plan = one_pass(job, RUNNING, old)
    assert (plan.status.phase, plan.delete_pods) == (Phase.RESIZING, [])
    begun = Resize(stage=Stage.DUMPING, replicas=2, location=PLACE, wish=job.wish)
    assert plan.status.resize == begun
    plan = one_pass(job, plan.status, old)
    assert [m["metadata"]["name"] for m in plan.create_pods] == ["job-rows-dump"]
    for phase, trouble in (("Pending", "; job-rows-dump: no node"), ("Running", "")):
        plan = one_pass(job, plan.status, with_rows_pod(old, "dump", phase))
        assert (plan.delete_pods, plan.create_pods, plan.events) == ([], [], [])
        condition = plan.status.condition("Resized")
        assert condition is not None
        assert condition.message == f"embeddingParameterServer.replicas: 2 wanted{trouble}"
    plan = one_pass(job, plan.status, with_rows_pod(old, "dump", "Succeeded"))
    assert plan.status.resize == replace(begun, stage=Stage.STOPPING)
    plan = one_pass(job, plan.status, with_rows_pod(old, "dump", "Succeeded"))
    assert {p.role for p in plan.delete_pods} == {Role.NN_WORKER, Role.DATA_LOADER, Role.ROWS}
    plan = one_pass(job, plan.status, only_servers(old))
    assert plan.status.resize == replace(begun, stage=Stage.REPLACING)
    plan = one_pass(job, plan.status, only_servers(old))
    assert [p.role for p in plan.delete_pods] == [Role.PARAMETER_SERVER]
    condition = plan.status.condition("Resized")
    assert condition is not None
    assert "embeddingParameterServer 0 of 2" in condition.message


@pytest.mark.parametrize("stage", [Stage.DUMPING, Stage.STOPPING])
def test_a_training_that_ends_while_it_is_to_be_stopped_has_succeeded(stage: Stage) -> None:
    job, before = resizing(stage)
    ended = everything(make_job(), NN_WORKER={"phase": "Succeeded", "is_deleting": stage is Stage.STOPPING})
    plan = one_pass(job, before, ended)
    assert (plan.status.phase, plan.status.resize) == (Phase.SUCCEEDED, None)


def test_a_dump_that_fails_leaves_the_training_alone_and_is_not_tried_for_ever() -> None:
    job, before = resizing(Stage.DUMPING)
    old = everything(make_job())
    plan = one_pass(job, before, with_rows_pod(old, "dump", "Failed"))
    assert (plan.status.phase, plan.status.roles[Role.PARAMETER_SERVER].replicas) == (Phase.RUNNING, 1)
    assert (plan.status.attempt, [p.role for p in plan.delete_pods]) == (0, [Role.ROWS])
    assert "continues as it is: full" in plan.events[-1].message
    again = plan.status
    plan = one_pass(job, again, old)
    assert plan.status.phase is Phase.RUNNING
    condition = plan.status.condition("SpecApplied")
    assert condition is not None
    assert condition.reason == "ResizeRefused"
    scaled, _ = resizing(Stage.DUMPING, replicas=2)  # as an autoscaler does
    assert one_pass(replace(scaled, generation=2), again, old).status.phase is Phase.RUNNING
    changed, _ = resizing(Stage.DUMPING, volumes=[{"name": "larger"}])
    assert one_pass(changed, again, old).status.phase is Phase.RESIZING


def test_a_place_that_is_corrected_while_a_dump_fails_is_tried() -> None:
    wrong, before = resizing(Stage.DUMPING)
    right = make_job(embeddingParameterServer={"replicas": 2}, resizeCheckpoint="/other")
    before = replace(before, resize=replace(before.resize, wish=wrong.wish))  # type: ignore[type-var]
    plan = one_pass(right, before, with_rows_pod(everything(make_job()), "dump", "Failed"))
    assert plan.status.phase is Phase.RUNNING
    plan = one_pass(right, plan.status, everything(make_job()))
    assert (plan.status.phase, plan.status.resize.location) == (Phase.RESIZING, "/other/n-job-resize")  # type: ignore[union-attr]


def with_dump_of(observed: Observation, age_s: float) -> Observation:
    """A dump that was complete `age_s` seconds ago."""
    finished_at = time_text(NOW - timedelta(seconds=age_s))
    ended = with_rows_pod(observed, "dump", "Succeeded")
    pods = (replace(p, finished_at=finished_at) if p.role is Role.ROWS else p for p in ended.pods)
    return replace(ended, pods=tuple(pods))


@pytest.mark.parametrize("stage", [Stage.DUMPING, Stage.STOPPING])
def test_a_training_that_may_have_gone_on_after_its_dump_is_dumped_again(stage: Stage) -> None:
    job, before = resizing(stage)
    old = everything(make_job())
    plan = one_pass(job, before, with_dump_of(old, HOLD_S - 1))
    assert (plan.status.phase, plan.status.resize) == (
        Phase.RESIZING,
        replace(before.resize, stage=Stage.DUMPING),
    )
    assert [p.role for p in plan.delete_pods] == [Role.ROWS]  # and no process of the training
    assert [event.reason for event in plan.events] == ["ResizeLate"]
    (again,) = one_pass(job, plan.status, old).create_pods
    assert again["metadata"]["name"] == "job-rows-dump"
    plan = one_pass(job, before, with_dump_of(old, HOLD_S / 2))
    assert plan.events == []
    assert plan.status.resize == replace(before.resize, stage=Stage.STOPPING)


def test_a_stop_that_has_begun_is_not_taken_back_and_ends_the_dump_s_pod_last() -> None:
    job, before = resizing(Stage.STOPPING)
    plan = one_pass(job, before, with_dump_of(everything(make_job()), 1))
    assert [p.role for p in plan.delete_pods][-1] is Role.ROWS
    ending = everything(make_job(), NN_WORKER={"is_deleting": True})
    plan = one_pass(job, before, with_dump_of(ending, HOLD_S))
    assert Role.DATA_LOADER in {p.role for p in plan.delete_pods}


def test_the_end_of_a_container_is_read_from_its_pod() -> None:
    end = {"exitCode": 0, "finishedAt": "2030-01-01T00:00:00Z"}
    labels = {"persia.com/role": Role.ROWS.suffix}
    own = {"name": "rows", "restartCount": 0, "state": {"terminated": end}}
    sidecar = {"name": "mesh", "restartCount": 4, "state": {"running": {}}}
    status = {"phase": "Running", "containerStatuses": [own, sidecar]}
    view = PodView.from_object({"metadata": {"name": "p", "uid": "u", "labels": labels}, "status": status})
    assert view is not None
    assert (view.exit_code, view.finished_at) == (0, "2030-01-01T00:00:00Z")
    assert (view.phase, view.is_lingering, view.num_restarts) == ("Succeeded", True, 0)


def test_a_training_that_cannot_be_dumped_yet_is_asked_again() -> None:
    job, before = resizing(Stage.DUMPING)
    old = everything(make_job())
    plan = one_pass(job, before, with_rows_pod(old, "dump", "Failed", exit_code=75))
    assert [p.role for p in plan.delete_pods] == [Role.ROWS]
    assert [event.reason for event in plan.events] == ["ResizeWaits"]
    condition = plan.status.condition("Resized")
    assert condition is not None
    assert (condition.reason, "cannot be dumped yet" in condition.message) == ("Dumping", True)
    assert one_pass(job, plan.status, old, after_s=5).create_pods == []
    (again,) = one_pass(job, plan.status, old, after_s=11).create_pods
    assert again["metadata"]["name"] == "job-rows-dump"
    plan = one_pass(job, plan.status, with_rows_pod(old, "dump", "Failed", exit_code=75), after_s=12)
    assert plan.events == []  # said once
    back = one_pass(make_job(resizeCheckpoint="/rows"), plan.status, old, after_s=13)
    assert (back.status.phase, back.status.resize) == (Phase.RUNNING, None)  # somebody has changed their mind


def test_a_training_that_fails_while_it_is_dumped_is_started_again_first() -> None:
    job, before = resizing(Stage.DUMPING, restartPolicy="OnFailure")
    failed = everything(make_job(), NN_WORKER={"phase": "Failed", "is_ready": False})
    plan = one_pass(job, before, with_rows_pod(failed, "dump", "Running"))
    assert (plan.status.phase, plan.status.resize) == (Phase.RESTARTING, None)
    assert Role.ROWS in {p.role for p in plan.delete_pods}


def test_the_training_goes_on_from_the_checkpoint_of_a_resize_or_a_later_one() -> None:
    job, before = resizing(Stage.LOADING)
    plan = one_pass(job, before, with_rows_pod(everything(job), "load", "Succeeded"))
    assert (plan.status.phase, plan.status.resize_checkpoint) == (Phase.PENDING, PLACE)
    servers = only_servers(everything(job, attempt=1))
    (one,) = servers.of_role(Role.PARAMETER_SERVER)
    two = replace(one, name=pod_name("job", Role.PARAMETER_SERVER, 1), uid="two")
    servers = replace(servers, pods=(*servers.pods, two))
    for checkpoint in (PLACE, "/c/2"):
        status = replace(plan.status, progress={"lastCheckpoint": checkpoint})
        pods = one_pass(job, status, servers).create_pods
        found = {m["metadata"]["name"]: m["spec"]["containers"][0]["env"] for m in pods}
        resume = {"name": "PERSIA_RESUME_CHECKPOINT", "value": checkpoint}
        assert resume in found["job-nn-worker-0"]
        assert resume not in found["job-dataloader-0"]


def test_the_checkpoint_of_a_resize_goes_when_the_job_succeeds() -> None:
    job = make_job(ttlSecondsAfterFinished=0)
    ended = "2030-01-01T00:00:00Z"
    done = replace(RUNNING, phase=Phase.SUCCEEDED, completion_time=ended, resize_checkpoint=PLACE)
    nothing = Observation(objects={})
    plan = one_pass(job, done, nothing, after_s=60)
    (manifest,) = plan.create_pods
    assert manifest["spec"]["containers"][0]["command"][1:] == ["checkpoint", "remove", PLACE]
    assert not plan.delete_job
    active = with_rows_pod(nothing, "remove", "Running")
    assert (one_pass(job, done, active, after_s=60).delete_pods, plan.delete_job) == ([], False)
    plan = one_pass(job, done, with_rows_pod(nothing, "remove", "Failed"), after_s=60)
    assert ([e.reason for e in plan.events], plan.status.resize_checkpoint) == (["ResizeCheckpointLeft"], "")
    assert plan.delete_job
    failed = replace(done, phase=Phase.FAILED)
    assert one_pass(job, failed, nothing, after_s=60).create_pods == []  # it may be needed


def test_a_load_that_fails_is_tried_again_and_says_where_the_rows_are() -> None:
    job, before = resizing(Stage.LOADING, backoffLimit=1)
    observed = with_rows_pod(everything(job), "load", "Failed")
    plan = one_pass(job, before, observed)
    assert plan.status.resize == Resize(stage=Stage.LOADING, replicas=2, location=PLACE, tries=1)
    assert [p.role for p in plan.delete_pods] == [Role.ROWS]
    plan = one_pass(job, plan.status, observed)
    assert plan.status.phase is Phase.FAILED
    assert "/rows/n-job-resize and could not be loaded: full" in plan.events[-1].message
