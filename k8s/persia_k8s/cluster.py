"""The API server: the few requests that the operator and the REST service make, each with a deadline."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes import client, config, dynamic
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from persia_k8s.builders import Manifest, spec_hash
from persia_k8s.errors import PersiaK8sError
from persia_k8s.names import GROUP, JOB_LABEL, KIND, VERSION
from persia_k8s.observation import Observation, PodView

__all__ = ["Cluster", "ClusterError"]

_FIELD_MANAGER = "persia-operator"
_TIMEOUT_S = 30.0
_WATCH_S = 300
_OWNED = (("apps", "StatefulSet"), ("", "Service"), ("policy", "PodDisruptionBudget"))
_MAX_LOG_BYTES = 1 << 20


class ClusterError(PersiaK8sError):
    """A request that failed. `status`: the HTTP status; 0 where the API server did not answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turns the client's errors into one line that says what was tried."""
    try:
        yield
    except ApiException as error:
        raise ClusterError(f"{what}: {_reason(error)}", error.status or 0) from error
    except HTTPError as error:
        raise ClusterError(f"{what}: the API server did not answer: {error}", 0) from error


def _reason(error: ApiException) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):
        return f"{error.status} {error.reason}"


class Cluster:
    """Connection to the API server, as the kubeconfig or the pod's service account say. Thread-safe."""

    def __init__(self) -> None:
        self._load_config()
        self._folder = tempfile.TemporaryDirectory(prefix="persia-k8s-")
        api = client.ApiClient()
        # A file of this process alone: the default one is shared by all clusters that had this address.
        with _translated("discovery"):
            self._dynamic = dynamic.DynamicClient(api, cache_file=str(Path(self._folder.name) / "discovery"))
        self._core = client.CoreV1Api(api)

    @staticmethod
    def _load_config() -> None:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            try:
                config.load_kube_config()
            except config.ConfigException as error:
                raise PersiaK8sError(
                    f"no cluster to talk to: not in a pod, and no usable kubeconfig ({error}); set KUBECONFIG"
                ) from error

    def check_installed(self) -> None:
        """Raises PersiaK8sError where the API server does not know PersiaJobs."""
        try:
            with _translated("discovery"):
                _ = self._jobs
        except dynamic.exceptions.ResourceNotFoundError as error:
            raise PersiaK8sError(
                f"the cluster does not know {KIND}: apply what `persia-k8s-utils gencrd` writes"
            ) from error

    def _resource(self, group: str, kind: str) -> Any:
        """By the version that the server prefers: disruption budgets differ in nothing but its name."""
        version = VERSION if group == GROUP else None
        return self._dynamic.resources.get(
            kind=kind, **({"group": group, "api_version": version} if version else {"group": group})
        )

    @property
    def _jobs(self) -> Any:
        return self._resource(GROUP, KIND)

    def job(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The PersiaJob, or None where there is none."""
        try:
            with _translated(f"reading {KIND} {namespace}/{name}"):
                found = self._jobs.get(name=name, namespace=namespace, _request_timeout=_TIMEOUT_S)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise
        return _as_dict(found)

    def jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """The PersiaJobs of a namespace, or of all."""
        with _translated("listing PersiaJobs"):
            found = self._jobs.get(namespace=namespace, _request_timeout=_TIMEOUT_S)
        return list(_as_dict(found)["items"])

    def apply_job(self, manifest: Mapping[str, Any], field_manager: str) -> dict[str, Any]:
        """Creates the PersiaJob or changes it to `manifest`."""
        metadata = manifest["metadata"]
        with _translated(f"applying {KIND} {metadata['namespace']}/{metadata['name']}"):
            applied = self._jobs.server_side_apply(
                body=dict(manifest),
                name=metadata["name"],
                namespace=metadata["namespace"],
                field_manager=field_manager,
                force_conflicts=True,
                _request_timeout=_TIMEOUT_S,
            )
        return _as_dict(applied)

    def delete_job(self, namespace: str, name: str) -> None:
        """Deletes the PersiaJob; raises ClusterError (404) where there is none."""
        with _translated(f"deleting {KIND} {namespace}/{name}"):
            self._jobs.delete(
                name=name,
                namespace=namespace,
                body={"propagationPolicy": "Background"},
                _request_timeout=_TIMEOUT_S,
            )

    def patch_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Merges `status`; a job that has been deleted is left alone."""
        with _ignoring(404), _translated(f"writing the status of {KIND} {namespace}/{name}"):
            self._jobs.status.patch(
                name=name,
                namespace=namespace,
                body={"status": dict(status)},
                content_type="application/merge-patch+json",
                _request_timeout=_TIMEOUT_S,
            )

    def observe(self, namespace: str, job: str, uid: str) -> Observation:
        """What there is of a job. What is left of a namesake that was deleted before is not its own."""
        objects = {}
        owners = {uid}  # pods of servers are owned by their StatefulSet
        for group, kind in _OWNED:
            for item in self._owned(group, kind, namespace, job, {uid}):
                objects[kind, item["metadata"]["name"]] = spec_hash(item)
                owners.add(item["metadata"]["uid"])
        pods = map(PodView.from_object, self._owned("", "Pod", namespace, job, owners))
        return Observation(pods=tuple(pod for pod in pods if pod is not None), objects=objects)

    def _owned(
        self, group: str, kind: str, namespace: str, job: str, owners: Collection[str]
    ) -> list[dict[str, Any]]:
        with _translated(f"listing {kind} objects of {namespace}/{job}"):
            found = self._resource(group, kind).get(
                namespace=namespace, label_selector=f"{JOB_LABEL}={job}", _request_timeout=_TIMEOUT_S
            )
        return [item for item in _as_dict(found)["items"] if _owner(item) in owners]

    def apply(self, manifest: Manifest) -> None:
        """Creates the object or changes it to `manifest`. Raises ClusterError where it is somebody else's."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        group = manifest["apiVersion"].rpartition("/")[0]
        resource = self._resource(group, kind)
        self._check_owner(resource, manifest)
        body = {**manifest, "apiVersion": resource.group_version}
        with _translated(f"applying {kind} {metadata['namespace']}/{metadata['name']}"):
            resource.server_side_apply(
                body=body,
                name=metadata["name"],
                namespace=metadata["namespace"],
                field_manager=_FIELD_MANAGER,
                force_conflicts=True,
                _request_timeout=_TIMEOUT_S,
            )

    def _check_owner(self, resource: Any, manifest: Manifest) -> None:
        """Server-side apply would take over whatever has the name."""
        metadata = manifest["metadata"]
        what = f"{manifest['kind']} {metadata['namespace']}/{metadata['name']}"
        try:
            with _translated(f"reading {what}"):
                found = resource.get(
                    name=metadata["name"], namespace=metadata["namespace"], _request_timeout=_TIMEOUT_S
                )
        except ClusterError as error:
            if error.status == 404:
                return
            raise
        if _owner(_as_dict(found)) != _owner(manifest):
            raise ClusterError(
                f"{what} is there already and not this job's: delete it, or rename the job", 409
            )

    def create_pod(self, manifest: Manifest) -> None:
        """Does nothing where the pod is there already. Raises ClusterError where the name is taken."""
        metadata = manifest["metadata"]
        try:
            with _translated(f"creating pod {metadata['namespace']}/{metadata['name']}"):
                self._resource("", "Pod").create(
                    body=manifest, namespace=metadata["namespace"], _request_timeout=_TIMEOUT_S
                )
        except ClusterError as error:
            if error.status != 409:
                raise
            self._check_owner(self._resource("", "Pod"), manifest)

    def delete_pod(self, namespace: str, pod: PodView) -> None:
        """Ends a pod, within its grace period; one that has ended goes at once. Never its successor."""
        options: dict[str, Any] = {"preconditions": {"uid": pod.uid}}
        if pod.is_finished:
            options["gracePeriodSeconds"] = 0
        with _ignoring(404, 409), _translated(f"deleting pod {namespace}/{pod.name}"):
            self._resource("", "Pod").delete(
                name=pod.name, namespace=namespace, body=options, _request_timeout=_TIMEOUT_S
            )

    def delete(self, namespace: str, kind: str, name: str) -> None:
        """Deletes one of the objects that `observe` has found, and what it owns."""
        group = next(group for group, owned in _OWNED if owned == kind)
        with _ignoring(404), _translated(f"deleting {kind} {namespace}/{name}"):
            self._resource(group, kind).delete(
                name=name,
                namespace=namespace,
                body={"propagationPolicy": "Background"},
                _request_timeout=_TIMEOUT_S,
            )

    def pod_changes(self, namespace: str | None) -> Iterator[tuple[str, str]]:
        """Namespace and job of each change of a job's pod, for some minutes; begins with all that are there.

        The API server selects them: of the pods of a large cluster few are of jobs.
        """
        with _translated("watching pods"):
            changes = self._resource("", "Pod").watch(
                namespace=namespace, label_selector=JOB_LABEL, timeout=_WATCH_S
            )
            for change in changes:
                metadata = change["raw_object"]["metadata"]
                yield metadata["namespace"], metadata["labels"][JOB_LABEL]

    def pods(self, namespace: str, job: str | None) -> list[dict[str, Any]]:
        """The pods of one job, or of all."""
        selector = f"{JOB_LABEL}={job}" if job else JOB_LABEL
        with _translated(f"listing pods in {namespace}"):
            found = self._resource("", "Pod").get(
                namespace=namespace, label_selector=selector, _request_timeout=_TIMEOUT_S
            )
        return list(_as_dict(found)["items"])

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        """Raises ClusterError (404) where there is none, or where it is no job's."""
        with _translated(f"reading pod {namespace}/{name}"):
            found = _as_dict(
                self._resource("", "Pod").get(name=name, namespace=namespace, _request_timeout=_TIMEOUT_S)
            )
        if JOB_LABEL not in found["metadata"].get("labels", {}):
            raise ClusterError(f"pod {namespace}/{name} belongs to no {KIND}", 404)
        return found

    def pod_log(self, namespace: str, name: str, tail_lines: int) -> str:
        """The end of a pod's log."""
        with _translated(f"reading the log of pod {namespace}/{name}"):
            response = self._core.read_namespaced_pod_log(
                name,
                namespace,
                tail_lines=tail_lines,
                limit_bytes=_MAX_LOG_BYTES,
                _preload_content=False,
                _request_timeout=_TIMEOUT_S,
            )
        return bytes(response.data).decode(errors="replace")


@contextmanager
def _ignoring(*statuses: int) -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        if error.status not in statuses:
            raise


def _as_dict(found: Any) -> dict[str, Any]:
    return dict(found.to_dict())


def _owner(item: Mapping[str, Any]) -> str | None:
    owners = item["metadata"].get("ownerReferences", [])
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)
