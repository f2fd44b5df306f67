"""Decisions of the operator while rows move to other parameter servers and the training continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from passes import IMAGES, NOW, RUNNING, conditions_of, everything, make_job, one_pass, pod
from persia_k8s.builders.manifest import spec_hash
from persia_k8s.names import Role, pod_name
from persia_k8s.observation import Observation, PodView
from persia_k8s.reconcile import Plan, take_refusals
from persia_k8s.reconcile.plan import time_text
from persia_k8s.status import JobStatus, Phase, Resize, Stage

OLD, NEW = "job-embedding-ps", "job-embedding-ps-g1"
ONE, TWO = make_job(), make_job(embeddingParameterServer={"replicas": 2})


def new_server(index: int, **changes: Any) -> PodView:
    name = pod_name("job", Role.PARAMETER_SERVER, index, generation=1)
    uid = f"new-{index}"
    return replace(pod(Role.PARAMETER_SERVER), name=name, uid=uid, generation=1, gathers=True, **changes)


def with_pods(observed: Observation, *pods: PodView, new_set: str | None = "hash") -> Observation:
    objects = {**observed.objects, ("StatefulSet", NEW): new_set}
    return replace(observed, pods=(*observed.pods, *pods), objects=objects)


def coordinator(phase: str, exit_code: int | None = None) -> PodView:
    trouble = "they have standbys" if exit_code else ""
    return pod(Role.ROWS, name="job-rows-resize", phase=phase, exit_code=exit_code, trouble=trouble)


NEW_SERVERS = (new_server(0, is_ready=False), new_server(1, is_ready=False))
BOTH = with_pods(everything(ONE), *NEW_SERVERS)


def at(stage: Stage, **more: Any) -> JobStatus:
    """A job that goes from one parameter server to two, in this stage."""
    servers = {
        one.name: one.incarnation for one in (*everything(ONE).of_role(Role.PARAMETER_SERVER), *NEW_SERVERS)
    }
    resize = Resize(stage=stage, replicas=2, generation=1, **more)
    return replace(RUNNING, resize=resize, servers=servers, server_generation=int(stage is Stage.ENDING))


def sets(plan: Plan) -> dict[str, Any]:
    return {m["metadata"]["name"]: m["spec"] for m in plan.apply if m["kind"] == "StatefulSet"}


def command(spec: Any) -> str:
    return str(spec["template"]["spec"]["containers"][0]["command"][-1])


def test_servers_are_replaced_by_as_many_once_for_each_wish_to_rebalance() -> None:
    job = make_job(embeddingParameterServer={"replicas": 1, "rebalance": 3})
    plan = one_pass(job, RUNNING, everything(job))
    assert (plan.status.resize, plan.status.rebalance) == (
        Resize(stage=Stage.STARTING, replicas=1, wish=job.wish, generation=1, since=time_text(NOW)),
        3,
    )
    (event,) = plan.events
    assert event.message == "embeddingParameterServer.rebalance: 3, while the training continues"
    started = one_pass(job, plan.status, everything(job))
    (spec,) = sets(started).values()
    assert "--replica-size=1 --generation=1 --sources=1" in command(spec)
    # Done, or failed: it begins again only when the number is raised.
    for done in (RUNNING, replace(RUNNING, failed_resize=job.wish)):
        assert one_pass(job, replace(done, rebalance=3), everything(job)).status.resize is None
    raised = make_job(embeddingParameterServer={"replicas": 1, "rebalance": 4})
    assert one_pass(raised, replace(RUNNING, rebalance=3), everything(raised)).status.resize is not None
    refused = make_job(embeddingParameterServer={"replicas": 1, "rebalance": 4}, resizeCheckpoint="/rows")
    assert one_pass(refused, RUNNING, everything(refused)).status.resize is None


def test_a_job_that_starts_with_a_number_for_rebalance_keeps_its_servers() -> None:
    job = make_job(embeddingParameterServer={"replicas": 1, "rebalance": 3})
    for before in (JobStatus(), replace(RUNNING, phase=Phase.SUSPENDED, restarts=2)):
        status = one_pass(job, before, Observation(objects={})).status
        assert status.rebalance == 3
        running = replace(RUNNING, rebalance=status.rebalance)
        assert one_pass(job, running, everything(job)).status.resize is None
    # Raised while the training is started again: the servers have stayed, and their load, too.
    again = one_pass(job, replace(RUNNING, phase=Phase.PENDING, restarts=1), everything(job)).status
    assert again.rebalance == 0


def test_new_servers_start_beside_the_old_ones_which_are_left_alone() -> None:
    plan = one_pass(TWO, RUNNING, everything(ONE))
    assert (plan.status.phase, plan.status.resize) == (
        Phase.RUNNING,
        Resize(stage=Stage.STARTING, replicas=2, wish=TWO.wish, generation=1, since=time_text(NOW)),
    )
    assert [event.reason for event in plan.events] == ["Resizing"]
    plan = one_pass(TWO, plan.status, replace(everything(ONE), has_pod_groups=True))
    gangs = {m["metadata"]["name"]: m["spec"]["minMember"] for m in plan.apply if m["kind"] == "PodGroup"}
    assert gangs == {"job-servers": 3, "job-training": 2}  # a new server may find no room
    (spec,) = sets(plan).values()
    assert set(sets(plan)) == {NEW}
    assert (spec["replicas"], spec["serviceName"]) == (2, OLD)
    assert "--replica-size=2 --generation=1 --sources=1" in command(spec)
    budgets = {m["metadata"]["name"]: m["spec"] for m in plan.apply if m["kind"] == "PodDisruptionBudget"}
    assert budgets[OLD]["minAvailable"] == 3  # no eviction: of the old servers, none may be missing
    assert conditions_of(plan)["Resized"] == (False, "Starting")
    assert conditions_of(plan)["SpecApplied"] == (True, "AsSpecified")
    plan = one_pass(TWO, plan.status, with_pods(everything(ONE), NEW_SERVERS[0]))
    assert plan.status.resize is not None
    assert plan.status.resize.stage is Stage.STARTING
    plan = one_pass(TWO, plan.status, BOTH)
    assert plan.status.resize.stage is Stage.MOVING
    assert plan.status.servers["job-embedding-ps-g1-1"] == "new-1/0"
    assert plan.delete_pods == plan.delete_objects == []
    assert plan.status.roles[Role.PARAMETER_SERVER].replicas == 1


def test_a_coordinator_follows_one_that_ended_without_a_verdict() -> None:
    noted = one_pass(TWO, at(Stage.MOVING), BOTH)
    assert noted.create_pods == []  # first the status says that there may be one
    plan = one_pass(TWO, noted.status, BOTH)
    (manifest,) = plan.create_pods
    arguments = manifest["spec"]["containers"][0]["command"]
    assert arguments == [
        "persia-launcher",
        "resize",
        "--parameter-servers=2",
        "--sources=1",
        "--generation=1",
    ]
    plan = one_pass(TWO, plan.status, with_pods(BOTH, coordinator("Running")))
    for _ in range(2):
        plan = one_pass(TWO, plan.status, with_pods(BOTH, coordinator("Failed", 137)))
        assert [one.role for one in plan.delete_pods] == [Role.ROWS]
        assert one_pass(TWO, plan.status, BOTH, after_s=1).create_pods == []
        assert len(one_pass(TWO, plan.status, BOTH, after_s=6).create_pods) == 1


def test_new_servers_that_have_the_rows_are_the_job_s_servers() -> None:
    plan = one_pass(TWO, at(Stage.MOVING, tries=1), with_pods(BOTH, coordinator("Succeeded")))
    assert (plan.status.server_generation, plan.status.resize.stage) == (1, Stage.ENDING)  # type: ignore[union-attr]
    assert "--generation=1" in command(sets(plan)[NEW])
    assert "--sources" not in command(sets(plan)[NEW])  # one that starts again begins without rows
    applied = next(spec_hash(m) for m in plan.apply if m["metadata"]["name"] == NEW)
    starting = with_pods(everything(ONE), *NEW_SERVERS, new_set=applied)
    plan = one_pass(TWO, plan.status, starting)  # they are ready a moment later
    assert plan.delete_objects == [("StatefulSet", OLD)]
    assert plan.status.roles[Role.PARAMETER_SERVER].replicas == 2
    assert plan.events == []
    assert conditions_of(plan)["Degraded"][0] is False
    pods = (replace(one, is_ready=True) for one in NEW_SERVERS)
    ready = with_pods(everything(ONE), *pods, new_set=applied)
    plan = one_pass(TWO, plan.status, ready)
    assert (plan.status.resize, conditions_of(plan)["Resized"]) == (None, (True, "Ready"))
    assert one_pass(TWO, plan.status, ready).status.resize is None


@pytest.mark.parametrize("exit_code", [2, 3])
def test_a_resize_that_is_given_up_leaves_the_old_servers_and_says_why(exit_code: int) -> None:
    """2: the image is older, and does not know the command."""
    plan = one_pass(TWO, at(Stage.MOVING, tries=1), with_pods(BOTH, coordinator("Failed", exit_code)))
    assert (plan.status.resize, plan.status.failed_resize) == (None, TWO.wish)
    assert (plan.events[-1].reason, "they have standbys" in plan.events[-1].message) == ("ResizeFailed", True)
    plan = one_pass(TWO, plan.status, BOTH)
    assert plan.delete_objects == [("StatefulSet", NEW)]
    assert conditions_of(plan)["SpecApplied"] == (False, "ResizeRefused")
    assert conditions_of(plan)["Resized"] == (False, "ResizeFailed")
    plan = one_pass(TWO, plan.status, everything(ONE))
    assert plan.status.resize is None


FAILED = replace(RUNNING, failed_resize=TWO.wish, last_generation=1)


@pytest.mark.parametrize(
    ("spec", "is_tried"),
    [
        ({"replicas": 3, "embeddingWorker": {"replicas": 3}}, False),  # as an autoscaler does
        ({"backoffSeconds": 9}, False),
        ({"embeddingParameterServer": {"replicas": 3}}, True),
        ({"embeddingParameterServer": {"replicas": 2, "image": "another"}}, True),
        ({"progressDeadlineSeconds": 3600}, True),
    ],
)
def test_a_failed_resize_is_tried_again_once_its_own_fields_change(
    spec: dict[str, Any], is_tried: bool
) -> None:
    job = make_job(**{"embeddingParameterServer": {"replicas": 2}, **spec})
    plan = one_pass(replace(job, generation=2), FAILED, everything(ONE))
    assert (plan.status.resize is not None) == is_tried


def test_a_failed_resize_is_tried_again_after_it_was_reverted_with_new_names() -> None:
    """A server of the failed one may still run, on a node that cannot be reached."""
    plan = one_pass(ONE, FAILED, everything(ONE))
    assert plan.status.failed_resize == 0
    plan = one_pass(TWO, plan.status, everything(ONE))
    assert plan.status.resize.generation == 2  # type: ignore[union-attr]
    (spec,) = sets(one_pass(TWO, plan.status, everything(ONE))).values()
    assert "--generation=2 --sources=1" in command(spec)
    pods = tuple(replace(one, name=one.name.replace("g1", "g2"), generation=2) for one in NEW_SERVERS)
    observed = replace(everything(ONE), pods=(*everything(ONE).pods, *pods))
    moving = replace(plan.status, resize=replace(plan.status.resize, stage=Stage.MOVING, tries=1))  # type: ignore[arg-type,type-var]
    (manifest,) = one_pass(TWO, moving, observed).create_pods
    arguments = manifest["spec"]["containers"][0]["command"]
    assert arguments[-2:] == ["--generation=2", "--from-generation=0"]


# Of the status, in the first version that resizes without a checkpoint.
FIELDS_BEFORE = (
    "phase observedGeneration startTime completionTime restarts loaderRestarts restartTime suspensions tls "
    "standbys certificatesUntil checkedGeneration resizes serverGeneration earlyRestarts resize failedResize "
    "resizeCheckpoint selector replicas scaledFrom roles servers progress conditions"
)


def test_a_failed_resize_ends_with_the_definition_of_an_earlier_version() -> None:
    """The API server drops the fields that it does not know. Helm never upgrades a definition."""
    plan = one_pass(TWO, at(Stage.MOVING, tries=2), with_pods(BOTH, coordinator("Failed", 3)))
    stored = {name: value for name, value in plan.status.to_dict().items() if name in FIELDS_BEFORE.split()}
    plan = one_pass(TWO, JobStatus.from_dict(stored), everything(ONE))
    assert plan.status.resize is None
    assert conditions_of(plan)["SpecApplied"] == (False, "ResizeRefused")


def test_a_resize_that_failed_under_an_earlier_operator_is_not_tried_again() -> None:
    """That one noted the generation of the spec."""
    failed = replace(RUNNING, failed_resize=7)
    plan = one_pass(replace(TWO, generation=7), failed, everything(ONE))
    assert (plan.status.resize, plan.status.failed_resize) == (None, TWO.wish)
    assert one_pass(replace(TWO, generation=8), plan.status, everything(ONE)).status.resize is None
    assert one_pass(replace(TWO, generation=8), failed, everything(ONE)).status.resize is not None


@pytest.mark.parametrize("wish", [TWO.wish, 0])
def test_a_wish_that_changes_during_a_resize_that_fails_is_tried(wish: int) -> None:
    """0: of an earlier operator."""
    three = make_job(embeddingParameterServer={"replicas": 3})
    moving = at(Stage.MOVING, tries=2, wish=wish)
    plan = one_pass(three, moving, with_pods(BOTH, coordinator("Failed", 3)))
    assert plan.events[-1].reason == "ResizeFailed"
    plan = one_pass(three, plan.status, everything(ONE))
    assert (plan.status.resize.replicas, conditions_of(plan)["Resized"]) == (3, (False, "Starting"))  # type: ignore[union-attr]


def test_a_resize_that_an_earlier_operator_began_does_not_leave_its_names_to_the_next_one() -> None:
    begun = at(Stage.MOVING, tries=2)  # that operator did not note the generation
    plan = one_pass(TWO, begun, with_pods(BOTH, coordinator("Failed", 3)))
    assert plan.status.last_generation == 1
    plan = one_pass(ONE, plan.status, everything(ONE))
    plan = one_pass(TWO, plan.status, everything(ONE))
    assert plan.status.resize.generation == 2  # type: ignore[union-attr]


def test_the_status_forgets_servers_of_older_generations() -> None:
    retired = replace(RUNNING, servers={"job-embedding-ps-g1-0": "uid/0", "job-embedding-ps-0": "uid/0"})
    patch = one_pass(ONE, retired, everything(ONE)).status.to_dict()["servers"]
    assert patch["job-embedding-ps-g1-0"] is None  # a merge patch removes it
    assert patch["job-embedding-ps-0"]


def test_a_server_that_an_earlier_operator_noted_as_gone_was_not_started_anew() -> None:
    retired = JobStatus.from_dict({**RUNNING.to_dict(), "servers": {"job-embedding-worker-0": "gone"}})
    plan = one_pass(ONE, retired, everything(ONE))
    assert plan.events == []
    assert plan.status.roles[Role.EMBEDDING_WORKER].restarts == 0


def test_a_later_coordinator_that_does_not_know_the_command_decides_nothing() -> None:
    plan = one_pass(TWO, at(Stage.MOVING, tries=3), with_pods(BOTH, coordinator("Failed", 2)))
    assert plan.status.resize is not None


def test_a_resize_can_be_taken_back_until_a_coordinator_runs() -> None:
    assert one_pass(ONE, at(Stage.STARTING), BOTH).status.resize is None
    assert one_pass(ONE, at(Stage.MOVING), BOTH).status.resize is None
    pending = with_pods(BOTH, coordinator("Pending"))
    plan = one_pass(ONE, at(Stage.MOVING, tries=1), pending)
    assert [one.role for one in plan.delete_pods] == [Role.ROWS]
    assert plan.status.resize is not None  # it may still start
    assert one_pass(ONE, plan.status, BOTH).status.resize is None
    started = one_pass(ONE, plan.status, with_pods(BOTH, coordinator("Running")))
    assert one_pass(ONE, started.status, BOTH).status.resize is not None
    unseen = one_pass(ONE, at(Stage.MOVING, tries=1), BOTH)
    assert len(unseen.create_pods) == 1  # one may have run
    assert one_pass(ONE, unseen.status, pending).delete_pods == []


def test_a_coordinator_is_judged_once_a_cancelled_one_is_gone() -> None:
    """The API server would refuse its name."""
    ending = replace(coordinator("Pending"), is_deleting=True)
    plan = one_pass(TWO, at(Stage.MOVING), with_pods(BOTH, ending))
    assert (plan.trial_pod, plan.status.resize) == (None, at(Stage.MOVING).resize)
    assert one_pass(TWO, plan.status, BOTH).trial_pod is not None


def test_a_coordinator_that_the_api_server_refuses_is_a_condition_and_can_be_taken_back() -> None:
    begun = at(Stage.MOVING, since="2030-01-01T00:00:00Z")

    def refused(before: JobStatus) -> Plan:
        plan = one_pass(TWO, before, BOTH)
        assert plan.trial_pod is not None  # asked before the status says that there may be one
        assert plan.create_pods == []
        take_refusals(TWO, before, BOTH, IMAGES, NOW, plan, ["quota"])
        assert plan.status.resize == begun.resize
        assert conditions_of(plan)["Resized"] == (False, "Moving")
        assert "PodsAccepted" in plan.status.condition("Resized").message  # type: ignore[union-attr]
        return plan

    for _ in range(3):
        plan = refused(begun)
    reverted = one_pass(ONE, plan.status, BOTH)
    assert (reverted.status.resize, conditions_of(reverted)["Resized"]) == (None, (False, "BrokenOff"))
    late = one_pass(TWO, plan.status, BOTH, after_s=600)
    assert (late.status.resize, late.status.failed_resize) == (None, TWO.wish)
    assert "quota" in late.events[-1].message
    accepted = one_pass(TWO, plan.status, BOTH)
    accepted.trial_pod = None
    take_refusals(TWO, plan.status, BOTH, IMAGES, NOW, accepted, [])
    assert accepted.status.resize == replace(begun.resize, tries=1)  # type: ignore[type-var]


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.MOVING])
def test_a_resize_that_does_not_begin_in_time_is_given_up(stage: Stage) -> None:
    status = at(stage, since="2030-01-01T00:00:00Z")
    waits = with_pods(everything(ONE), replace(NEW_SERVERS[0], trouble="no image", phase="Pending"))
    assert one_pass(TWO, status, waits, after_s=599).status.resize is not None
    plan = one_pass(TWO, status, waits, after_s=600)
    assert (plan.status.resize, plan.status.failed_resize) == (None, TWO.wish)
    assert conditions_of(plan)["Resized"] == (False, "ResizeFailed")
    assert "progressDeadlineSeconds" in plan.events[-1].message


def test_new_servers_that_fail_again_and_again_end_the_resize_and_not_the_job() -> None:
    worn = replace(NEW_SERVERS[1], num_restarts=TWO.spec.backoff_limit + 1, trouble="OOMKilled")
    plan = one_pass(TWO, at(Stage.STARTING), with_pods(everything(ONE), NEW_SERVERS[0], worn))
    assert (plan.status.phase, plan.status.resize, plan.status.failed_resize) == (
        Phase.RUNNING,
        None,
        TWO.wish,
    )
    assert "OOMKilled" in plan.events[-1].message


def test_restarts_before_a_new_server_took_over_do_not_count() -> None:
    limit = TWO.spec.backoff_limit
    worn = replace(NEW_SERVERS[1], num_restarts=limit + 1)
    pods = (NEW_SERVERS[0], worn)
    moved = with_pods(everything(ONE), *pods, coordinator("Succeeded"))
    plan = one_pass(TWO, at(Stage.MOVING, tries=2), moved)
    plan = one_pass(TWO, plan.status, with_pods(everything(ONE), *pods))
    assert plan.status.phase is Phase.RUNNING
    assert plan.delete_pods == []
    assert "RowsComplete" not in conditions_of(plan)
    again = with_pods(everything(ONE), NEW_SERVERS[0], replace(worn, num_restarts=2 * limit + 2))
    assert one_pass(TWO, plan.status, again).status.phase is Phase.FAILED


@pytest.mark.parametrize("changes", [{"num_restarts": 1}, {"uid": "another"}])
def test_a_new_server_that_starts_again_after_it_took_over_has_lost_its_rows(changes: dict[str, Any]) -> None:
    again = replace(NEW_SERVERS[1], **changes)
    other = replace(NEW_SERVERS[0], is_ready=True)
    plan = one_pass(TWO, at(Stage.ENDING), with_pods(everything(ONE), other, again))
    assert conditions_of(plan)["RowsComplete"] == (False, "ServerRestarted")
    assert plan.delete_pods == []  # the server finds out
    plan = one_pass(TWO, at(Stage.ENDING), with_pods(everything(ONE), NEW_SERVERS[0], again))
    assert plan.delete_pods == [again]  # no other server can tell it: a new pod begins without rows
    after = with_pods(everything(ONE), NEW_SERVERS[0], replace(again, is_deleting=True))
    assert one_pass(TWO, plan.status, after).delete_pods == []


RESIZED = replace(at(Stage.ENDING), resize=None)


def test_new_servers_that_answer_again_stay() -> None:
    """They restarted while the operator was away, and each began as another one answered."""
    again = [replace(one, num_restarts=1, is_ready=True) for one in NEW_SERVERS]
    plan = one_pass(TWO, RESIZED, with_pods(everything(ONE), *again))
    assert plan.delete_pods == []
    assert conditions_of(plan)["RowsComplete"] == (False, "ServerRestarted")


def test_a_new_server_that_is_replaced_is_counted_as_one_restart() -> None:
    again = replace(NEW_SERVERS[0], num_restarts=1)
    status, restarts, num_events = RESIZED, 0, 0
    for one in (
        again,
        replace(again, is_deleting=True),
        replace(again, uid="replaced", num_restarts=0, gathers=False),
    ):
        plan = one_pass(TWO, status, with_pods(everything(ONE), one, NEW_SERVERS[1]))
        status = plan.status
        restarts = status.roles[Role.PARAMETER_SERVER].restarts
        num_events += len([event for event in plan.events if event.reason == "ServerRestarted"])
    assert (restarts, num_events) == (1, 1)
    assert status.servers[NEW_SERVERS[0].name] == "replaced/0"


def test_a_new_server_that_still_gathers_is_replaced_once() -> None:
    """The StatefulSet kept `--sources`, as the API server refused its change."""
    status, num_deleted = RESIZED, 0
    pods = [replace(one, num_restarts=1) for one in NEW_SERVERS]
    for number in range(4):
        plan = one_pass(TWO, status, with_pods(everything(ONE), *pods))
        status, num_deleted = plan.status, num_deleted + len(plan.delete_pods)
        deleted = {one.uid for one in plan.delete_pods}
        pods = [
            replace(one, uid=f"{number}-{one.uid}", num_restarts=0) if one.uid in deleted else one
            for one in pods
        ]
    assert num_deleted == len(pods)


def test_a_job_that_failed_in_this_pass_begins_nothing() -> None:
    """For example by its old servers, which fail again and again."""
    worn = with_pods(everything(ONE, PARAMETER_SERVER={"num_restarts": 9}), *NEW_SERVERS)
    plan = one_pass(TWO, at(Stage.MOVING, tries=1), worn)
    assert plan.status.phase is Phase.FAILED
    assert plan.create_pods == []


def test_the_training_may_fail_meanwhile() -> None:
    failed = everything(ONE, NN_WORKER={"phase": "Failed", "is_ready": False})
    job = make_job(embeddingParameterServer={"replicas": 2}, restartPolicy="OnFailure")
    plan = one_pass(job, at(Stage.MOVING, tries=1), with_pods(failed, *NEW_SERVERS, coordinator("Running")))
    assert plan.status.phase is Phase.RESTARTING
    assert plan.status.resize is not None
    plan = one_pass(job, plan.status, with_pods(failed, *NEW_SERVERS, coordinator("Succeeded")))
    assert plan.status.server_generation == 1
    assert one_pass(job, plan.status, with_pods(BOTH)).status.roles[Role.PARAMETER_SERVER].replicas == 2


def test_a_suspended_job_waits_for_the_pods_of_both_generations() -> None:
    job = make_job(embeddingParameterServer={"replicas": 2}, suspend=True)
    plan = one_pass(job, at(Stage.MOVING), BOTH)
    assert set(NEW_SERVERS) <= set(plan.delete_pods)
    only_new = replace(BOTH, pods=NEW_SERVERS)
    assert one_pass(TWO, plan.status, only_new).status.phase is Phase.SUSPENDED


def test_servers_with_standbys_need_a_checkpoint() -> None:
    servers = {"replicas": 2, "standbys": 1}
    plan = one_pass(make_job(embeddingParameterServer=servers), RUNNING, everything(ONE))
    assert plan.status.resize is None
    assert "set resizeCheckpoint" in plan.events[-1].message


def test_a_coordinator_does_not_outlive_its_job() -> None:
    job = make_job()
    ended = "2030-01-01T00:00:00Z"
    done = replace(at(Stage.MOVING), phase=Phase.SUCCEEDED, completion_time=ended)
    running = Observation(objects={}, pods=(coordinator("Running"),))
    plan = one_pass(job, done, running, after_s=60)
    assert (plan.delete_pods, plan.status.resize) == (list(running.pods), None)
    assert conditions_of(plan)["Resized"] == (False, "Ended")
