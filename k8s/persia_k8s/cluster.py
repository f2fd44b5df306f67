"""The API server: the few requests that the operator and the REST service make, each with a deadline."""

from __future__ import annotations

import base64
import functools
import json
import math
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes import client, config, dynamic
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from persia_k8s.builders.manifest import Manifest, spec_hash
from persia_k8s.errors import PersiaK8sError
from persia_k8s.names import GROUP, JOB_LABEL, KIND, POD_GROUPS
from persia_k8s.observation import Observation, PodView

_FIELD_MANAGER = "persia-operator"
# A request without a deadline would hold the task of a job for ever when the network drops packets.
_TIMEOUT_S = 30.0
_WATCH_S = 300
# In the order in which they are listed; pods follow, because their owners are found here.
_OWNED = (
    ("apps", "StatefulSet"),
    ("", "Service"),
    ("policy", "PodDisruptionBudget"),
    ("networking.k8s.io", "NetworkPolicy"),
)
_LEASES = "coordination.k8s.io"
_GANGS = (POD_GROUPS, "PodGroup")  # listed where the cluster has them
_PLUG_IN_S = 60.0  # for so long what is installed is taken to stay
_MAX_LOG_BYTES = 1 << 20
_MASTER_KEY, _MASTER_BYTES = "master", 32


class ClusterError(PersiaK8sError):
    """A request that failed. `status`: the HTTP status; 0 where the API server did not answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """True if the API server has judged the object: the same request would be refused again."""
        # 500 is how an apply says before Kubernetes 1.24 that a field is unknown, or a quantity is none.
        return self.status in (400, 403, 404, 409, 422, 500)


@contextmanager
def _translated(what: str, *, ignored: Collection[int] = ()) -> Iterator[None]:
    """Turns the client's errors into one line that says what was tried. `ignored`: statuses to pass over."""
    try:
        yield
    except ApiException as error:
        if error.status in ignored:
            return
        try:
            reason = str(json.loads(error.body)["message"])
        except (KeyError, TypeError, ValueError):
            reason = f"{error.status} {error.reason}"
        raise ClusterError(f"{what}: {reason}", error.status or 0) from error
    except HTTPError as error:
        raise ClusterError(f"{what}: the API server did not answer: {error}", 0) from error


def _ask(what: str, method: Callable[..., Any], *, ignored: Collection[int] = (), **arguments: Any) -> Any:
    """Sends a request; returns plain values, or None for an ignored status. Errors name `what`."""
    answer = None
    with _translated(what, ignored=ignored):
        answer = method(**arguments, _request_timeout=_TIMEOUT_S).to_dict()
    return answer


