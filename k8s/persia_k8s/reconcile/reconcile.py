"""The states of a job, and what each asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from persia_k8s.builders.manifest import Images, Scale, label_selector, uses_tls
from persia_k8s.job import Job
from persia_k8s.names import Role, object_name
from persia_k8s.observation import Observation
from persia_k8s.reconcile import finish, health, live_resize, move_rows, resize, servers, training
from persia_k8s.reconcile.plan import Plan, Situation, time_text
from persia_k8s.reconcile.refuse import judge
from persia_k8s.reconcile.suspend import resume, suspend
from persia_k8s.status import JobStatus, Phase, RoleStatus


def reconcile(job: Job, before: JobStatus, observed: Observation, images: Images, now: datetime) -> Plan:
    """Decides what to do for `job`, of which `before` is the stored status."""
    # Decides whether the number of servers may still change freely, so it is asked before all else.
    has_training = training.has_started(before, observed)
    situation = _look(job, before, observed, images, now, has_training=has_training)
    replicas = situation.scale.replicas
    situation.update(
        observed_generation=job.generation,
        selector=label_selector(job, job.scaled_role),
        replicas=replicas[job.scaled_role],
    )
    if before.phase.is_final:
        live_resize.forget(situation)
        finish.clean_up(situation, is_tidy=move_rows.remove_checkpoint(situation))
    elif not finish.has_run_out(situation):
        _go_on(situation, has_training)
    _count_roles(situation)
    health.report(situation)
    return situation.plan


def take_refusals(
    job: Job,
    before: JobStatus,
    observed: Observation,
    images: Images,
    now: datetime,
    plan: Plan,
    refusals: Sequence[str],
) -> None:
    """Notes in `plan` what the API server refuses of the job; nothing is the good case."""
    situation = replace(_look(job, before, observed, images, now, has_training=False), plan=plan)
    if plan.trial_pod is not None:
        live_resize.take_refusal(situation)
    if not plan.status.phase.is_final and not job.spec.suspend:
        judge(situation, refusals)


def _look(
    job: Job, before: JobStatus, observed: Observation, images: Images, now: datetime, *, has_training: bool
) -> Situation:
    wanted_standbys = job.spec.embedding_parameter_server.standbys
    if before.standbys is not None:
        job = job.with_standbys(before.standbys)
    if before.failed_resize == job.generation:  # noted by an earlier operator
        before = replace(before, failed_resize=job.wish)
    replicas = resize.accepted_replicas(job, before, observed, has_training=has_training)
    scale = Scale(
        replicas=replicas,
        attempt=before.attempt,
        suspensions=before.suspensions,
        tls=uses_tls(job, before),
        generation=before.server_generation,
    )
    plan = Plan(status=before)
    role = Role.PARAMETER_SERVER
    others = {pod for pod in observed.of_role(role) if pod.generation != before.server_generation}
    observed = replace(observed, pods=tuple(pod for pod in observed.pods if pod not in others))
    return Situation(
        job=job,
        wanted_standbys=wanted_standbys,
        before=before,
        observed=observed,
        images=images,
        now=now,
        scale=scale,
        plan=plan,
        others=tuple(sorted(others, key=lambda pod: pod.name)),
    )


def _go_on(situation: Situation, has_training: bool) -> None:
    before = situation.before
    if situation.job.spec.suspend:
        suspend(situation)
    elif before.phase is Phase.SUSPENDED:
        resume(situation)
    elif before.phase is Phase.RESTARTING:
        training.restart(situation)
        live_resize.go_on(situation)
    # While it dumps, the training runs and may fail or end, which `_run` looks for.
    elif before.phase is Phase.RESIZING and not before.is_dumping:
        move_rows.go_on(situation)
    else:
        _run(situation, has_training)


def _report_serving(situation: Situation, are_ready: bool) -> None:
    """A job that answers requests has nothing else to start, and does not end."""
    if situation.before.phase is Phase.PENDING and are_ready:
        address = f"{object_name(situation.job.name, Role.INFERENCE)}:{Role.INFERENCE.port}"
        situation.update(
            phase=Phase.RUNNING, start_time=situation.before.start_time or time_text(situation.now)
        )
        situation.event("Started", f"predictions can be asked for at {address}")


def _run(situation: Situation, has_training: bool) -> None:
    are_ready = servers.provide(situation, has_training=has_training)
    if situation.job.is_inference:
        _report_serving(situation, are_ready)
        return
    if not situation.plan.status.phase.is_final:
        live_resize.go_on(situation)  # the servers do it among themselves, whatever the training does
    # A training that has started survives a restart of its servers; one that has not waits for them.
    if not are_ready and not has_training:
        return
    if training.has_failed(situation):
        move_rows.break_off(situation, "the training has failed meanwhile")
        return
    if training.has_succeeded(situation):
        move_rows.break_off(situation, "the training has ended first")
        finish.succeed(situation)
        return
    if situation.before.is_dumping:
        training.provide(situation)
        move_rows.dump(situation)
        return
    if move_rows.is_wanted(situation):
        move_rows.begin(situation)
        return
    training.provide(situation)
    if situation.before.phase is Phase.PENDING and training.all_started(situation):
        situation.update(
            phase=Phase.RUNNING, start_time=situation.before.start_time or time_text(situation.now)
        )
        health.report_start(situation)
        situation.event("Started", "all data loaders and NN workers have started")


def _count_roles(situation: Situation) -> None:
    situation.update(
        roles={
            role: RoleStatus(
                replicas=replicas, ready=_num_ready(situation, role), restarts=_num_restarts(situation, role)
            )
            for role, replicas in situation.scale.replicas.items()
        }
    )


def _num_ready(situation: Situation, role: Role) -> int:
    pods = [pod for pod in situation.observed.of_role(role) if not pod.is_deleting]
    # A pod that has succeeded counts: a role that has finished must not look as if pods were missing.
    return sum(pod.phase == "Succeeded" or (pod.is_ready and not pod.is_finished) for pod in pods)


def _num_restarts(situation: Situation, role: Role) -> int:
    """Of all pods that the role has had: a pod that is replaced counts its own from 0 again."""
    before, status = situation.before, situation.plan.status
    if role is Role.NN_WORKER:
        return status.restarts
    known = before.roles[role].restarts if role in before.roles else 0
    if role is Role.DATA_LOADER:
        return known + max(0, status.loader_restarts - before.loader_restarts)
    return known + servers.num_new_restarts(situation, role)
