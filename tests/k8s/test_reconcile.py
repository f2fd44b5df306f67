"""Decisions of the operator that a test against an API server cannot bring about at will."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from harness import job_manifest
from persia_k8s.builders.manifest import Images, Scale, spec_hash
from persia_k8s.builders.pods import HOLD_S
from persia_k8s.builders.servers import stateful_set
from persia_k8s.cluster import ClusterError
from persia_k8s.job import Job
from persia_k8s.names import Role, pod_name
from persia_k8s.observation import Observation, PodView
from persia_k8s.operator import Operator
from persia_k8s.progress import last_progress
from persia_k8s.reconcile import Plan, reconcile, take_refusals, time_text
from persia_k8s.status import Condition, JobStatus, Phase, Resize, RoleStatus, Stage

IMAGES = Images(cpu="cpu", cuda="cuda")
NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)
RUNNING = JobStatus(
    phase=Phase.RUNNING,
    roles={role: RoleStatus(replicas=1, ready=1) for role in Role if role not in (Role.ROWS, Role.INFERENCE)},
    start_time="2030-01-01T00:00:00Z",
)


def make_job(**spec: Any) -> Job:
    resource = job_manifest(**spec)
    resource["metadata"] |= {"namespace": "n", "uid": "u", "generation": 1}
    return Job.from_object(resource)


def pod(role: Role, index: int = 0, **changes: Any) -> PodView:
    view = PodView(
        name=pod_name("job", role, index),
        role=role,
        uid=f"uid-{role.suffix}-{index}",
        phase="Running",
        is_ready=True,
        is_deleting=False,
        attempt=0,
        spec_hash=None,
        num_restarts=0,
        trouble="",
    )
    return replace(view, **changes)


def everything(job: Job, attempt: int = 0, **changes: dict[str, Any]) -> Observation:
    """A job that runs; `changes` of its pods by the name of the role."""
    nats = {Role.NATS: 1} if job.has_own_nats else {}
    scale = Scale(replicas={**nats, **{r: s.replicas for r, s in job.roles.items()}}, attempt=attempt)
    sets = {role: stateful_set(job, role, scale, IMAGES) for role in scale.replicas if role.is_server}
    hashes = {role: spec_hash(manifest["spec"]["template"]) for role, manifest in sets.items()}
    pods = tuple(
        pod(role, spec_hash=hashes.get(role), attempt=attempt, **changes.get(role.name, {}))
        for role in scale.replicas
    )
    return Observation(
        pods=pods,
        objects={("StatefulSet", m["metadata"]["name"]): spec_hash(m) for m in sets.values()},
    )


def one_pass(job: Job, before: JobStatus, observed: Observation, after_s: float = 0.0) -> Plan:
    return reconcile(job, before, observed, IMAGES, NOW + timedelta(seconds=after_s))


def test_a_pass_over_a_job_that_runs_does_nothing_twice() -> None:
    job = make_job()
    first = one_pass(job, RUNNING, everything(job))
    second = one_pass(job, first.status, everything(job), after_s=60)
    assert (second.create_pods, second.delete_pods, second.delete_objects, second.events) == ([], [], [], [])
    assert [m["kind"] for m in second.apply if m["kind"] == "StatefulSet"] == []
    assert second.status == first.status


def test_a_lost_status_starts_no_pod_twice() -> None:
    """Somebody has restored the job from a backup, without its status."""
    job = make_job()
    plan = one_pass(job, JobStatus(), everything(job))
    assert (plan.create_pods, plan.delete_pods) == ([], [])
    assert plan.status.phase is Phase.RUNNING


def test_the_pause_doubles_up_to_its_limit() -> None:
    job = make_job(restartPolicy="OnFailure", backoffLimit=20, backoffSeconds=5)
    pauses = []
    for restarts in range(8):
        before = replace(RUNNING, restarts=restarts)
        failed = everything(job, attempt=restarts, NN_WORKER={"phase": "Failed", "is_ready": False})
        plan = one_pass(job, before, failed)
        assert plan.status.phase is Phase.RESTARTING
        until = datetime.strptime(plan.status.restart_time, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        pauses.append((until - NOW).total_seconds())
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300]


def test_training_is_started_again_only_when_the_old_pods_are_gone_and_the_pause_is_over() -> None:
    job = make_job(restartPolicy="OnFailure")
    before = replace(RUNNING, phase=Phase.RESTARTING, restart_time="2030-01-01T00:00:05Z")
    going = everything(job, NN_WORKER={"is_deleting": True}, DATA_LOADER={"is_deleting": True})
    servers = replace(going, pods=tuple(p for p in going.pods if p.role.is_server))
    assert one_pass(job, before, going, after_s=9).status.phase is Phase.RESTARTING
    assert one_pass(job, before, servers, after_s=4).status.phase is Phase.RESTARTING
    plan = one_pass(job, before, servers, after_s=5)
    assert (plan.status.phase, plan.status.restarts) == (Phase.PENDING, 1)
    # Next, new embedding workers; the training waits for them, and parameter servers stay.
    plan = one_pass(job, plan.status, servers, after_s=5)
    assert [p.role for p in plan.delete_pods] == [Role.EMBEDDING_WORKER]
    assert plan.create_pods == []


def test_nothing_starts_while_servers_are_not_ready() -> None:
    job = make_job()
    observed = everything(
        job, PARAMETER_SERVER={"is_ready": False, "trouble": "ImagePullBackOff: no such image"}
    )
    observed = replace(observed, pods=tuple(p for p in observed.pods if p.role.is_server))
    plan = one_pass(job, JobStatus(), observed)
    assert plan.create_pods == []
    condition = plan.status.condition("ServersReady")
    assert condition is not None
    assert "job-embedding-ps-0: ImagePullBackOff: no such image" in condition.message


def test_a_job_whose_script_has_its_own_data_needs_no_loaders() -> None:
    job = make_job(dataloader=None)
    servers = tuple(p for p in everything(job).pods if p.role.is_server)
    plan = one_pass(job, JobStatus(), replace(everything(job), pods=servers))
    assert [manifest["metadata"]["name"] for manifest in plan.create_pods] == ["job-nn-worker-0"]
    assert Role.DATA_LOADER not in plan.status.roles


def test_an_evicted_rank_is_reported_with_the_reason() -> None:
    job = make_job()
    evicted = {"phase": "Failed", "is_ready": False, "trouble": "Evicted: the node was low on memory"}
    plan = one_pass(job, RUNNING, everything(job, NN_WORKER=evicted))
    assert plan.status.phase is Phase.FAILED
    assert plan.create_pods == []
    assert "Evicted: the node was low on memory" in plan.events[-1].message


def test_a_loader_that_ends_before_the_ranks_is_no_failure() -> None:
    job = make_job()
    plan = one_pass(job, RUNNING, everything(job, DATA_LOADER={"phase": "Succeeded", "is_ready": False}))
    assert plan.status.phase is Phase.RUNNING
    assert plan.status.roles[Role.DATA_LOADER].ready == 1


@pytest.mark.parametrize("exit_code", [75, 1])
def test_a_loader_that_ends_as_a_rank_has_failed_is_no_failure_of_its_own(exit_code: int) -> None:
    """Its pod may be seen to fail before the rank's, which says why."""
    job = make_job()
    loader = {"phase": "Failed", "is_ready": False, "exit_code": exit_code}
    plan = one_pass(job, RUNNING, everything(job, DATA_LOADER=loader))
    assert plan.status.phase is (Phase.RUNNING if exit_code == 75 else Phase.FAILED)
    rank = {"phase": "Failed", "trouble": "Error: boom"}
    plan = one_pass(job, RUNNING, everything(job, DATA_LOADER=loader, NN_WORKER=rank))
    assert plan.status.phase is Phase.FAILED
    assert "Error: boom" in plan.events[-1].message


