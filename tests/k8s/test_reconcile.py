"""Decisions of the operator that a test against an API server cannot bring about at will."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from passes import IMAGES, NOW, RUNNING, conditions_of, everything, make_job, one_pass, pod
from persia_k8s.cluster import ClusterError
from persia_k8s.job import Job
from persia_k8s.names import Role
from persia_k8s.observation import Observation
from persia_k8s.operator import Operator
from persia_k8s.progress import last_progress
from persia_k8s.reconcile import Plan, take_refusals, time_text
from persia_k8s.status import Condition, JobStatus, Phase, Resize, RoleStatus, Stage


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
        failed_resize=2**47,
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


@pytest.mark.parametrize("role", ["PARAMETER_SERVER", "STANDBY"])
@pytest.mark.parametrize(
    ("other", "is_lost"),
    [({}, False), ({"is_ready": False}, True), ({"num_restarts": 1}, True)],
    ids=["has the rows", "may not have all", "restarts too"],
)
def test_rows_of_a_server_with_a_standby_are_lost_with_both(
    role: str, other: dict[str, Any], is_lost: bool
) -> None:
    job = make_job(
        embeddingParameterServer={"replicas": 1, "standbys": 1}, restartPolicy="OnFailure", backoffSeconds=0
    )
    running = replace(RUNNING, progress={"lastCheckpoint": "/c/7"})
    before = one_pass(job, running, everything(job)).status
    partner = "STANDBY" if role == "PARAMETER_SERVER" else "PARAMETER_SERVER"
    plan = one_pass(job, before, everything(job, **{role: {"num_restarts": 1}, partner: other}))
    assert plan.status.phase is (Phase.RESTARTING if is_lost else Phase.RUNNING)
    assert ("RowsComplete" in conditions_of(plan)) == is_lost
    (event, *_) = [event.message for event in plan.events if event.reason == "ServerRestarted"]
    assert ("are lost" in event) == is_lost
    assert plan.status.roles[Role[role]].restarts == 1


WITH_STANDBYS = {"embeddingParameterServer": {"replicas": 1, "standbys": 1, "maxUnavailable": 1}}


@pytest.mark.parametrize(("attempt", "starts"), [(0, False), (1, True)])
def test_a_training_that_is_started_again_does_not_wait_for_a_second_copy(attempt: int, starts: bool) -> None:
    job = make_job(**WITH_STANDBYS)
    whole = everything(job, attempt, STANDBY={"is_ready": False, "trouble": "Unschedulable"})
    observed = replace(whole, pods=tuple(pod for pod in whole.pods if pod.role.is_server))
    plan = one_pass(job, JobStatus(restarts=attempt), observed)
    assert bool(plan.create_pods) is starts
    assert conditions_of(plan)["ServersReady"] == (False, "NotReady")


def test_a_standby_that_keeps_failing_ends_no_training() -> None:
    job = make_job(**WITH_STANDBYS, backoffLimit=1)
    worn = everything(job, STANDBY={"num_restarts": 2, "is_ready": False})
    assert one_pass(job, RUNNING, worn).status.phase is Phase.RUNNING
    assert one_pass(job, JobStatus(), worn).status.phase is Phase.FAILED  # its config is wrong
    both = everything(
        job, STANDBY={"num_restarts": 2, "is_ready": False}, PARAMETER_SERVER={"is_ready": False}
    )
    assert one_pass(job, RUNNING, both).status.phase is Phase.FAILED


def test_pairs_have_one_budget_and_start_before_they_have_all_rows() -> None:
    job = make_job(**WITH_STANDBYS)
    plan = one_pass(job, JobStatus(), Observation(objects={}))
    applied = {(m["kind"], m["metadata"]["name"]): m["spec"] for m in plan.apply}
    budget = applied["PodDisruptionBudget", "job-embedding-ps"]
    assert budget["minAvailable"] == 1
    assert budget["selector"]["matchExpressions"][0]["values"] == ["embedding-ps", "standby"]
    assert ("PodDisruptionBudget", "job-standby") not in applied
    for name in ("job-embedding-ps", "job-standby"):
        (container,) = applied["StatefulSet", name]["template"]["spec"]["containers"]
        paths = [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")]
        assert paths == ["/healthz", "/readyz"]


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
