"""The operator's view of a job in the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from persia_k8s.builders.manifest import spec_hash
from persia_k8s.names import ATTEMPT_LABEL, GENERATION_LABEL, ROLE_LABEL, SOURCES_LABEL, Role

_FINAL = ("Succeeded", "Failed")
_ROLES = {role.suffix: role for role in Role}
# Messages become part of conditions and events, which are to stay readable.
_MAX_MESSAGE = 500


@dataclass(frozen=True, kw_only=True)
class PodView:
    """The properties of a pod that decisions depend on."""

    name: str
    role: Role
    uid: str
    phase: str
    is_ready: bool
    is_deleting: bool
    attempt: int
    spec_hash: str | None
    num_restarts: int
    is_lingering: bool = False  # finished, but for its sidecars
    exit_code: int | None = None  # of a container that has ended and is not started again
    finished_at: str | None = None  # when that container ended, by the clock of its node
    generation: int = 0  # of a parameter server
    gathers: bool = False  # a parameter server that begins by gathering the rows of others
    trouble: str  # why it does not run, or how it ended; "" when there is nothing to say

    @property
    def is_finished(self) -> bool:
        return self.phase in _FINAL

    @property
    def incarnation(self) -> str:
        """Of a server. A container that is started again keeps its pod, a replaced pod keeps its name."""
        return f"{self.uid}/{self.num_restarts}"

    @staticmethod
    def from_object(pod: Mapping[str, Any]) -> PodView | None:
        """Returns None for a pod with the job's label that the operator did not create."""
        metadata, status = pod["metadata"], pod.get("status", {})
        labels = metadata.get("labels", {})
        role = _ROLES.get(labels.get(ROLE_LABEL, ""))
        if role is None:
            return None
        # The role's container decides: sidecars may run on.
        containers = status.get("containerStatuses") or []
        own = [container for container in containers if container.get("name") == role.container]
        end: Mapping[str, Any] = {}  # empty: it has not ended
        if not role.is_server and own:
            end = (own[0].get("state") or {}).get("terminated") or {}
        phase = status.get("phase", "Pending")
        if end and phase not in _FINAL:
            phase = "Succeeded" if end.get("exitCode") == 0 else "Failed"
        conditions = {item["type"]: item for item in status.get("conditions") or []}
        return PodView(
            name=metadata["name"],
            role=role,
            uid=metadata["uid"],
            phase=phase,
            is_lingering=phase in _FINAL and status.get("phase") not in _FINAL,
            is_ready=conditions.get("Ready", {}).get("status") == "True",
            is_deleting=metadata.get("deletionTimestamp") is not None,
            attempt=int(labels.get(ATTEMPT_LABEL, 0)),
            generation=int(labels.get(GENERATION_LABEL, 0)),
            gathers=SOURCES_LABEL in labels,
            spec_hash=spec_hash(pod),
            num_restarts=sum(container["restartCount"] for container in own),
            exit_code=end.get("exitCode"),
            finished_at=end.get("finishedAt"),
            trouble=_trouble(
                status, [*own, *(status.get("initContainerStatuses") or []), *containers], conditions
            ),
        )


def _trouble(
    status: Mapping[str, Any], containers: Iterable[Mapping[str, Any]], conditions: Mapping[str, Any]
) -> str:
    for container in containers:
        state = container.get("state") or {}
        if "terminated" in state and state["terminated"].get("exitCode") != 0:
            return _describe_end(state["terminated"])
        waiting = state.get("waiting") or {}
        # A container in back-off is waiting; why it failed is in its last state.
        last = (container.get("lastState") or {}).get("terminated")
        if last and waiting:
            return f"{waiting.get('reason', 'waiting')}: {_describe_end(last)}"
        if waiting.get("message"):
            return f"{waiting.get('reason', 'waiting')}: {waiting['message']}"[:_MAX_MESSAGE]
    if status.get("reason") or status.get("message"):  # evicted, lost with its node
        return f"{status.get('reason', '')}: {status.get('message', '')}"[:_MAX_MESSAGE]
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', '')}: {scheduled.get('message', '')}"[:_MAX_MESSAGE]
    return ""


def _describe_end(terminated: Mapping[str, Any]) -> str:
    text = f"exit code {terminated.get('exitCode')}"
    if terminated.get("reason") not in (None, "Error"):
        text += f" ({terminated['reason']})"
    # The end of the log says most.
    message = (terminated.get("message") or "").strip()[-_MAX_MESSAGE:]
    return f"{text}: {message}" if message else text


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A job's pods, and the hashes of its other objects by kind and name.

    `has_pod_groups`: the cluster has the PodGroup of the scheduler plug-ins.
    """

    pods: tuple[PodView, ...] = ()
    objects: Mapping[tuple[str, str], str | None]
    has_pod_groups: bool = False

    def of_role(self, role: Role) -> list[PodView]:
        return [pod for pod in self.pods if pod.role is role]
