"""`status` of a PersiaJob: its schema, and the memory of the operator between two passes.

The operator keeps nothing else: started anew, it goes on from what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from persia_k8s.names import Role
from persia_k8s.schema import open_api_schema, spec_field

__all__ = ["Condition", "JobStatus", "Phase", "Resize", "RoleStatus", "Stage", "status_schema"]


class Phase(str, Enum):
    """Where a job is. The last two are final."""

    PENDING = "Pending"  # servers start, then data loaders and NN workers
    RUNNING = "Running"  # every data loader and NN worker has started; or predictions can be asked for
    RESTARTING = "Restarting"  # the training has failed and will be started again
    RESIZING = "Resizing"  # rows move to another number of parameter servers; then the training starts again
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def is_final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """One role. `replicas` is what the job runs with, which after a refused resize is not what spec says."""

    replicas: int = 0
    ready: int = 0
    restarts: int = 0


class Stage(str, Enum):
    """How far a resize of the parameter servers is."""

    DUMPING = "Dumping"  # between two batches, rank 0 writes the dense part and the servers their rows
    STOPPING = "Stopping"  # data loaders and NN workers end
    REPLACING = "Replacing"  # new servers start
    LOADING = "Loading"  # they read the rows


@dataclass(frozen=True, kw_only=True)
class Resize:
    """A resize of the parameter servers to `replicas`, through the checkpoint at `location`.

    `tries`: of this stage, that have failed; the next one is not before `retry_time`, "" for now.
    """

    stage: Stage
    replicas: int
    location: str
    tries: int = 0
    retry_time: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage.value,
            "replicas": self.replicas,
            "location": self.location,
            "tries": self.tries,
            "retryTime": self.retry_time or None,
        }


@dataclass(frozen=True, kw_only=True)
class Condition:
    """As in the rest of Kubernetes."""

    type: str
    status: bool
    reason: str
    message: str = ""
    since: str = ""  # lastTransitionTime

    def to_dict(self) -> dict[str, str]:
        values = {"type": self.type, "status": str(self.status), "reason": self.reason}
        # Left out rather than empty: API server 1.20 takes an empty text in a merge patch for null.
        message = {"message": self.message} if self.message else {}
        return {**values, **message, "lastTransitionTime": self.since}


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """All of `status`. Times are RFC 3339 texts in UTC, "" for none."""

    phase: Phase = Phase.PENDING
    observed_generation: int = 0
    start_time: str = ""
    completion_time: str = ""
    restarts: int = 0
    loader_restarts: int = 0
    restart_time: str = ""
    resizes: int = 0
    resize: Resize | None = None
    failed_resize: int = 0
    resize_checkpoint: str = ""
    selector: str = ""  # of the pods that the scale subresource is about
    roles: Mapping[Role, RoleStatus] = field(default_factory=dict)
    servers: Mapping[str, str] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    conditions: Sequence[Condition] = ()

    @property
    def attempt(self) -> int:
        """Which start of the training this is, from 0."""
        return self.restarts + self.resizes

    @property
    def is_dumping(self) -> bool:
        """Whether the training runs while it is dumped for a resize."""
        stage = None if self.resize is None else self.resize.stage
        return self.phase is Phase.RESIZING and stage is Stage.DUMPING

    @property
    def is_training(self) -> bool:
        """Whether all that trains has started, and has not been ended."""
        return self.phase is Phase.RUNNING or self.is_dumping

    @staticmethod
    def from_dict(values: Mapping[str, Any] | None) -> JobStatus:
        """From what the operator has stored; a new job has nothing."""
        values = values or {}
        if "phase" not in values:
            return JobStatus()
        return JobStatus(
            phase=Phase(values["phase"]),
            observed_generation=values.get("observedGeneration", 0),
            start_time=values.get("startTime") or "",
            completion_time=values.get("completionTime") or "",
            restarts=values.get("restarts", 0),
            loader_restarts=values.get("loaderRestarts", 0),
            restart_time=values.get("restartTime") or "",
            resizes=values.get("resizes", 0),
            resize=_resize(values.get("resize")),
            failed_resize=values.get("failedResize", 0),
            resize_checkpoint=values.get("resizeCheckpoint") or "",
            selector=values.get("selector") or "",
            roles={
                role: RoleStatus(**values["roles"][role.field])
                for role in Role
                if role.field in values.get("roles", {})
            },
            servers=dict(values.get("servers") or {}),
            progress=dict(values.get("progress") or {}),
            conditions=tuple(_condition(item) for item in values.get("conditions", ())),
        )

    def to_dict(self) -> dict[str, Any]:
        """For a merge patch: what is unset is None, which removes it."""
        return {
            "phase": self.phase.value,
            "observedGeneration": self.observed_generation,
            "startTime": self.start_time or None,
            "completionTime": self.completion_time or None,
            "restarts": self.restarts,
            "loaderRestarts": self.loader_restarts,
            "restartTime": self.restart_time or None,
            "resizes": self.resizes,
            "resize": self.resize and self.resize.to_dict(),
            "failedResize": self.failed_resize,
            "resizeCheckpoint": self.resize_checkpoint or None,
            "selector": self.selector or None,
            "roles": {role.field: vars(role_status) for role, role_status in self.roles.items()},
            "servers": dict(self.servers),
            "progress": dict(self.progress) or None,
            "conditions": [condition.to_dict() for condition in self.conditions],
        }

    def condition(self, kind: str) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def with_condition(self, new: Condition, now: str) -> JobStatus:
        """`new` in the place of the one of its type; its time changes with its truth only."""
        old = self.condition(new.type)
        since = old.since if old is not None and old.status == new.status else now
        others = [condition for condition in self.conditions if condition.type != new.type]
        return replace(self, conditions=(*others, replace(new, since=since)))


def _resize(values: Mapping[str, Any] | None) -> Resize | None:
    if values is None:
        return None
    return Resize(
        stage=Stage(values["stage"]),
        replicas=values["replicas"],
        location=values.get("location", ""),
        tries=values.get("tries", 0),
        retry_time=values.get("retryTime") or "",
    )


def _condition(values: Mapping[str, Any]) -> Condition:
    return Condition(
        type=values["type"],
        status=values["status"] == "True",
        reason=values["reason"],
        message=values.get("message", ""),
        since=values.get("lastTransitionTime", ""),
    )


@dataclass(frozen=True, kw_only=True)
class _RoleSchema:
    replicas: int = spec_field("Pods that the job runs with.", default=None)
    ready: int = spec_field("Of them ready now; of a finished role, those that have succeeded.", default=None)
    restarts: int = spec_field("Restarts of its containers.", default=None)


@dataclass(frozen=True, kw_only=True)
class _ProgressSchema:
    step: int = spec_field("Last training step.", default=None)
    auc: float = spec_field("AUC, as the job measures it.", default=None, schema={"type": "number"})
    samples_per_second: float = spec_field("Throughput.", default=None, schema={"type": "number"})
    last_checkpoint: str = spec_field("Path of the last checkpoint.", default=None)


@dataclass(frozen=True, kw_only=True)
class _RolesSchema:
    nats: _RoleSchema = spec_field("The broker, where the operator runs it.", default=None)
    embedding_parameter_server: _RoleSchema = spec_field("Parameter servers.", default=None)
    embedding_worker: _RoleSchema = spec_field("Embedding workers.", default=None)
    nn_worker: _RoleSchema = spec_field("NN workers.", default=None)
    dataloader: _RoleSchema = spec_field("Data loaders.", default=None)
    inference: _RoleSchema = spec_field("Servers of predictions.", default=None)


_TIME = {"type": "string", "format": "date-time"}
_CONDITIONS = {
    "type": "array",
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
    "items": {
        "type": "object",
        "required": ["type", "status", "reason", "lastTransitionTime"],
        "properties": {
            "type": {"type": "string"},
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": {"type": "string"},
            "message": {"type": "string"},
            "lastTransitionTime": _TIME,
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class _ResizeSchema:
    stage: str = spec_field("How far it is.", default=None, enum=[stage.value for stage in Stage])
    replicas: int = spec_field("Number of the new servers.", default=None)
    location: str = spec_field("The checkpoint that the job goes through.", default=None)
    tries: int = spec_field("Of this stage, that have failed.", default=None)
    retry_time: str = spec_field("The next one is not before.", default=None, schema=_TIME)


@dataclass(frozen=True, kw_only=True)
class _StatusSchema:
    phase: str = spec_field("State of the job.", default=None, enum=[phase.value for phase in Phase])
    observed_generation: int = spec_field("Generation of the spec that this is about.", default=None)
    start_time: str = spec_field("When the training first ran.", default=None, schema=_TIME)
    completion_time: str = spec_field("When the job ended.", default=None, schema=_TIME)
    restarts: int = spec_field("Times that the training was started again.", default=None)
    loader_restarts: int = spec_field("Data loaders started again since the training was.", default=None)
    restart_time: str = spec_field(
        "Before this time, the training is not started again.", default=None, schema=_TIME
    )
    resizes: int = spec_field("Resizes of the parameter servers.", default=None)
    resize: _ResizeSchema = spec_field("The resize of the parameter servers that goes on.", default=None)
    failed_resize: int = spec_field("Generation of the spec whose resize has failed.", default=None)
    resize_checkpoint: str = spec_field(
        "What the last resize went through; removed when the job succeeds.", default=None
    )
    selector: str = spec_field(
        "Label selector of the embedding workers, for whoever scales them.", default=None
    )
    roles: _RolesSchema = spec_field("Counts of each role.", default=None)
    servers: Mapping[str, str] = spec_field(
        "Incarnation of each server pod, by which a restart is known.",
        default=None,
        schema={"type": "object", "additionalProperties": {"type": "string"}},
    )
    progress: _ProgressSchema = spec_field("What the job has last said about itself.", default=None)
    conditions: Sequence[Any] = spec_field(
        "`ServersReady`, `SpecApplied`, `Resized`, `Complete`, `Failed`.", default=None, schema=_CONDITIONS
    )


def status_schema() -> dict[str, Any]:
    """The structural schema of `status`."""
    return open_api_schema(_StatusSchema)
