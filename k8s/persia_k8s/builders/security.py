"""What closes a job to others: its secret, and its network policies."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from persia_k8s.builders.manifest import (
    SECRET_FILE,
    SECRET_KEYS,
    Manifest,
    labels,
    make_manifest,
    object_metadata,
)
from persia_k8s.job import Job
from persia_k8s.names import GROUP, METRICS_PORT, Role, object_name, secret_name

# A namespace with this label may read the job's metrics: the one in which Prometheus runs.
_METRICS_LABEL = f"{GROUP}/metrics"


def job_secret(job: Job, suspensions: int, random: bytes) -> Manifest:
    """The Secret that the job's pods mount. `random`: 32 bytes."""
    texts = {SECRET_FILE: f"persia1.job.{random.hex()}"}
    texts |= {role: _limited(random, role) for role in SECRET_KEYS.values()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_metadata(job, secret_name(job.name, job.uid, suspensions), labels(job, None)),
        "type": "Opaque",
        "immutable": True,
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()},
    }


def _limited(secret: bytes, role: str) -> str:
    """The credential of one role: its secret, and the digest of the monitor's token (ADR 26)."""
    monitor = hmac.digest(_role_secret(secret, "monitor"), b"persia/1/http/*/monitor", "sha256")
    digest = hashlib.sha256(monitor.hex().encode())
    return f"persia1.{role}.{_role_secret(secret, role).hex()}{digest.hexdigest()}"


def _role_secret(secret: bytes, role: str) -> bytes:
    return hmac.digest(secret, f"persia/1/role/{role}".encode(), "sha256")


def network_policies(job: Job) -> list[Manifest]:
    """Only the job's own pods reach its pods; exceptions are metrics and requests for predictions."""
    last = job.ranks_per_node if job.spec.enable_metrics else 0
    metrics = {
        "from": [{"namespaceSelector": {"matchLabels": {_METRICS_LABEL: "allowed"}}}],
        "ports": [{"protocol": "TCP", "port": METRICS_PORT + rank} for rank in range(last)],
    }
    # Without a namespace selector it means pods of the job's own namespace.
    own = {"from": [{"podSelector": {"matchLabels": labels(job, None)}}]}
    ingress = [own, *([metrics] if last else [])]
    policies = [_policy(job, None, f"{job.name}-job", ingress)]
    if job.is_inference:
        requests = {"ports": [{"protocol": "TCP", "port": Role.INFERENCE.port}]}
        policies.append(_policy(job, Role.INFERENCE, object_name(job.name, Role.INFERENCE), [requests]))
    return policies


def _policy(job: Job, role: Role | None, name: str, ingress: list[Any]) -> Manifest:
    selector = {"matchLabels": labels(job, role)}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    return make_manifest("NetworkPolicy", job, role, spec, name)