def test_loaders_that_do_not_end_are_ended() -> None:
    job = make_job()
    done = replace(RUNNING, phase=Phase.SUCCEEDED, completion_time="2030-01-01T00:00:00Z")
    observed = everything(job, NN_WORKER={"phase": "Succeeded"})
    early, late = (one_pass(job, done, observed, after_s=s) for s in (10, 30))
    assert (early.delete_pods, early.delete_objects) == ([], [])
    assert [p.role for p in late.delete_pods] == [Role.DATA_LOADER]
    assert len(late.delete_objects) == 3


def test_all_ranks_must_succeed() -> None:
    job = make_job(nnWorker={"replicas": 2})
    before = replace(RUNNING, roles={**RUNNING.roles, Role.NN_WORKER: RoleStatus(replicas=2)})
    observed = everything(job, NN_WORKER={"phase": "Succeeded"})
    second = pod(Role.NN_WORKER, 1)
    half = replace(observed, pods=(*observed.pods, second))
    assert one_pass(job, before, half).status.phase is Phase.RUNNING
    both = replace(observed, pods=(*observed.pods, replace(second, phase="Succeeded")))
    assert one_pass(job, before, both).status.phase is Phase.SUCCEEDED


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
    assert plan.status.resize == Resize(stage=Stage.DUMPING, replicas=2, location=PLACE)
    plan = one_pass(job, plan.status, old)
    assert [m["metadata"]["name"] for m in plan.create_pods] == ["job-rows-dump"]
    for phase, trouble in (("Pending", "; job-rows-dump: no node"), ("Running", "")):
        plan = one_pass(job, plan.status, with_rows_pod(old, "dump", phase))
        assert (plan.delete_pods, plan.create_pods, plan.events) == ([], [], [])
        condition = plan.status.condition("Resized")
        assert condition is not None
        assert condition.message == f"embeddingParameterServer.replicas: 2 wanted{trouble}"
    plan = one_pass(job, plan.status, with_rows_pod(old, "dump", "Succeeded"))
    assert plan.status.resize == Resize(stage=Stage.STOPPING, replicas=2, location=PLACE)
    plan = one_pass(job, plan.status, with_rows_pod(old, "dump", "Succeeded"))
    assert {p.role for p in plan.delete_pods} == {Role.NN_WORKER, Role.DATA_LOADER, Role.ROWS}
    plan = one_pass(job, plan.status, only_servers(old))
    assert plan.status.resize == Resize(stage=Stage.REPLACING, replicas=2, location=PLACE)
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
    changed = replace(job, generation=2)
    assert one_pass(changed, again, old).status.phase is Phase.RESIZING


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


