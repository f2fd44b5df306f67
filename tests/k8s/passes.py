"""What tests of the operator's decisions share: a job, what is observed of it, and a pass over it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from harness import job_manifest
from persia_k8s.builders.manifest import Images, Scale, spec_hash
from persia_k8s.builders.servers import stateful_set
from persia_k8s.job import Job
from persia_k8s.names import Role, pod_name
from persia_k8s.observation import Observation, PodView
from persia_k8s.reconcile import Plan, reconcile
from persia_k8s.status import JobStatus, Phase, RoleStatus

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


def conditions_of(plan: Plan) -> dict[str, tuple[bool, str]]:
    return {c.type: (c.status, c.reason) for c in plan.status.conditions}
