"""What the tests do with a control plane: requests, namespaces, the operator's process, jobs."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kube_api import Api

DEPLOY = Path(__file__).resolve().parents[2] / "k8s" / "deploy" / "base"
_T = TypeVar("_T")
# Of `job_manifest()`.
PODS = {"job-nats-0", "job-embedding-ps-0", "job-embedding-worker-0", "job-dataloader-0", "job-nn-worker-0"}


class Kube(Api):
    """Creates objects by their manifests."""

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        # As `kubectl create` does; older servers ignore it.
        status, answer = self.request("POST", f"{_collection(manifest)}?fieldValidation=Strict", manifest)
        assert status in (200, 201), answer
        created: dict[str, Any] = answer
        return created

    def apply(self, manifest: dict[str, Any]) -> None:
        """As `kubectl apply --server-side` does."""
        path = f"{_collection(manifest)}/{manifest['metadata']['name']}?fieldManager=test"
        status, answer = self.request("PATCH", path, manifest, "application/apply-patch+yaml")
        assert status in (200, 201), answer


_PLURALS = {"PersiaJob": "persiajobs"}
_CLUSTER_WIDE = ("Namespace", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")


def _collection(manifest: dict[str, Any]) -> str:
    version, kind = manifest["apiVersion"], manifest["kind"]
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    namespace = manifest["metadata"].get("namespace", "default")
    scope = "" if kind in _CLUSTER_WIDE else f"/namespaces/{namespace}"
    return f"{root}{scope}/{_PLURALS.get(kind, kind.lower() + 's')}"


def wait_until(condition: Callable[[], _T], seconds: float, what: str) -> _T:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Namespace:
    """A namespace of one test, and what tests do in it."""

    def __init__(self, kube: Kube, name: str) -> None:
        self.kube = kube
        self.name = name

    @staticmethod
    def create(kube: Kube) -> Namespace:
        """A new one."""
        name = f"test-{secrets.token_hex(4)}"
        kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        return Namespace(kube, name)

    def clear(self) -> None:
        """Without waiting: what has finalizers, or a grace period, would need an operator or a kubelet."""
        for job in self.list("persiajobs"):
            self.kube.request("DELETE", self.path("persiajobs", job))
            self.kube.merge(self.path("persiajobs", job), {"metadata": {"finalizers": None}})
        self.kube.request("DELETE", self.path("statefulsets"))
        self.kube.request("DELETE", self.path("pods"), {"gracePeriodSeconds": 0})

    def path(self, kind: str, name: str = "") -> str:
        roots = {
            "persiajobs": "/apis/persia.com/v1",
            "statefulsets": "/apis/apps/v1",
            "poddisruptionbudgets": "/apis/policy/v1beta1",
            "networkpolicies": "/apis/networking.k8s.io/v1",
            "podgroups": "/apis/scheduling.x-k8s.io/v1alpha1",
        }
        path = f"{roots.get(kind, '/api/v1')}/namespaces/{self.name}/{kind}"
        return f"{path}/{name}" if name else path

    def apply(self, job: dict[str, Any]) -> dict[str, Any]:
        metadata = {**job["metadata"], "namespace": self.name}
        return self.kube.create({**job, "metadata": metadata})

    def list(self, kind: str) -> dict[str, dict[str, Any]]:
        """Objects by name."""
        _, answer = self.kube.get(self.path(kind))
        return {item["metadata"]["name"]: item for item in answer["items"]}

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        status, answer = self.kube.get(self.path(kind, name))
        return answer if status == 200 else None

    def patch(self, kind: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        path = self.path(kind, name)
        status, answer = self.kube.merge(path, patch)
        assert status == 200, answer
        patched: dict[str, Any] = answer
        return patched

    def delete(self, kind: str, name: str) -> None:
        status, answer = self.kube.request("DELETE", self.path(kind, name))
        assert status in (200, 202), answer

    def status(self, job: str) -> dict[str, Any]:
        found = self.get("persiajobs", job)
        return (found or {}).get("status", {})

    def expire_certificates(self, job: str) -> None:
        """As if they were about to end."""
        soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
        path = f"{self.path('persiajobs', job)}/status"
        status, answer = self.kube.merge(path, {"status": {"certificatesUntil": soon}})
        assert status == 200, answer

    def await_phase(self, job: str, phase: str, seconds: float = 120) -> dict[str, Any]:
        def has_phase() -> dict[str, Any] | None:
            status = self.status(job)
            return status if status.get("phase") == phase else None

        try:
            return wait_until(has_phase, seconds, f"{job} is {phase}")
        except AssertionError as error:
            pods = {name: pod["status"] for name, pod in self.list("pods").items()}
            raise AssertionError(f"{error}; it is {self.status(job)}, pods {pods}") from error

    def await_(self, condition: Callable[[], _T], what: str, seconds: float = 120) -> _T:
        return wait_until(condition, seconds, what)

    def events(self, job: str) -> list[tuple[str, str]]:
        """Reasons and messages."""
        events = self.list("events").values()
        return [(e["reason"], e["message"]) for e in events if e["involvedObject"]["name"] == job]

    def await_event(self, job: str, reason: str) -> str:
        def message() -> str | None:
            return next((text for found, text in self.events(job) if found == reason), None)

        return str(wait_until(message, 120, f"event {reason} of {job}; there are {self.events(job)}"))


def limit_pods(namespace: Namespace, number: int) -> None:
    """A quota; no controller of the tests fills its status, by which the API server judges."""
    namespace.patch("resourcequotas", "pods", {"spec": {"hard": {"pods": str(number)}}})
    status = {"hard": {"pods": str(number)}, "used": {"pods": str(len(namespace.list("pods")))}}
    code, answer = namespace.kube.merge(namespace.path("resourcequotas", "pods/status"), {"status": status})
    assert code == 200, answer


def create_quota(namespace: Namespace, number: int) -> None:
    metadata = {"name": "pods", "namespace": namespace.name}
    namespace.kube.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {}})
    limit_pods(namespace, number)


class OperatorProcess:
    """The operator as it is deployed: the command, with the rights of its service account."""

    def __init__(self, command: list[str], kubeconfig: Path, log: Path) -> None:
        self._command = command
        self._env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONUNBUFFERED": "1"}
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=subprocess.STDOUT
            )

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def memory_mib(self) -> float:
        """Resident memory."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None


def job_manifest(name: str = "job", **spec: Any) -> dict[str, Any]:
    """The smallest job; `spec` adds to it, role by role."""
    roles = {
        "embeddingParameterServer": {"replicas": 1},
        "embeddingWorker": {"replicas": 1},
        "nnWorker": {"replicas": 1},
        "dataloader": {"replicas": 1},
    }
    manifest_spec = {"persiaEnv": {"PERSIA_EMBEDDING_CONFIG": "/config/embedding.yml"}, **roles, **spec}
    return {
        "apiVersion": "persia.com/v1",
        "kind": "PersiaJob",
        "metadata": {"name": name},
        "spec": manifest_spec,
    }
