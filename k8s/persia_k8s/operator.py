"""The operator: kopf tells it of jobs, a watch of pods; `reconcile` decides, `Cluster` carries out.

For each job there is one task, which looks at it after every change and once in a while, and only ever goes
by what it sees then. So it may be ended and started again at any time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import kopf

from persia_k8s.builders.manifest import Images, Manifest
from persia_k8s.builders.security import job_secret
from persia_k8s.builders.trial import trial_manifests
from persia_k8s.certificates import certificate_secrets
from persia_k8s.cluster import Cluster, ClusterError
from persia_k8s.errors import PersiaK8sError, SpecError
from persia_k8s.job import Job
from persia_k8s.leader import Leadership
from persia_k8s.names import FINALIZER, GROUP, MASTER_SECRET, PLURAL, VERSION, Role, pod_name
from persia_k8s.progress import last_progress
from persia_k8s.reconcile import Event, Plan, lacks_pods, parse_time, reconcile, take_refusals, time_text
from persia_k8s.status import Condition, JobStatus, Phase

_RETRY_S, _LAST_RETRY_S = 5.0, 60.0
_CANCEL_S = 60.0  # longer than a request may take
_SETTLE_S = 0.2  # a start or an end is many changes at once
_PROGRESS_INTERVAL_S = 10.0
_PROGRESS_LINES = 200
_JOBS_AT_FULL_PACE = 50


def run_operator(
    namespaces: Collection[str],
    liveness_port: int,
    images: Images,
    lease: tuple[str, str] | None = None,
    master: tuple[str, str] = MASTER_SECRET,
) -> None:
    """Runs until SIGTERM or SIGINT. `lease`: namespace and name; without one, no other operator may run.

    `master`: as in `Operator`.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # a line for each change of each pod
    cluster = Cluster()
    cluster.check_installed()
    leadership = None if lease is None else Leadership(cluster, *lease)
    if leadership is not None:
        leadership.acquire(liveness_port)
    Operator(cluster, images, namespaces, master).run(liveness_port)
    if leadership is not None:
        leadership.release()


