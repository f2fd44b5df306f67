"""Manifests for the API server to judge, without any effect, before a job starts: one pod of each role."""

from __future__ import annotations

from collections.abc import Iterator

from persia_k8s.builders.manifest import Images, Manifest, Scale, make_manifest, make_pod, uses_tls
from persia_k8s.builders.pods import training_pod
from persia_k8s.builders.servers import stateful_set
from persia_k8s.job import Job
from persia_k8s.names import Role, object_name
from persia_k8s.status import JobStatus


def trial_manifests(job: Job, status: JobStatus, images: Images) -> Iterator[tuple[str, list[Manifest]]]:
    """For each role, its field in the spec and two manifests.

    The StatefulSet is applied: only an apply refuses unknown fields on each version of Kubernetes. The pod is
    created: only a pod meets quotas, Pod Security and the other admission controllers.
    """
    nats = {Role.NATS: 1} if job.has_own_nats else {}
    replicas = {**nats, **job.replicas}
    scale = Scale(replicas=replicas, suspensions=status.suspensions, tls=uses_tls(job, status))
    for role in scale.replicas:
        if role.is_server:
            template = stateful_set(job, role, scale, images)["spec"]["template"]
        else:
            pod = training_pod(job, role, 0, scale, images)
            template = {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}
        name = f"{object_name(job.name, role)}-trial"
        applied = {
            "replicas": 1,
            "serviceName": name,
            "selector": {"matchLabels": template["metadata"]["labels"]},
            "template": {**template, "spec": {**template["spec"], "restartPolicy": "Always"}},
        }
        yield (
            role.field,
            [make_manifest("StatefulSet", job, role, applied, name), make_pod(job, name, template)],
        )