class Cluster:
    """Connection to the API server, as the kubeconfig or the pod's service account say. Thread-safe."""

    def __init__(self) -> None:
        self._load_config()
        self._folder = tempfile.TemporaryDirectory(prefix="persia-k8s-")
        api = client.ApiClient()
        # A file of this process alone: the default one is shared by all clusters that had this address.
        with _translated("discovery"):
            self._dynamic = dynamic.DynamicClient(api, cache_file=str(Path(self._folder.name) / "discovery"))
        self._core, self._custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self._pod_groups = (False, -math.inf)  # whether there are any, and when that was asked

    @staticmethod
    def _load_config() -> None:
        try:
            # A pod first: a kubeconfig in an image would name another cluster.
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
        """Resolves a kind at the version that the server prefers: disruption budgets are the same in all."""
        pinned = {"api_version": "v1"} if group in (GROUP, _LEASES) else {}
        return self._dynamic.resources.get(kind=kind, group=group, **pinned)

    @property
    def _jobs(self) -> Any:
        return self._resource(GROUP, KIND)

    def job(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The PersiaJob, or None where there is none."""
        what = f"reading {KIND} {namespace}/{name}"
        found: dict[str, Any] | None = _ask(
            what, self._jobs.get, ignored=(404,), name=name, namespace=namespace
        )
        return found

    def jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """The PersiaJobs of a namespace, or of all."""
        return list(_ask("listing PersiaJobs", self._jobs.get, namespace=namespace)["items"])

    def apply_job(self, manifest: Mapping[str, Any], field_manager: str) -> None:
        """Creates the PersiaJob or changes it to `manifest`."""
        _apply(self._jobs, manifest, field_manager)

    def delete_job(self, namespace: str, name: str) -> None:
        """Deletes the PersiaJob; raises ClusterError (404) where there is none."""
        _delete(self._jobs, KIND, namespace, name)

    def set_replicas(self, namespace: str, name: str, replicas: int) -> int | None:
        """Sets `spec.replicas`, which `kubectl scale` and autoscalers read and write.

        Returns the new generation, or None where the job has been deleted.
        """
        changed = _ask(
            f"writing spec.replicas of {KIND} {namespace}/{name}",
            self._jobs.patch,
            ignored=(404,),
            name=name,
            namespace=namespace,
            body={"spec": {"replicas": replicas}},
            content_type="application/merge-patch+json",
        )
        return None if changed is None else int(changed["metadata"]["generation"])

    def patch_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Merges `status`; a job that has been deleted is left alone."""
        _ask(
            f"writing the status of {KIND} {namespace}/{name}",
            self._jobs.status.patch,
            ignored=(404,),
            name=name,
            namespace=namespace,
            body={"status": dict(status)},
            content_type="application/merge-patch+json",
        )

    def observe(self, namespace: str, job: str, uid: str) -> Observation:
        """Lists the objects of a job, without those of a deleted job of the same name."""
        objects = {}
        owners = {uid}  # pods of servers are owned by their StatefulSet
        has_groups = self._has_pod_groups()
        for group, kind in (*_OWNED, _GANGS) if has_groups else _OWNED:
            for item in self._owned(group, kind, namespace, job, {uid}):
                objects[kind, item["metadata"]["name"]] = spec_hash(item)
                owners.add(item["metadata"]["uid"])
        pods = map(PodView.from_object, self._owned("", "Pod", namespace, job, owners))
        return Observation(
            pods=tuple(pod for pod in pods if pod is not None), objects=objects, has_pod_groups=has_groups
        )

    def _has_pod_groups(self) -> bool:
        """Whether the scheduler plug-ins' PodGroup is installed; asked once in a while."""
        known, when = self._pod_groups
        if time.monotonic() - when < _PLUG_IN_S:
            return known
        found = False
        # Not through `_resource`, which reads all of the API again for a kind that it does not find.
        with _translated("looking for PodGroup", ignored=(404,)):
            known_kinds = self._custom.get_api_resources(POD_GROUPS, "v1alpha1", _request_timeout=_TIMEOUT_S)
            found = any(kind.name == "podgroups" for kind in known_kinds.resources)
        self._pod_groups = (found, time.monotonic())
        return found

    def _owned(
        self, group: str, kind: str, namespace: str, job: str, owners: Collection[str]
    ) -> list[dict[str, Any]]:
        found = _ask(
            f"listing {kind} objects of {namespace}/{job}",
            self._resource(group, kind).get,
            namespace=namespace,
            label_selector=f"{JOB_LABEL}={job}",
        )
        return [item for item in found["items"] if _owner(item) in owners]

    def apply(self, manifest: Manifest) -> None:
        """Creates the object or changes it to `manifest`. Raises ClusterError if another owner has it."""
        resource = self._resource(manifest["apiVersion"].rpartition("/")[0], manifest["kind"])
        self._check_owner(resource, manifest)
        _apply(resource, {**manifest, "apiVersion": resource.group_version}, _FIELD_MANAGER)

    def _check_owner(self, resource: Any, manifest: Manifest) -> None:
        """Server-side apply would take over whatever has the name."""
        metadata = manifest["metadata"]
        what = f"{manifest['kind']} {metadata['namespace']}/{metadata['name']}"
        place = {"name": metadata["name"], "namespace": metadata["namespace"]}
        found = _ask(f"reading {what}", resource.get, ignored=(404,), **place)
        if found is not None and _owner(found) != _owner(manifest):
            raise ClusterError(
                f"{what} is there already and not this job's: delete it, or rename the job", 409
            )

    def try_out(self, manifest: Manifest) -> None:
        """Has the API server judge an object as if it were made. Raises ClusterError where it refuses it."""
        resource = self._resource(manifest["apiVersion"].rpartition("/")[0], manifest["kind"])
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        what = f"{manifest['kind']} {namespace}/{name}"
        if manifest["kind"] == "Pod":
            _ask(what, resource.create, body=manifest, namespace=namespace, dry_run="All")
        else:
            # An apply refuses unknown fields, also where the API server is too old to refuse them elsewhere.
            _apply(resource, manifest, _FIELD_MANAGER, dry_run="All")

    @property
    def secrets(self) -> Secrets:
        """Secrets, which the operator writes and does not read."""
        return Secrets(self._resource("", "Secret"))

    def create_pod(self, manifest: Manifest) -> None:
        """Does nothing where the pod is there already. Raises ClusterError where the name is taken."""
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        pods = self._resource("", "Pod")
        what = f"creating pod {namespace}/{name}"
        # A pass is taken again when the answer to its request was lost: the pod that is there may be its own.
        if _ask(what, pods.create, ignored=(409,), body=manifest, namespace=namespace) is None:
            self._check_owner(pods, manifest)

    def delete_pod(self, namespace: str, pod: PodView) -> None:
        """Ends a pod, within its grace period; one that has ended goes at once. Never its successor."""
        # By uid: between the look and this request a new pod may have taken the name.
        options: dict[str, Any] = {"preconditions": {"uid": pod.uid}}
        if pod.is_finished and not pod.is_lingering:
            # Its containers have ended, so there is nothing to wait for, and its name is needed.
            options["gracePeriodSeconds"] = 0
        _delete(self._resource("", "Pod"), "pod", namespace, pod.name, options, ignored=(404, 409))

    def delete(self, namespace: str, kind: str, name: str) -> None:
        """Deletes one of the objects that `observe` has found, and what it owns."""
        group = next(group for group, owned in (*_OWNED, _GANGS) if owned == kind)
        _delete(self._resource(group, kind), kind, namespace, name, ignored=(404,))

    def lease(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The Lease, or None where there is none."""
        get = self._resource(_LEASES, "Lease").get
        what = f"reading Lease {namespace}/{name}"
        found: dict[str, Any] | None = _ask(what, get, ignored=(404,), name=name, namespace=namespace)
        return found

    def put_lease(self, lease: Mapping[str, Any]) -> bool:
        """Creates or replaces it; returns False if another process has done so since it was read."""
        resource, metadata = self._resource(_LEASES, "Lease"), lease["metadata"]
        method = resource.replace if "resourceVersion" in metadata else resource.create
        what = f"writing Lease {metadata['namespace']}/{metadata['name']}"
        arguments = {"body": dict(lease), "namespace": metadata["namespace"]}
        return _ask(what, method, ignored=(409,), **arguments) is not None

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
        get = self._resource("", "Pod").get
        found = _ask(f"listing pods in {namespace}", get, namespace=namespace, label_selector=selector)
        return list(found["items"])

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        """Raises ClusterError (404) where there is none, or where it is no job's."""
        get = self._resource("", "Pod").get
        found: dict[str, Any] = _ask(f"reading pod {namespace}/{name}", get, name=name, namespace=namespace)
        # The service must not be a way to read other pods of the namespace.
        if JOB_LABEL not in found["metadata"].get("labels", {}):
            raise ClusterError(f"pod {namespace}/{name} belongs to no {KIND}", 404)
        return found

    def pod_log(self, namespace: str, name: str, tail_lines: int) -> str:
        with _translated(f"reading the log of pod {namespace}/{name}"):
            # The typed client: the dynamic one decodes answers as JSON.
            response = self._core.read_namespaced_pod_log(
                name,
                namespace,
                tail_lines=tail_lines,
                limit_bytes=_MAX_LOG_BYTES,
                _preload_content=False,
                _request_timeout=_TIMEOUT_S,
            )
        return bytes(response.data).decode(errors="replace")


class Secrets:
    """Secrets of jobs, which the operator only writes, and its own master secret."""

    def __init__(self, resource: Any) -> None:
        self._secrets = resource

    def create(self, manifest: Manifest) -> None:
        """Does nothing where it is there already: it is never changed, and may not be read."""
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        what, create = f"creating Secret {namespace}/{name}", self._secrets.create
        _ask(what, create, ignored=(409,), body=manifest, namespace=namespace)

    def replace(self, manifest: Manifest) -> None:
        """Replaces the whole Secret in one step, or creates it. Raises ClusterError if neither succeeds."""
        # Neither a patch nor a deletion: the API server answers these with the content of the old Secret.
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        what, arguments = f"replacing Secret {namespace}/{name}", {"body": manifest, "namespace": namespace}
        found = _ask(what, self._secrets.replace, ignored=(404,), **arguments)
        # The manifest has no finalizers: without them, a Secret that was being deleted is gone now.
        if found is None or found["metadata"].get("deletionTimestamp"):
            _ask(what, self._secrets.create, **arguments)

    def master(self, namespace: str, name: str) -> bytes:
        """The operator's own secret, 32 bytes; made where there is none. ClusterError: a wrong one."""
        what, place = f"reading Secret {namespace}/{name}", {"name": name, "namespace": namespace}
        read = functools.partial(self._secrets.get, **place)
        if _ask(what, read, ignored=(404,)) is None:
            data = {_MASTER_KEY: base64.b64encode(secrets.token_bytes(_MASTER_BYTES)).decode()}
            metadata = {**place, "labels": {"app.kubernetes.io/name": "persia-operator"}}
            self.create(
                {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "immutable": True, "data": data}
            )
        # Read in any case: another operator may have made it first.
        found = _ask(what, read)
        master = base64.b64decode((found.get("data") or {}).get(_MASTER_KEY, ""))
        if len(master) != _MASTER_BYTES:
            raise ClusterError(
                f"Secret {namespace}/{name}: key {_MASTER_KEY} has {len(master)} bytes instead of "
                f"{_MASTER_BYTES}: restore it, or delete it for a new one, which replaces all jobs' CAs",
                0,
            )
        return master


def _apply(resource: Any, manifest: Mapping[str, Any], field_manager: str, **more: Any) -> None:
    namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    _ask(
        f"applying {manifest['kind']} {namespace}/{name}",
        resource.server_side_apply,
        body=dict(manifest),
        name=name,
        namespace=namespace,
        # Fields that somebody has changed by hand become ours again: the spec of the job is the only source.
        field_manager=field_manager,
        force_conflicts=True,
        **more,
    )


def _delete(
    resource: Any,
    kind: str,
    namespace: str,
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    ignored: Collection[int] = (),
) -> None:
    """`options`: of the request; by default what the object owns is deleted, too."""
    body = options or {"propagationPolicy": "Background"}
    what = f"deleting {kind} {namespace}/{name}"
    _ask(what, resource.delete, ignored=ignored, name=name, namespace=namespace, body=body)


def _owner(item: Mapping[str, Any]) -> str | None:
    owners = item["metadata"].get("ownerReferences", [])
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)