def serving(**spec: Any) -> Job:
    roles = {"nnWorker": None, "dataloader": None, "inference": {"replicas": 1, "checkpoint": "/c"}}
    return make_job(**{**roles, **spec})


def test_a_job_that_answers_requests_runs_when_its_servers_are_ready() -> None:
    job = serving()
    first = one_pass(job, JobStatus(), Observation(objects={}))
    names = [m["metadata"]["name"] for m in first.apply if m["kind"] == "StatefulSet"]
    assert names == ["job-embedding-ps", "job-embedding-worker", "job-inference"]
    assert first.create_pods == []
    plan = one_pass(job, first.status, everything(job))
    assert (plan.status.phase, plan.events[-1].message) == (
        Phase.RUNNING,
        "predictions can be asked for at job-inference:8001",
    )
    worn = everything(job, PARAMETER_SERVER={"num_restarts": 9})
    plan = one_pass(job, plan.status, worn)  # for months: it is no reason to give up
    assert plan.status.phase is Phase.RUNNING


def test_model_and_rows_of_a_job_that_answers_requests_are_of_one_checkpoint() -> None:
    before = one_pass(serving(), JobStatus(), everything(serving())).status
    other = serving(inference={"replicas": 1, "checkpoint": "/d"})
    plan = one_pass(other, before, everything(serving()))
    assert [m for m in plan.apply if m["kind"] == "StatefulSet"] == []
    condition = plan.status.condition("SpecApplied")
    assert condition is not None
    assert "embeddingParameterServer: the changed pod takes effect in a new job only" in condition.message
    more = serving(inference={"replicas": 3, "checkpoint": "/c"})
    (manifest,) = (
        m for m in one_pass(more, before, everything(serving())).apply if m["kind"] == "StatefulSet"
    )
    assert (manifest["metadata"]["name"], manifest["spec"]["replicas"]) == ("job-inference", 3)
    fewer_rows = serving(embeddingParameterServer={"replicas": 2}, resizeCheckpoint="/r")
    plan = one_pass(fewer_rows, before, everything(serving()))
    assert (plan.status.phase, plan.events[-1].reason) == (Phase.RUNNING, "ResizeRefused")


def test_a_load_that_fails_is_tried_again_and_says_where_the_rows_are() -> None:
    job, before = resizing(Stage.LOADING, backoffLimit=1)
    observed = with_rows_pod(everything(job), "load", "Failed")
    plan = one_pass(job, before, observed)
    assert plan.status.resize == Resize(stage=Stage.LOADING, replicas=2, location=PLACE, tries=1)
    assert [p.role for p in plan.delete_pods] == [Role.ROWS]
    plan = one_pass(job, plan.status, observed)
    assert plan.status.phase is Phase.FAILED
    assert "/rows/n-job-resize and could not be loaded: full" in plan.events[-1].message


