"""What a PersiaJob says: the one source of its schema, of its defaults and of the documentation's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persia_k8s.errors import SpecError
from persia_k8s.names import Role
from persia_k8s.schema import parse, spec_field

__all__ = ["InferenceSpec", "Job", "JobSpec", "NatsSpec", "NnWorkerSpec", "PersiaEnv", "RoleSpec"]

_QUANTITIES = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
        "pattern": r"^(\d+|\d+\.\d*|\.\d+)([EPTGMKk]i?|m|[eE][+-]?\d+)?$",
    },
}
_RESOURCES = {"type": "object", "properties": {"limits": _QUANTITIES, "requests": _QUANTITIES}}
_ENV = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "value": {"type": "string"},
            "valueFrom": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
    },
}
_VOLUMES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string", "minLength": 1}},
        "x-kubernetes-preserve-unknown-fields": True,
    },
}
_VOLUME_MOUNTS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "mountPath"],
        "properties": {"name": {"type": "string"}, "mountPath": {"type": "string", "minLength": 1}},
        "x-kubernetes-preserve-unknown-fields": True,
    },
}
_TOLERATIONS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "key": {"type": "string"},
            "operator": {"type": "string", "enum": ["Exists", "Equal"]},
            "value": {"type": "string"},
            "effect": {"type": "string", "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            "tolerationSeconds": {"type": "integer"},
        },
    },
}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_ANY_OBJECT = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

Object = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """What all roles have."""

    replicas: int = spec_field("Number of pods.", minimum=1, maximum=65536)
    resources: Object = spec_field(
        "Kubernetes resource requirements of the container.", default={}, schema=_RESOURCES
    )
    volume_mounts: Sequence[Object] = spec_field(
        "Mounts of `spec.volumes`. The spelling `read_only` is taken for `readOnly`.",
        default=[],
        schema=_VOLUME_MOUNTS,
    )
    env: Sequence[Object] = spec_field(
        "Environment variables of this role; they win over `spec.env`.", default=[], schema=_ENV
    )
    image: str | None = spec_field(
        "Image; by default the operator's CPU image, or its CUDA image where `resources` name "
        "`nvidia.com/gpu`.",
        default=None,
        minLength=1,
    )
    node_selector: Mapping[str, str] = spec_field(
        "Labels of the nodes to run on.", default={}, schema=_STRINGS
    )
    tolerations: Sequence[Object] = spec_field(
        "Taints of nodes to put up with.", default=[], schema=_TOLERATIONS
    )
    affinity: Object = spec_field("Kubernetes affinity of the pods.", default={}, schema=_ANY_OBJECT)
    max_unavailable: int = spec_field(
        "Pods that a voluntary disruption, such as a node drain, may end at once.", default=0, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class NnWorkerSpec(RoleSpec):
    """NN workers are nodes of one DDP group."""

    nproc_per_node: int = spec_field("Ranks of each pod, usually one for each GPU.", default=1, minimum=1)


@dataclass(frozen=True, kw_only=True)
class InferenceSpec(RoleSpec):
    """Servers of predictions; a job that has them trains nothing."""

    checkpoint: str = spec_field(
        "Directory or URL of a checkpoint with `jit_dense.pt`: parameter servers load its rows, the servers "
        "of this role its model. One checkpoint, not a directory of several. It cannot be changed: start "
        "another job beside this one.",
        minLength=1,
    )
    model_name: str = spec_field("What requests call the model.", default="model", minLength=1)
    arguments: Sequence[str] = spec_field(
        "Further arguments of `persia-launcher serve`, such as `--threads=2`.",
        default=[],
        schema={"type": "array", "items": {"type": "string"}},
    )
    max_unavailable: int = spec_field(
        "Pods that a voluntary disruption, such as a node drain, may end at once.", default=1, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class PersiaEnv:
    """Paths inside the containers, under the published names."""

    global_config: str | None = spec_field(
        "Path of `global_config.yml`.", default=None, name="PERSIA_GLOBAL_CONFIG", minLength=1
    )
    embedding_config: str | None = spec_field(
        "Path of `embedding_config.yml`.", default=None, name="PERSIA_EMBEDDING_CONFIG", minLength=1
    )
    nn_worker_entry: str | None = spec_field(
        "Path of the training script.", default=None, name="PERSIA_NN_WORKER_ENTRY", minLength=1
    )
    dataloader_entry: str | None = spec_field(
        "Path of the data loading script.", default=None, name="PERSIA_DATALOADER_ENTRY", minLength=1
    )


@dataclass(frozen=True, kw_only=True)
class NatsSpec:
    """The job's broker: started with the job, unless `url` or a PERSIA_NATS_URL in `spec.env` names one."""

    url: str | None = spec_field(
        "Broker to use; without it, and without `PERSIA_NATS_URL` in `spec.env`, the operator runs one.",
        default=None,
        pattern=r"^(nats|tls)://.+",
    )
    max_payload: str = spec_field(
        "Largest message of the operator's broker: a batch's ID features, or its dense part.",
        default="64MB",
        pattern=r"^[0-9]+ ?(KB|MB|GB)?$",
    )
    image: str | None = spec_field(
        "Image of the broker; by default the operator's CPU image.", default=None, minLength=1
    )
    resources: Object = spec_field(
        "Kubernetes resource requirements of the broker.", default={}, schema=_RESOURCES
    )


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """`spec` of a PersiaJob."""

    persia_env: PersiaEnv = spec_field("Where the job's files are.", default=PersiaEnv())
    env: Sequence[Object] = spec_field("Environment variables of all pods.", default=[], schema=_ENV)
    volumes: Sequence[Object] = spec_field(
        "Kubernetes volumes, for the `volumeMounts` of the roles.", default=[], schema=_VOLUMES
    )
    log_level: str = spec_field(
        "`LOG_LEVEL` of all pods.",
        default="info",
        enum=["debug", "info", "warn", "warning", "error", "critical"],
    )
    image_pull_policy: str = spec_field(
        "When nodes pull images.", default="Always", enum=["Always", "IfNotPresent", "Never"]
    )
    restart_policy: str = spec_field(
        "`Never`: the job fails with its first data loader or NN worker that fails. `OnFailure`, `Always`: "
        "they are started again, `backoffLimit` times. Servers are always started again.",
        default="Never",
        enum=["Never", "OnFailure", "Always"],
    )
    backoff_limit: int = spec_field(
        "Restarts that the job survives: of the training, of its data loaders, and of each server.",
        default=3,
        minimum=0,
    )
    backoff_seconds: int = spec_field(
        "Pause before the training is started again; doubled each time, up to 300.", default=5, minimum=0
    )
    ttl_seconds_after_finished: int | None = spec_field(
        "Seconds after its end at which the job is deleted with all it owns; without it, never.",
        default=None,
        minimum=0,
    )
    enable_metrics: bool = spec_field(
        "Each pod shows metrics, status and readiness on port 9100, annotated for Prometheus, and pushes to "
        "`PERSIA_METRICS_GATEWAY_ADDR` where `env` has it. `false` turns all of this off; probes then only "
        "look whether servers listen.",
        default=True,
    )
    resize_checkpoint: str | None = spec_field(
        "Directory or URL that all parameter servers and NN workers reach. The job goes through a checkpoint "
        "there when `embeddingParameterServer.replicas` changes while it runs; without it, that is refused. "
        "The checkpoint is removed when the job succeeds.",
        default=None,
        minLength=1,
    )
    nats: NatsSpec = spec_field("The job's broker.", default=NatsSpec())
    embedding_parameter_server: RoleSpec = spec_field("The servers that hold the rows.")
    embedding_worker: RoleSpec = spec_field("The servers that prepare embeddings of batches.")
    nn_worker: NnWorkerSpec | None = spec_field(
        "The pods that train the dense network. Required, unless there is `inference`.", default=None
    )
    dataloader: RoleSpec | None = spec_field(
        "The pods that send batches; none where the training script has its own data.", default=None
    )
    inference: InferenceSpec | None = spec_field(
        "The pods that answer requests with predictions of a checkpoint, over gRPC; instead of `nnWorker` "
        "and `dataloader`. The job runs until it is deleted.",
        default=None,
    )
    global_config_path: str | None = spec_field(
        "Older spelling of `persiaEnv.PERSIA_GLOBAL_CONFIG`.", default=None, minLength=1
    )
    embedding_config_path: str | None = spec_field(
        "Older spelling of `persiaEnv.PERSIA_EMBEDDING_CONFIG`.", default=None, minLength=1
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A PersiaJob as the rest of this package sees it."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: JobSpec

    @staticmethod
    def from_object(resource: Mapping[str, Any]) -> Job:
        """From the object that the API server stores. Raises SpecError."""
        metadata = resource["metadata"]
        job = Job(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            spec=parse(JobSpec, resource.get("spec"), "spec"),
        )
        if job.embedding_config is None:
            raise SpecError("spec.persiaEnv.PERSIA_EMBEDDING_CONFIG is missing: name the embedding config")
        if (job.spec.nn_worker is None) == (job.spec.inference is None):
            raise SpecError("spec.nnWorker is missing, or spec.inference: a job trains, or answers requests")
        if job.spec.inference is not None and job.spec.dataloader is not None:
            raise SpecError("spec.dataloader is of no use beside spec.inference: leave it out")
        return job

    @property
    def embedding_config(self) -> str | None:
        return self.spec.persia_env.embedding_config or self.spec.embedding_config_path

    @property
    def global_config(self) -> str | None:
        return self.spec.persia_env.global_config or self.spec.global_config_path

    @property
    def roles(self) -> dict[Role, RoleSpec]:
        """The roles with a section of their own, in the order in which they start."""
        roles: dict[Role, RoleSpec] = {
            Role.PARAMETER_SERVER: self.spec.embedding_parameter_server,
            Role.EMBEDDING_WORKER: self.spec.embedding_worker,
        }
        if self.spec.inference is not None:
            roles[Role.INFERENCE] = self.spec.inference
        if self.spec.dataloader is not None:
            roles[Role.DATA_LOADER] = self.spec.dataloader
        if self.spec.nn_worker is not None:
            roles[Role.NN_WORKER] = self.spec.nn_worker
        return roles

    @property
    def ranks_per_node(self) -> int:
        """Of an NN worker; 1 where there is none."""
        return 1 if self.spec.nn_worker is None else self.spec.nn_worker.nproc_per_node

    @property
    def is_inference(self) -> bool:
        """Whether it answers requests, rather than trains. Such a job needs no broker."""
        return self.spec.inference is not None

    @property
    def has_own_nats(self) -> bool:
        """Whether the operator runs the job's broker, because the spec names none."""
        is_named = any(variable["name"] == "PERSIA_NATS_URL" for variable in self.spec.env)
        return self.spec.nats.url is None and not is_named and not self.is_inference