class Operator:
    """The handlers, and what they share. All but the watch of pods lives on kopf's event loop."""

    def __init__(
        self,
        cluster: Cluster,
        images: Images,
        namespaces: Collection[str],
        master: tuple[str, str] = MASTER_SECRET,
    ) -> None:
        """`namespaces`: none for all. `master`: namespace and name of the Secret behind the jobs' CAs."""
        self._cluster = cluster
        self._images = images
        self._namespaces = namespaces
        self._master = master
        self._changes: dict[tuple[str | None, str], asyncio.Event] = {}
        self._complaints: dict[tuple[str, str], str] = {}  # what hinders a job now
        self._failures: dict[
            tuple[str, str], int
        ] = {}  # passes of a job that have failed, one after the other
        # Generation of a spec that is refused, and when the API server is asked again.
        self._refused: dict[tuple[str, str], tuple[int, float]] = {}
        # Not kopf's global registry: the handlers are methods of this object.
        self._registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=self._registry)(self._configure)
        kopf.on.startup(registry=self._registry)(self._start_watching)
        kopf.on.login(registry=self._registry)(_log_in)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=self._registry)(self._on_job)
        kopf.daemon(
            GROUP, VERSION, PLURAL, registry=self._registry, cancellation_timeout=_CANCEL_S, backoff=_RETRY_S
        )(self._look_after)

    def run(self, liveness_port: int) -> None:
        """Blocks until a signal ends it."""
        kopf.run(
            registry=self._registry,
            standalone=True,  # the lease sees to it that one works
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            liveness_endpoint=f"http://0.0.0.0:{liveness_port}/healthz" if liveness_port else None,
        )

    async def _configure(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.persistence.finalizer = FINALIZER
        settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
        settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
        settings.posting.loggers = False  # events are what reconcile says, not log lines
        # Looking for new resources and namespaces would take rights over all of the cluster.
        settings.scanning.disabled = True
        # A silent connection is one that may be dead.
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330

    async def _on_job(self, namespace: str | None, name: str, **_: Any) -> None:
        self._wake(namespace, name)

    async def _start_watching(self, **_: Any) -> None:
        loop = asyncio.get_running_loop()
        for namespace in self._namespaces or (None,):
            # A thread, as the client blocks; a daemon, as the watch has no way to be ended early.
            threading.Thread(
                target=self._watch_pods, args=(loop, namespace), name="pods", daemon=True
            ).start()

    def _watch_pods(self, loop: asyncio.AbstractEventLoop, namespace: str | None) -> None:
        """Watches pods on a thread until the process ends. The next pass finds what a broken watch misses."""
        while True:
            try:
                for job in self._cluster.pod_changes(namespace):
                    # Events of asyncio may be set on their loop only.
                    loop.call_soon_threadsafe(self._wake, *job)
            except PersiaK8sError as error:
                logging.warning("%s", error)
                time.sleep(_RETRY_S)
            except RuntimeError:  # the loop is closed: the process ends
                return

    def _wake(self, namespace: str | None, name: str) -> None:
        if (change := self._changes.get((namespace, name))) is not None:
            change.set()

    async def _look_after(
        self, namespace: str | None, name: str, body: kopf.Body, stopped: kopf.DaemonStopped, **_: Any
    ) -> None:
        assert namespace is not None, "PersiaJobs are namespaced"
        change = self._changes[namespace, name] = asyncio.Event()
        try:
            while not stopped:
                # Before the look: a change during it must not be missed.
                change.clear()
                look_again_s = await self._pass(namespace, name, body)
                await _wait(change, look_again_s)
        finally:
            self._changes.pop((namespace, name), None)
            self._complaints.pop((namespace, name), None)
            self._failures.pop((namespace, name), None)
            self._refused.pop((namespace, name), None)

    async def _pass(self, namespace: str, name: str, body: kopf.Body) -> float:
        """One look at a job; returns the seconds after which to look again at the latest."""
        try:
            plan = await _to_the_end(self._look, namespace, name)
        except ClusterError as error:
            # Any failure may be temporary, and must not end the task.
            self._complain(namespace, name, body, str(error))
            num_failures = self._failures[namespace, name] = self._failures.get((namespace, name), 0) + 1
            return float(min(_RETRY_S * 2 ** (num_failures - 1), _LAST_RETRY_S))
        self._failures.pop((namespace, name), None)
        self._complaints.pop((namespace, name), None)
        if plan is None:
            return 3600.0  # being deleted: kopf ends the task
        for event in plan.events:
            post = kopf.warn if event.is_warning else kopf.info
            post(body, reason=event.reason, message=event.message)
            logging.info("%s/%s: %s: %s", namespace, name, event.reason, event.message)
        return min(self._paced(plan.look_again_s), plan.due_s)

    def _paced(self, seconds: float) -> float:
        """Looks that only make sure come less often where there are many jobs: traffic stays bounded."""
        if seconds < _PROGRESS_INTERVAL_S:
            return seconds
        return max(seconds, seconds * len(self._changes) / _JOBS_AT_FULL_PACE)

    def _complain(self, namespace: str, name: str, body: kopf.Body, message: str) -> None:
        """Reports each new reason once: a retry every few seconds would fill the list of events."""
        if self._complaints.get((namespace, name)) != message:
            self._complaints[namespace, name] = message
            kopf.warn(body, reason="Retrying", message=message)
            logging.warning("%s/%s: %s", namespace, name, message)

    def _look(self, namespace: str, name: str) -> Plan | None:
        """Sees, decides, acts; the status is written last, so that an interrupted pass is taken again."""
        resource = self._cluster.job(namespace, name)
        if resource is None or resource["metadata"].get("deletionTimestamp"):
            return None
        before = JobStatus.from_dict(resource.get("status"))
        now = datetime.now(timezone.utc)
        try:
            job = Job.from_object(resource)
        except SpecError as error:
            plan = _refuse(before, str(error), now)
        else:
            job, known = self._match_scale(job, before)
            plan = self._act(job, known, now)
        # Written only when it differs: each write is a change, which would wake this task again.
        if plan.status != before:
            self._cluster.patch_status(namespace, name, plan.status.to_dict())
        return plan

    def _act(self, job: Job, before: JobStatus, now: datetime) -> Plan:
        generation, again = self._refused.get((job.namespace, job.name), (0, 0.0))
        # A pass that writes a status wakes the task again, so only the clock bounds requests for such a job.
        if generation == job.generation and (left_s := again - time.monotonic()) > 0:
            return Plan(status=before, due_s=left_s)
        observed = self._cluster.observe(job.namespace, job.name, job.uid)
        plan = reconcile(job, before, observed, self._images, now)
        refusals: list[str] = []
        # Once for each spec that is accepted: it costs two requests for each role. A suspended job may be
        # waiting for the very quota that would refuse it.
        is_new = before.checked_generation != job.generation
        if (
            (is_new or lacks_pods(before, observed, now))
            and not plan.status.phase.is_final
            and not job.spec.suspend
        ):
            refusals = self._try_out(job, before)
            plan.status = replace(
                plan.status, checked_generation=0 if refusals and is_new else job.generation
            )
        starts_nothing = bool(refusals) and is_new and not before.start_time
        if starts_nothing:
            plan = Plan(status=replace(before, observed_generation=job.generation), due_s=plan.due_s)
        else:
            refusals += self._carry_out(job, plan)
        take_refusals(job, before, observed, self._images, now, plan, refusals)
        if starts_nothing and not plan.status.phase.is_final:
            wait_s = min(plan.look_again_s, plan.due_s)
            self._refused[job.namespace, job.name] = (job.generation, time.monotonic() + wait_s)
        self._read_progress(job, before, plan)
        return plan

    def _match_scale(self, job: Job, before: JobStatus) -> tuple[Job, JobStatus]:
        """Lets `spec.replicas` follow the role's own number: the last change counts."""
        own = job.roles[job.scaled_role].replicas
        if job.spec.replicas is None or before.scaled_from not in (0, own):
            generation = self._cluster.set_replicas(job.namespace, job.name, own)
            spec = job.spec.model_copy(update={"replicas": own})
            job = replace(job, spec=spec, generation=generation or job.generation)
        return job, replace(before, scaled_from=own)

    def _try_out(self, job: Job, before: JobStatus) -> list[str]:
        """What the API server would refuse of the pods of this spec, each with its field."""
        refusals = []
        for field, manifests in trial_manifests(job, before, self._images):
            for manifest in manifests:
                if refusal := _refusal(self._cluster.try_out, manifest):
                    refusals.append(f"spec.{field}: {refusal}")
                    break  # the pod would be refused for the same reason
        return refusals

    def _carry_out(self, job: Job, plan: Plan) -> list[str]:
        """Returns what the API server refuses: one wrong pod must not keep the operator from the others."""
        namespace = job.namespace
        if plan.issues_certificates:
            until = parse_time(plan.status.certificates_until)
            now = datetime.now(timezone.utc)
            for manifest in certificate_secrets(job, self._cluster.secrets.master(*self._master), now, until):
                self._cluster.secrets.replace(manifest)
        if plan.create_pods or any(manifest["kind"] == "StatefulSet" for manifest in plan.apply):
            self._cluster.secrets.create(job_secret(job, plan.status.suspensions, secrets.token_bytes(32)))
        refusals = [_refusal(self._cluster.apply, manifest) for manifest in plan.apply]
        for kind, name in plan.delete_objects:
            self._cluster.delete(namespace, kind, name)
        for pod in plan.delete_pods:
            self._cluster.delete_pod(namespace, pod)
        refusals += [_refusal(self._cluster.create_pod, manifest) for manifest in plan.create_pods]
        if plan.trial_pod is not None:
            refusals.append(_refusal(self._cluster.try_out, plan.trial_pod))
            if not refusals[-1]:
                plan.trial_pod = None
        if plan.delete_job:
            self._cluster.delete_job(namespace, job.name)
        return [refusal for refusal in refusals if refusal]

    def _read_progress(self, job: Job, before: JobStatus, plan: Plan) -> None:
        """While the job runs and once at its end; a log that cannot be read says nothing."""
        if (
            job.is_inference
            or before.phase.is_final
            or plan.status.phase not in (Phase.RUNNING, Phase.SUCCEEDED)
        ):
            return
        plan.look_again_s = min(plan.look_again_s, _PROGRESS_INTERVAL_S)
        first = pod_name(job.name, Role.NN_WORKER, 0)
        try:
            log = self._cluster.pod_log(job.namespace, first, _PROGRESS_LINES)
        except PersiaK8sError as error:
            logging.debug("%s/%s: %s", job.namespace, job.name, error)
            return
        plan.status = replace(plan.status, progress={**plan.status.progress, **last_progress(log)})


def _refusal(request: Callable[[Manifest], None], manifest: Manifest) -> str:
    """Sends a request; returns why the API server refuses its object, "" if it does not."""
    try:
        request(manifest)
    except ClusterError as error:
        if not error.is_refusal:
            raise
        return str(error)
    return ""


def _log_in(**arguments: Any) -> Any:
    """Logs in as the pod's service account, whose token is read again when it changes, or by kubeconfig."""
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


def _refuse(before: JobStatus, message: str, now: datetime) -> Plan:
    new = Condition(type="SpecApplied", status=False, reason="InvalidSpec", message=message)
    old = before.condition("SpecApplied")
    is_news = old is None or old.message != message
    events = [Event("InvalidSpec", message, is_warning=True)] if is_news else []
    return Plan(status=before.with_condition(new, time_text(now)), events=events)


async def _to_the_end(look: Callable[[str, str], Plan | None], namespace: str, name: str) -> Plan | None:
    """Runs `look` on a thread: the client blocks, and kopf answers its liveness probe on this loop.

    Returns when the thread has ended, also if it is cancelled: kopf takes the return for the end of all work
    on the job. A look that outlived it would give its status to a new job of the same name.
    """
    task = asyncio.ensure_future(asyncio.to_thread(look, namespace, name))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])  # at most as long as its requests may take
        raise


async def _wait(change: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(change.wait(), seconds)
        await asyncio.sleep(_SETTLE_S)
    except asyncio.TimeoutError:
        pass