def test_a_changed_pod_of_a_parameter_server_waits_for_a_new_job() -> None:
    old = make_job()
    observed = everything(old)
    new = make_job(embeddingParameterServer={"replicas": 1, "image": "new"})
    plan = one_pass(new, RUNNING, observed)
    assert plan.delete_pods == []
    assert not any(m["kind"] == "StatefulSet" for m in plan.apply)
    condition = plan.status.condition("SpecApplied")
    assert condition is not None
    assert (condition.status, condition.reason) == (False, "Deferred")
    assert len(plan.events) == 1
    assert one_pass(new, plan.status, observed).events == []  # said once


def test_the_status_survives_its_way_through_the_api_server() -> None:
    status = replace(
        RUNNING,
        restarts=2,
        resizes=1,
        resize=Resize(
            stage=Stage.LOADING, replicas=2, location="/r", tries=1, retry_time="2030-01-01T00:00:00Z"
        ),
        failed_resize=3,
        resize_checkpoint="/r",
        selector="persia_job=job",
        servers={"job-nats-0": "u/0"},
        progress={"step": 1},
        conditions=(
            Condition(type="A", status=False, reason="R", message="m", since="2030-01-01T00:00:00Z"),
        ),
    )
    stored = {key: value for key, value in status.to_dict().items() if value is not None}
    assert JobStatus.from_dict(stored) == status
    assert JobStatus.from_dict(None) == JobStatus()


@pytest.mark.parametrize(
    ("log", "values"),
    [
        ("", {}),
        ('persia-progress {"step": 1}', {"step": 1}),
        ('12:00 INFO persia-progress {"step": 1, "auc": 0.5}\nother\n', {"step": 1, "auc": 0.5}),
        (
            'persia-progress {"step": 1, "auc": 0.5}\npersia-progress {"step": 2, "samplesPerSecond": 10}',
            {"step": 2, "auc": 0.5, "samplesPerSecond": 10},
        ),
        ('persia-progress {"lastCheckpoint": "/c/1"}', {"lastCheckpoint": "/c/1"}),
        ('persia-progress {"step": "1", "auc": 2, "samplesPerSecond": NaN, "lastCheckpoint": 3}', {}),
        ('persia-progress {"step": true, "other": 1}', {}),
        ("persia-progress {broken", {}),
        ("persia-progress [1]", {}),
        ('persia-progress {"step": 1}\npersia-progress {"ste', {"step": 1}),
    ],
)
def test_progress_is_what_valid_lines_say(log: str, values: dict[str, Any]) -> None:
    assert last_progress(log) == values


def conditions_of(plan: Plan) -> dict[str, tuple[bool, str]]:
    return {c.type: (c.status, c.reason) for c in plan.status.conditions}


def test_a_suspended_job_has_no_pods_and_starts_again_with_a_new_secret() -> None:
    job = make_job(suspend=True)
    plan = one_pass(job, RUNNING, everything(job))
    assert plan.status.phase is Phase.SUSPENDED
    assert len(plan.delete_pods) == 5
    assert len(plan.delete_objects) == 3
    assert (plan.apply, plan.create_pods) == ([], [])
    nothing = Observation(objects={})
    assert one_pass(job, plan.status, nothing).status.phase is Phase.SUSPENDED
    again = make_job(embeddingParameterServer={"replicas": 3})  # no row is left that a change could lose
    ending = replace(nothing, pods=(pod(Role.NN_WORKER, is_deleting=True),))
    assert one_pass(again, plan.status, ending).status.phase is Phase.SUSPENDED
    plan = one_pass(again, plan.status, nothing)
    assert (plan.status.phase, plan.status.attempt, plan.status.restarts) == (Phase.PENDING, 1, 0)
    assert conditions_of(plan)["Suspended"] == (False, "Resumed")
    sets = {m["metadata"]["name"]: m for m in one_pass(again, plan.status, nothing).apply}
    server = sets["job-embedding-ps"]["spec"]
    assert server["replicas"] == 3
    assert server["template"]["spec"]["volumes"][0]["secret"]["secretName"] == "job-secret-u-1"


def test_a_job_that_is_created_suspended_starts_nothing() -> None:
    plan = one_pass(make_job(suspend=True), JobStatus(), Observation(objects={}))
    assert (plan.status.phase, plan.apply, plan.create_pods) == (Phase.SUSPENDED, [], [])


