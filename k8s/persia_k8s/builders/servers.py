"""Servers: their StatefulSets, whose pods keep their names, services and disruption budgets.

Services give the broker an address, and single pods DNS names; budgets bound node drains.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from typing import Any

from persia_k8s.builders.manifest import (
    Images,
    Manifest,
    Scale,
    labels,
    make_manifest,
    metrics_annotations,
    metrics_ports,
    pod_template,
)
from persia_k8s.job import Job, RoleSpec
from persia_k8s.names import (
    ATTEMPT_LABEL,
    GENERATION_LABEL,
    PAIR,
    ROLE_LABEL,
    SOURCES_LABEL,
    Role,
    object_name,
    pod_address,
)

_SERVER = (
    "exec persia-launcher embedding-parameter-server --port={port} "
    '--replica-index="${{POD_NAME##*-}}" --replica-size={replicas}{more}'
)
# A pod's number is the end of its name. A label holds it too, but only since Kubernetes 1.28.
_SERVERS = {
    Role.PARAMETER_SERVER: _SERVER,
    Role.STANDBY: f"{_SERVER} --standby",
    # Others take the largest number that a worker tells. Each says only that it is there itself, which stays
    # true when workers come and go, also of a container that is started again.
    Role.EMBEDDING_WORKER: (
        'index="${{POD_NAME##*-}}"; exec persia-launcher embedding-worker --port={port} '
        '--replica-index="$index" --replica-size="$((index + 1))"{more}'
    ),
}
_WITHOUT_METRICS = (Role.NATS,)
_PROBE_S = 5
# An embedding worker listens once it has found all parameter servers, for which it waits 300 s by default.
_START_S = 600
# An embedding worker that stops serves the batches that it holds for so long, if ranks take so long.
_DEADLINE_S = 300
_GRACE_S = 30


def stateful_set(job: Job, role: Role, scale: Scale, images: Images) -> Manifest:
    """The StatefulSet of a server role.

    Its pods change with their template only when they are deleted: which may be, and when, the operator
    knows, as parameter servers lose their rows. Those of an inference job, which lose nothing, are replaced
    one by one, each once the one before is ready.
    """
    if role is Role.NATS:
        nats = job.spec.nats
        spec = RoleSpec(
            replicas=1, image=nats.image, resources=nats.resources, pod_template=nats.pod_template
        )
    else:
        spec = job.roles[role]
    has_metrics = role not in _WITHOUT_METRICS
    container = {
        "ports": [{"name": "rpc", "containerPort": role.port}, *(metrics_ports(job) if has_metrics else [])],
        "startupProbe": _probe(job, role, _sign_of_start(job, role, scale), failures=_START_S // _PROBE_S),
        "readinessProbe": _probe(job, role, "/readyz", failures=2),
        "livenessProbe": _probe(job, role, "/healthz", failures=6),
    }
    own_labels = _own_labels(role, scale)
    template = pod_template(
        job,
        role,
        spec,
        scale,
        images,
        _command(job, role, scale),
        restart_policy="Always",
        container=container,
        more_labels=own_labels,
        annotations=metrics_annotations(job) if has_metrics else {},
        terminationGracePeriodSeconds=_grace_s(job, role, spec),
        **({"affinity": _apart(job)} if role is Role.STANDBY and not spec.affinity else {}),
    )
    set_spec = {
        "replicas": scale.replicas[role],
        "serviceName": object_name(job.name, role),
        # Servers need no order among themselves: one after the other they would only start later.
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate" if job.is_inference else "OnDelete"},
        "selector": {"matchLabels": {**labels(job, role), **_generation_label(role, scale)}},
        "template": template,
    }
    generation = scale.generation if role is Role.PARAMETER_SERVER else 0
    return make_manifest("StatefulSet", job, role, set_spec, object_name(job.name, role, generation))


def _own_labels(role: Role, scale: Scale) -> dict[str, str]:
    if role is Role.EMBEDDING_WORKER:
        # New ones for each start of the training: the old ones hold batches of loaders that are gone.
        return {ATTEMPT_LABEL: str(scale.attempt)}
    gathers = role is Role.PARAMETER_SERVER and scale.sources
    return {**_generation_label(role, scale), **({SOURCES_LABEL: str(scale.sources)} if gathers else {})}


def _generation_label(role: Role, scale: Scale) -> dict[str, str]:
    # None for the first generation: its pods and sets stay what they were before there were generations.
    has_label = role is Role.PARAMETER_SERVER and scale.generation
    return {GENERATION_LABEL: str(scale.generation)} if has_label else {}


def _sign_of_start(job: Job, role: Role, scale: Scale) -> str:
    """The path that answers once a server has started."""
    if role is Role.PARAMETER_SERVER and scale.sources:  # ready when it has all rows, as below
        return "/healthz"
    # A standby is ready when it has all rows, which may be copied for hours; so is a server that became one.
    return "/healthz" if role in PAIR and Role.STANDBY in job.roles else "/readyz"


def _apart(job: Job) -> Manifest:
    """Not on a node of a parameter server, if another one has room: a node takes its pods along."""
    term = {
        "labelSelector": {"matchLabels": labels(job, Role.PARAMETER_SERVER)},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _command(job: Job, role: Role, scale: Scale) -> list[str]:
    if role is Role.NATS:
        size = job.spec.nats.max_payload
        return [
            "persia-launcher",
            "nats-server",
            "--host=$(POD_IP)",
            f"--port={role.port}",
            f"--max-payload={size}",
        ]
    if job.spec.inference is None:
        more = f" --generation={scale.generation}" if role in PAIR and scale.generation else ""
        more += f" --sources={scale.sources}" if role is Role.PARAMETER_SERVER and scale.sources else ""
    elif role is Role.INFERENCE:
        workers = _addresses(job, Role.EMBEDDING_WORKER, scale)
        return [
            *("persia-launcher", "serve", job.spec.inference.checkpoint),
            f"--model-name={job.spec.inference.model_name}",
            f"--port={role.port}",
            *(f"--embedding-worker={address}" for address in workers),
            *job.spec.inference.arguments,
        ]
    elif role is Role.PARAMETER_SERVER:
        more = f" --checkpoint={shlex.quote(job.spec.inference.checkpoint)}"
    else:
        servers = _addresses(job, Role.PARAMETER_SERVER, scale)
        more = "".join(f" --parameter-server={address}" for address in servers)
    script = _SERVERS[role].format(port=role.port, replicas=scale.replicas[role], more=more)
    return ["sh", "-c", script]


def _addresses(job: Job, role: Role, scale: Scale) -> Iterable[str]:
    return (pod_address(job.name, role, index) for index in range(scale.replicas[role]))


def _grace_s(job: Job, role: Role, spec: RoleSpec) -> int:
    """Seconds that a pod may take to end cleanly."""
    if role is not Role.EMBEDDING_WORKER:
        return _GRACE_S
    variables = (*job.spec.env, *spec.env)
    deadlines = [v.get("value", "") for v in variables if v["name"] == "PERSIA_DEADLINE_SEC"]
    try:
        return _GRACE_S + math.ceil(float(deadlines[-1]) if deadlines else _DEADLINE_S)
    except (ValueError, OverflowError):  # not a number of seconds: the worker says so, and does not start
        return _GRACE_S


def _probe(job: Job, role: Role, path: str, failures: int) -> dict[str, Any]:
    """Servers without a port for metrics are asked whether they listen."""
    has_http = job.spec.enable_metrics and role not in _WITHOUT_METRICS
    return {
        **({"httpGet": {"path": path, "port": "metrics"}} if has_http else {"tcpSocket": {"port": "rpc"}}),
        "periodSeconds": _PROBE_S,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def services(job: Job) -> list[Manifest]:
    is_reached = {Role.PARAMETER_SERVER, Role.STANDBY, Role.EMBEDDING_WORKER, Role.NN_WORKER, Role.INFERENCE}
    roles = [role for role in job.roles if role in is_reached]
    return [_service(job, role) for role in ([Role.NATS, *roles] if job.has_own_nats else roles)]


def _service(job: Job, role: Role) -> Manifest:
    spec: dict[str, Any] = {
        "selector": labels(job, role),
        "ports": [{"name": "rpc", "port": role.port, "targetPort": role.port, "protocol": "TCP"}],
    }
    if role not in (Role.NATS, Role.INFERENCE):
        # Headless, for names of pods. The ranks meet at node 0 before it can be called ready.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return make_manifest("Service", job, role, spec, object_name(job.name, role))


def disruption_budget(job: Job, role: Role, scale: Scale) -> Manifest:
    """The budget of a role. A number of pods to keep: single pods have no controller that knows a share.

    That of parameter servers is also that of their standbys: of a pair, one must stay.
    """
    replicas = scale.replicas[role]
    selector: Manifest = {"matchLabels": labels(job, role)}
    if role is Role.PARAMETER_SERVER and Role.STANDBY in scale.replicas:
        replicas += scale.replicas[Role.STANDBY]
        either = {"key": ROLE_LABEL, "operator": "In", "values": [each.suffix for each in PAIR]}
        selector = {"matchLabels": labels(job, None), "matchExpressions": [either]}
    kept = max(0, replicas - (0 if role is Role.NATS else job.roles[role].max_unavailable))
    spec = {"minAvailable": kept, "selector": selector}
    return make_manifest("PodDisruptionBudget", job, role, spec, object_name(job.name, role))
