"""`status` of a PersiaJob: its schema, and the memory of the operator between two passes.

The operator keeps nothing else: a restarted operator continues from the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    StrictBool,
    StrictInt,
    TypeAdapter,
    WithJsonSchema,
)
from pydantic.dataclasses import dataclass

from persia_k8s.names import Role
from persia_k8s.schema import CONFIG, list_of_objects, parse, structural_schema


class Phase(str, Enum):
    """Phase of a job. The last two are final."""

    PENDING = "Pending"  # servers start, then data loaders and NN workers
    RUNNING = "Running"  # every data loader and NN worker has started; or predictions can be asked for
    RESTARTING = "Restarting"  # the training has failed and will be started again
    RESIZING = "Resizing"  # rows move to another number of parameter servers; then the training starts again
    SUSPENDED = "Suspended"  # the spec asks for it: no pods
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def is_final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class Stage(str, Enum):
    """Stage of a resize of the parameter servers."""

    DUMPING = "Dumping"  # between two batches, rank 0 writes the dense part and the servers their rows
    STOPPING = "Stopping"  # data loaders and NN workers end
    REPLACING = "Replacing"  # new servers start
    LOADING = "Loading"  # they read the rows
    # Without a checkpoint, while training continues:
    STARTING = "Starting"  # new servers start beside the old ones
    MOVING = "Moving"  # the new ones receive rows, then take over
    ENDING = "Ending"  # the old ones end


# The name in Kubernetes, which would be long for a field that is read so often.
_SINCE = "lastTransitionTime"
_TIME = {"type": "string", "format": "date-time"}
# In a merge patch, null removes a field; here a text that is not set is "".
_Text = Annotated[str, BeforeValidator(lambda text: text or ""), PlainSerializer(lambda text: text or None)]
_Time = Annotated[_Text, WithJsonSchema(_TIME)]


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class RoleStatus:
    """One role."""

    replicas: StrictInt = Field(
        default=0, description="Pods that the job runs with."
    )  # after a refused resize not spec's
    ready: StrictInt = Field(
        default=0, description="Of them ready now; of a finished role, those that have succeeded."
    )
    restarts: StrictInt = Field(default=0, description="Restarts of its containers.")


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Resize:
    """A resize of the parameter servers."""

    stage: Stage = Field(description="How far it is.")
    replicas: StrictInt = Field(description="Number of the new servers.")
    wish: StrictInt = Field(
        default=0,
        description="Digest of the fields that the resize depends on, at its start.",
    )
    location: _Text = Field(default="", description="The checkpoint that the job goes through.")
    generation: StrictInt = Field(
        default=0, description="Of the new servers; 0 if the job goes through a checkpoint."
    )
    tries: StrictInt = Field(default=0, description="Of this stage, that have failed or are under way.")
    since: _Time = Field(default="", description="When this stage began.")
    retry_time: _Time = Field(default="", description="The next one is not before.")


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Condition:
    """As in the rest of Kubernetes."""

    type: str
    status: Annotated[
        bool,
        BeforeValidator(lambda text: text in ("True", True)),
        PlainSerializer(lambda status: str(status)),
    ]
    reason: str
    message: str = ""
    since: str = Field(default="", validation_alias=_SINCE, serialization_alias=_SINCE)


_CONDITIONS = {
    **list_of_objects(
        {
            "type": {"type": "string"},
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": {"type": "string"},
            "message": {"type": "string"},
            _SINCE: _TIME,
        },
        required=["type", "status", "reason", _SINCE],
    ),
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}
_PROGRESS = {
    "type": "object",
    "properties": {
        "step": {"description": "Last training step.", "type": "integer"},
        "auc": {"description": "AUC, as the job measures it.", "type": "number"},
        "samplesPerSecond": {"description": "Throughput.", "type": "number"},
        "lastCheckpoint": {"description": "Path of the last checkpoint.", "type": "string"},
    },
}
_ROLES = {
    Role.NATS: "The broker, where the operator runs it.",
    Role.PARAMETER_SERVER: "Parameter servers.",
    Role.STANDBY: "Standbys of the parameter servers.",
    Role.EMBEDDING_WORKER: "Embedding workers.",
    Role.NN_WORKER: "NN workers.",
    Role.DATA_LOADER: "Data loaders.",
    Role.INFERENCE: "Servers of predictions.",
}
_ROLE = structural_schema(RoleStatus, of_status=True)
_ROLES_SCHEMA = {
    "type": "object",
    "properties": {role.field: {**_ROLE, "description": text} for role, text in _ROLES.items()},
}


def _read_roles(values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    roles = {role.field: role for role in Role}
    return {roles.get(key, key): value for key, value in values.items() if key in roles or key in Role}


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class JobStatus:
    """The state of the job."""

    phase: Phase = Field(default=Phase.PENDING, description="State of the job.")
    observed_generation: StrictInt = Field(
        default=0, description="Generation of the spec that this is about."
    )
    start_time: _Time = Field(default="", description="When the training first ran.")
    completion_time: _Time = Field(default="", description="When the job ended.")
    restarts: StrictInt = Field(default=0, description="Times that the training was started again.")
    loader_restarts: StrictInt = Field(
        default=0, description="Data loaders started again since the training was."
    )
    restart_time: _Time = Field(
        default="", description="Before this time, the training is not started again."
    )
    suspensions: StrictInt = Field(default=0, description="Suspensions that have ended.")
    tls: StrictBool | None = Field(
        default=None, description="Whether the pods of this start have certificates."
    )
    standbys: StrictInt | None = Field(
        default=None, description="Standbys of each parameter server of this start."
    )
    certificates_until: _Time = Field(default="", description="When the job's certificates expire.")
    checked_generation: StrictInt = Field(
        default=0, description="Generation of the spec whose pods the API server has judged."
    )
    resizes: StrictInt = Field(default=0, description="Resizes of the parameter servers by a checkpoint.")
    server_generation: StrictInt = Field(
        default=0, description="Resizes of the parameter servers while training continued."
    )
    early_restarts: StrictInt = Field(
        default=0, description="Restarts of a parameter server before it had its rows, at most."
    )
    resize: Resize | None = Field(
        default=None, description="The resize of the parameter servers that goes on."
    )
    last_generation: StrictInt = Field(
        default=0,
        description="Highest generation of parameter servers whose resize has failed or was cancelled.",
    )
    # Not the generation of the spec, which an autoscaler changes, too. Earlier operators wrote that here: the
    # definition of their version would drop another field, and the resize would begin again without end.
    failed_resize: StrictInt = Field(
        default=0,
        description="Digest of the fields that the failed resize depended on, until it is reverted.",
    )
    rebalance: StrictInt = Field(
        default=0, description="`rebalance` of the parameter servers when they last began to be replaced."
    )
    resize_checkpoint: _Text = Field(
        default="", description="What the last resize went through; removed when the job succeeds."
    )
    selector: _Text = Field(default="", description="Label selector of the role that scales.")
    replicas: StrictInt = Field(default=0, description="Pods of the role that scales.")
    scaled_from: StrictInt = Field(
        default=0, description="The role's own `replicas` when `spec.replicas` was set from it."
    )
    roles: Annotated[
        Mapping[Role, RoleStatus],
        BeforeValidator(_read_roles),
        PlainSerializer(lambda roles: {role.field: asdict(status) for role, status in roles.items()}),
        WithJsonSchema(_ROLES_SCHEMA),
    ] = Field(default={}, description="Counts of each role.")
    # A pod that is replaced counts its restarts from 0 again, so the count alone would not show it.
    servers: Annotated[
        Mapping[str, str],
        # Earlier operators wrote "gone".
        BeforeValidator(
            lambda servers: {k: "" if known == "gone" else known for k, known in servers.items()}
        ),
        # "": removed by the next patch. Each generation of parameter servers has names of its own.
        PlainSerializer(lambda servers: {name: known or None for name, known in servers.items()}),
        WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
    ] = Field(default={}, description="Incarnation of each server pod, by which a restart is known.")
    progress: Annotated[
        Mapping[str, Any],
        PlainSerializer(lambda progress: dict(progress) or None),
        WithJsonSchema(_PROGRESS),
    ] = Field(default={}, description="What the job has last said about itself.")
    conditions: Annotated[
        tuple[Condition, ...],
        WithJsonSchema(_CONDITIONS),
    ] = Field(
        default=(),
        description="`PodsAccepted`, `SpecApplied`, `ServersReady`, `RowsComplete`, `Recovering`, "
        "`Degraded`, `Resized`, `Suspended`, `Complete`, `Failed`.",
    )

    @property
    def attempt(self) -> int:
        """Number of this start of the training, from 0."""
        # Each starts all pods again, and pods of an older attempt are told by this number.
        return self.restarts + self.resizes + self.suspensions

    @property
    def is_dumping(self) -> bool:
        """True while the running training is dumped for a resize."""
        stage = None if self.resize is None else self.resize.stage
        return self.phase is Phase.RESIZING and stage is Stage.DUMPING

    def is_moving(self, *stages: Stage) -> bool:
        """True in these stages of a resize without a checkpoint; without any, in all."""
        resize = self.resize
        return resize is not None and resize.generation > 0 and (not stages or resize.stage in stages)

    @property
    def is_training(self) -> bool:
        """True if all loaders and NN workers have started and have not been ended."""
        return self.phase is Phase.RUNNING or self.is_dumping

    @staticmethod
    def from_dict(values: Mapping[str, Any] | None) -> JobStatus:
        """Reads what the operator has stored; a new job has no status."""
        return parse(JobStatus, values, "status") if values and "phase" in values else JobStatus()

    def to_dict(self) -> dict[str, Any]:
        """Makes a merge patch: None removes a field."""
        values: dict[str, Any] = TypeAdapter(JobStatus).dump_python(self, mode="json", by_alias=True)
        for condition in values["conditions"]:
            # Left out rather than empty: API server 1.20 takes an empty text in a merge patch for null.
            if not condition["message"]:
                del condition["message"]
        return values

    def condition(self, kind: str) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def with_condition(self, new: Condition, now: str) -> JobStatus:
        """`new` in the place of the one of its type; its time changes with its truth only."""
        # By the truth alone: a new message on each pass must not make a condition look new.
        old = self.condition(new.type)
        since = old.since if old is not None and old.status == new.status else now
        # A list in a merge patch is replaced as a whole, so it is always complete.
        others = [condition for condition in self.conditions if condition.type != new.type]
        return replace(self, conditions=(*others, replace(new, since=since)))