def test_a_job_fails_at_its_deadline_which_a_suspension_begins_anew() -> None:
    job = replace(make_job(activeDeadlineSeconds=100), created="2030-01-01T00:00:00Z")
    observed = everything(job)
    early = one_pass(job, RUNNING, observed, after_s=99.5)
    assert (early.status.phase, early.due_s) == (Phase.RUNNING, 0.5)
    late = one_pass(job, RUNNING, observed, after_s=100)
    assert (late.status.phase, conditions_of(late)["Failed"]) == (Phase.FAILED, (True, "DeadlineExceeded"))
    resumed = Condition(type="Suspended", status=False, reason="Resumed", since="2030-01-01T00:01:00Z")
    before = replace(RUNNING, conditions=(resumed,))
    assert one_pass(job, before, observed, after_s=100).status.phase is Phase.RUNNING


def test_a_refused_job_fails_at_its_deadline_too() -> None:
    class Cluster:
        def observe(self, *_job: str) -> Observation:
            return Observation(objects={})

        def try_out(self, _manifest: Any) -> None:
            raise ClusterError("exceeded quota", 403)

    def act(created: datetime) -> Plan:
        job = replace(make_job(activeDeadlineSeconds=100), created=time_text(created))
        now = datetime.now(timezone.utc)
        return Operator(Cluster(), IMAGES, ())._act(job, JobStatus(), now)  # type: ignore[arg-type]

    early = act(datetime.now(timezone.utc))
    assert conditions_of(early)["PodsAccepted"] == (False, "Refused")
    assert early.due_s <= 101, "it is looked at again at its deadline"
    late = act(NOW - timedelta(days=3650))
    assert conditions_of(late)["Failed"] == (True, "DeadlineExceeded")


def test_a_refused_job_costs_no_requests_before_its_next_try() -> None:
    requests: list[str] = []

    class Cluster:
        def observe(self, *_job: str) -> Observation:
            requests.append("observe")
            return Observation(objects={})

        def try_out(self, _manifest: Any) -> None:
            requests.append("try out")
            raise ClusterError("exceeded quota", 403)

    operator = Operator(Cluster(), IMAGES, ())  # type: ignore[arg-type]
    job = replace(make_job(), created=time_text(datetime.now(timezone.utc)))
    status = operator._act(job, JobStatus(), datetime.now(timezone.utc)).status
    first = len(requests)
    assert first
    again = operator._act(job, status, datetime.now(timezone.utc))
    assert (len(requests), again.status) == (first, status)
    assert 0 < again.due_s <= 5
    operator._act(replace(job, generation=2), status, datetime.now(timezone.utc))
    assert len(requests) == 2 * first, "a changed spec is tried at once"


def lost_server(job: Job, before: JobStatus) -> tuple[JobStatus, Observation]:
    """The status after a pass over a whole job, and the job with a new parameter server."""
    before = one_pass(job, before, everything(job)).status
    return before, everything(job, PARAMETER_SERVER={"uid": "another"})


def test_lost_rows_are_a_condition_and_count_as_a_restart() -> None:
    job = make_job()
    before, observed = lost_server(job, RUNNING)
    plan = one_pass(job, before, observed)
    assert conditions_of(plan)["RowsComplete"] == (False, "ServerRestarted")
    condition = plan.status.condition("RowsComplete")
    assert condition is not None
    assert "job-embedding-ps-0" in condition.message
    assert "no checkpoint" in condition.message
    assert plan.status.roles[Role.PARAMETER_SERVER].restarts == 1
    assert plan.status.phase is Phase.RUNNING  # restartPolicy is Never
    plan = one_pass(job, plan.status, observed)
    assert plan.status.roles[Role.PARAMETER_SERVER].restarts == 1  # counted once
    again = everything(job, PARAMETER_SERVER={"uid": "another", "num_restarts": 2})
    assert one_pass(job, plan.status, again).status.roles[Role.PARAMETER_SERVER].restarts == 3


def test_a_training_that_has_a_checkpoint_restarts_from_it_when_rows_are_lost() -> None:
    job = make_job(restartPolicy="OnFailure", backoffSeconds=0)
    before, observed = lost_server(job, replace(RUNNING, progress={"lastCheckpoint": "/c/7"}))
    plan = one_pass(job, before, observed)
    assert plan.status.phase is Phase.RESTARTING
    assert conditions_of(plan)["Recovering"] == (True, "TrainingRestarts")
    assert "/c/7 has them" in plan.events[-1].message
    servers = tuple(p for p in observed.pods if p.role.is_server)
    plan = one_pass(job, plan.status, replace(observed, pods=servers))
    assert (plan.status.phase, plan.status.restarts) == (Phase.PENDING, 1)
    started = everything(job, attempt=1, PARAMETER_SERVER={"uid": "another"})
    plan = one_pass(job, plan.status, started)
    assert plan.status.phase is Phase.RUNNING
    assert conditions_of(plan)["RowsComplete"] == (True, "Resumed")
    assert conditions_of(plan)["Recovering"] == (False, "Running")


def test_a_job_that_lacks_a_pod_is_degraded_and_one_that_has_ended_is_not() -> None:
    job = make_job()
    plan = one_pass(job, RUNNING, everything(job, DATA_LOADER={"is_ready": False}))
    condition = plan.status.condition("Degraded")
    assert condition is not None
    assert (condition.status, condition.message) == (True, "dataloader 0 of 1")
    ended = everything(job, NN_WORKER={"phase": "Succeeded"}, DATA_LOADER={"phase": "Succeeded"})
    plan = one_pass(job, plan.status, ended)
    assert plan.status.phase is Phase.SUCCEEDED
    for kind in ("ServersReady", "Degraded", "Recovering"):
        assert conditions_of(plan)[kind] == (False, "Succeeded")
    assert conditions_of(plan)["Complete"] == (True, "Succeeded")


@pytest.mark.parametrize(
    ("phase", "started", "end"),
    [
        (Phase.PENDING, "", Phase.FAILED),
        (Phase.RESTARTING, "2030-01-01T00:00:00Z", Phase.FAILED),
        (Phase.RUNNING, "2030-01-01T00:00:00Z", Phase.RUNNING),
        (Phase.RESIZING, "2030-01-01T00:00:00Z", Phase.RESIZING),
    ],
)
def test_a_job_that_cannot_make_a_pod_is_given_up_unless_it_runs(
    phase: Phase, started: str, end: Phase
) -> None:
    for job, limit_s in ((make_job(), 600.0), (make_job(progressDeadlineSeconds=90), 90.0)):
        before = JobStatus(phase=phase, start_time=started)
        for after_s, expected in ((0.0, phase), (limit_s - 1, phase), (limit_s, end)):
            plan = Plan(status=before)
            now = NOW + timedelta(seconds=after_s)
            take_refusals(job, before, Observation(objects={}), IMAGES, now, plan, [f"quota {after_s}"])
            before = plan.status
            assert conditions_of(plan)["PodsAccepted"] == (False, "Refused")
            assert before.phase is expected


def test_refusals_are_looked_at_after_pauses_that_double() -> None:
    job, before, pauses = make_job(progressDeadlineSeconds=10_000), JobStatus(), []
    now = NOW
    for _ in range(9):
        plan = Plan(status=before)
        take_refusals(job, before, Observation(objects={}), IMAGES, now, plan, ["quota"])
        before = plan.status
        pauses.append(plan.look_again_s)
        now += timedelta(seconds=plan.look_again_s)
    assert pauses == [5, 5, 10, 20, 40, 80, 160, 300, 300]


def test_accepted_pods_are_a_condition() -> None:
    job, before = make_job(), JobStatus()
    plan = Plan(status=before)
    take_refusals(job, before, Observation(objects={}), IMAGES, NOW, plan, [])
    assert conditions_of(plan)["PodsAccepted"] == (True, "Accepted")
    plan = Plan(status=JobStatus())  # nobody has asked the API server yet
    take_refusals(make_job(suspend=True), JobStatus(), Observation(objects={}), IMAGES, NOW, plan, [])
    assert "PodsAccepted" not in conditions_of(plan)


def test_inference_servers_scale_by_the_job_s_own_number() -> None:
    job = serving(replicas=4)
    before = one_pass(serving(), JobStatus(), everything(serving())).status
    plan = one_pass(job, before, everything(serving()))
    (manifest,) = (m for m in plan.apply if m["kind"] == "StatefulSet")
    assert (manifest["metadata"]["name"], manifest["spec"]["replicas"]) == ("job-inference", 4)
    assert (plan.status.replicas, plan.status.selector) == (4, "persia_job=job,persia.com/role=inference")
