"""The spec of a PersiaJob: the one source of its schema, its defaults and the table in the documentation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, WithJsonSchema

from persia_k8s.errors import SpecError
from persia_k8s.names import ATTEMPT_LABEL, GENERATION_LABEL, JOB_LABEL, ROLE_LABEL, SOURCES_LABEL, Role
from persia_k8s.schema import CONFIG, list_of_objects, parse

# As Kubernetes declares its own types: a mistake is refused by kubectl apply rather than found in a pod.
_QUANTITIES = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
        "pattern": r"^(\d+|\d+\.\d*|\.\d+)([EPTGMKk]i?|m|[eE][+-]?\d+)?$",
    },
}
_RESOURCES = {"type": "object", "properties": {"limits": _QUANTITIES, "requests": _QUANTITIES}}
_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_ANY_OBJECT = {"type": "object", **_OPEN}
_ENV = list_of_objects(
    {
        "name": {"type": "string", "minLength": 1},
        "value": {"type": "string"},
        "valueFrom": _ANY_OBJECT,
    },
    required=["name"],
)
# Kinds of volumes are many, and those of a newer Kubernetes are to pass: their own fields are not listed.
_VOLUMES = list_of_objects({"name": {"type": "string", "minLength": 1}}, required=["name"], **_OPEN)
_VOLUME_MOUNTS = list_of_objects(
    {"name": {"type": "string"}, "mountPath": {"type": "string", "minLength": 1}},
    required=["name", "mountPath"],
    **_OPEN,
)
_TOLERATIONS = list_of_objects(
    {
        "key": {"type": "string"},
        "operator": {"type": "string", "enum": ["Exists", "Equal"]},
        "value": {"type": "string"},
        "effect": {"type": "string", "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
        "tolerationSeconds": {"type": "integer"},
    }
)
_OF_RESIZE = {
    "embedding_parameter_server",
    "env",
    "volumes",
    "resize_checkpoint",
    "progress_deadline_seconds",
    "backoff_limit",
}
_OWN_LABELS = (JOB_LABEL, ROLE_LABEL, ATTEMPT_LABEL, GENERATION_LABEL, SOURCES_LABEL)
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
# Open: the API server judges each pod of the job before it is made, and knows the fields of its version.
_POD_TEMPLATE = {
    **_ANY_OBJECT,
    "properties": {
        "metadata": {**_ANY_OBJECT, "properties": {"labels": _STRINGS, "annotations": _STRINGS}},
        "spec": _ANY_OBJECT,
    },
}

# A text that is given and empty is a mistake, such as a variable of a template that was not set.
Text = Annotated[str, Field(min_length=1)]
Object = Mapping[str, Any]
Resources = Annotated[Object, WithJsonSchema(_RESOURCES)]
Env = Annotated[Sequence[Object], WithJsonSchema(_ENV)]
PodTemplate = Annotated[Object, WithJsonSchema(_POD_TEMPLATE)]


class Section(BaseModel):
    """A part of the spec. The docstring below a field is its description in schema and documentation."""

    model_config = ConfigDict(
        **CONFIG,
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),  # pydantic before 2.10 warns of fields such as model_name
    )


class RoleSpec(Section):
    """Fields of every role."""

    replicas: StrictInt = Field(ge=1, le=65536)
    """Number of pods."""
    resources: Resources = {}
    """Kubernetes resource requirements of the container."""
    volume_mounts: Annotated[Sequence[Object], WithJsonSchema(_VOLUME_MOUNTS)] = []
    """Mounts of `spec.volumes`. The spelling `read_only` is taken for `readOnly`."""
    env: Env = []
    """Environment variables of this role; they win over `spec.env`."""
    image: Text | None = None
    """Image; by default the operator's CPU image, or its CUDA image where `resources` name
    `nvidia.com/gpu`."""
    node_selector: Annotated[Mapping[str, str], WithJsonSchema(_STRINGS)] = {}
    """Labels of the nodes to run on."""
    tolerations: Annotated[Sequence[Object], WithJsonSchema(_TOLERATIONS)] = []
    """Taints of nodes to put up with."""
    affinity: Annotated[Object, WithJsonSchema(_ANY_OBJECT)] = {}
    """Kubernetes affinity of the pods."""
    max_unavailable: StrictInt = Field(default=0, ge=0)
    """Pods that a voluntary disruption, such as a node drain, may end at once."""
    pod_template: PodTemplate = {}
    """`metadata` and `spec` of a Kubernetes pod, merged over the operator's (strategic merge) and over the
    fields above. The role's container is the one with its published name; others are sidecars."""


class ParameterServerSpec(RoleSpec):
    """Fields of the parameter servers."""

    standbys: StrictInt = Field(default=0, ge=0, le=1)
    """Number of standbys of each server: pods with a second copy of its rows, made from the fields of this
    role. Set `embedding_parameter_server_config.standbys` of the global config to the same number. Not
    allowed beside `inference`. It is fixed when the job starts, and again when a suspended job is resumed."""
    rebalance: StrictInt = Field(default=0, ge=0)
    """Raise it while the job trains, to replace the servers by as many whose measured load is even. Ignored
    with `resizeCheckpoint` or standbys."""


class NnWorkerSpec(RoleSpec):
    """NN workers are nodes of one DDP group."""

    nproc_per_node: StrictInt = Field(default=1, ge=1)
    """Ranks of each pod, usually one for each GPU."""


class InferenceSpec(RoleSpec):
    """Servers of predictions; a job that has them trains nothing."""

    checkpoint: Text
    """Directory or URL of a checkpoint with `jit_dense.pt`: parameter servers load its rows, the servers of
    this role its model. One checkpoint, not a directory of several. It cannot be changed: start another job
    beside this one."""
    model_name: Text = "model"
    """What requests call the model."""
    arguments: Sequence[str] = []
    """Further arguments of `persia-launcher serve`, such as `--threads=2`."""
    # One by default: unlike a parameter server, a pod of this role holds nothing that would be lost.
    max_unavailable: StrictInt = Field(default=1, ge=0)
    """Pods that a voluntary disruption, such as a node drain, may end at once."""


class PersiaEnv(Section):
    """Paths inside the containers, under the published names."""

    global_config: Text | None = Field(default=None, validation_alias="PERSIA_GLOBAL_CONFIG")
    """Path of `global_config.yml`."""
    embedding_config: Text | None = Field(default=None, validation_alias="PERSIA_EMBEDDING_CONFIG")
    """Path of `embedding_config.yml`."""
    nn_worker_entry: Text | None = Field(default=None, validation_alias="PERSIA_NN_WORKER_ENTRY")
    """Path of the training script."""
    dataloader_entry: Text | None = Field(default=None, validation_alias="PERSIA_DATALOADER_ENTRY")
    """Path of the data loading script."""


class NatsSpec(Section):
    """The job's broker: started with the job, unless `url` or a PERSIA_NATS_URL in `spec.env` names one."""

    url: str | None = Field(default=None, pattern=r"^(nats|tls)://.+")
    """Broker to use; without it, and without `PERSIA_NATS_URL` in `spec.env`, the operator runs one."""
    max_payload: str = Field(default="64MB", pattern=r"^[0-9]+ ?(KB|MB|GB)?$")
    """Largest message of the operator's broker. A submitted batch is one message, with its ID features and
    its dense features."""
    image: Text | None = None
    """Image of the broker; by default the operator's CPU image."""
    resources: Resources = {}
    """Kubernetes resource requirements of the broker."""
    pod_template: PodTemplate = {}
    """As `ROLE.podTemplate`."""


class SecuritySpec(Section):
    """How the job's processes talk to each other."""

    tls: StrictBool = False
    """Encrypts all connections of the job's processes by TLS 1.3, with certificates that the operator makes
    and renews. It is fixed when the job starts, and again when a suspended job is resumed. Off by default:
    it costs processor time, and clients of predictions need a certificate then."""
    certificate_days: StrictInt = Field(default=30, ge=1, le=365)
    """Lifetime of the certificates. The operator renews them after two thirds of it, without a restart."""


class JobSpec(Section):
    """What to run."""

    persia_env: PersiaEnv = PersiaEnv()
    """Where the job's files are."""
    env: Env = []
    """Environment variables of all pods."""
    volumes: Annotated[Sequence[Object], WithJsonSchema(_VOLUMES)] = []
    """Kubernetes volumes, for the `volumeMounts` of the roles."""
    log_level: Literal["debug", "info", "warn", "warning", "error", "critical"] = "info"
    """`LOG_LEVEL` of all pods."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "Always"
    """When nodes pull images."""
    restart_policy: Literal["Never", "OnFailure", "Always"] = "Never"
    """`Never`: the job fails with its first data loader or NN worker that fails. `OnFailure`, `Always`: they
    are started again, `backoffLimit` times. Servers are always started again."""
    replicas: StrictInt | None = Field(default=None, ge=1, le=65536)
    """Pods of the role that scales: inference servers, or embedding workers of a training. `kubectl scale`
    and autoscalers set it. The operator sets it where it is missing, and after each change of the role's own
    `replicas`."""
    suspend: StrictBool = False
    """Ends all pods and keeps the job; `false` starts it again, with a new job secret. Rows survive in a
    checkpoint only. Queueing systems such as Kueue set it."""
    active_deadline_seconds: StrictInt | None = Field(default=None, ge=1)
    """Seconds after which a job that has not ended fails, counted from its creation or the end of its
    suspension; without it, never."""
    progress_deadline_seconds: StrictInt = Field(default=600, ge=1)
    """Seconds for which the API server may refuse pods of a job that is not running, before the job fails. A
    quota, a service account or a class that is missing may appear meanwhile. Also, seconds after which a
    resize is cancelled whose new parameter servers have not started."""
    backoff_limit: StrictInt = Field(default=3, ge=0)
    """Restarts that the job survives: of the training, of its data loaders, and of each server."""
    backoff_seconds: StrictInt = Field(default=5, ge=0)
    """Pause before the training is started again; doubled each time, up to 300."""
    ttl_seconds_after_finished: StrictInt | None = Field(default=None, ge=0)
    """Seconds after its end at which the job is deleted with all it owns; without it, never."""
    enable_metrics: StrictBool = True
    """Each pod shows metrics, status and readiness on port 9100, annotated for Prometheus, and pushes to
    `PERSIA_METRICS_GATEWAY_ADDR` where `env` has it. `false` turns all of this off; probes then only look
    whether servers listen."""
    resize_checkpoint: Text | None = None
    """Directory or URL that all parameter servers and NN workers reach. The job stops and goes through a
    checkpoint there when `embeddingParameterServer.replicas` changes while it runs. Without it, training
    continues meanwhile, except with standbys, storage tiers and some other settings, where the change is
    refused. The checkpoint is removed when the job succeeds."""
    security: SecuritySpec = SecuritySpec()
    """Encryption of the job's connections."""
    nats: NatsSpec = NatsSpec()
    """The job's broker."""
    embedding_parameter_server: ParameterServerSpec
    """The servers that hold the rows."""
    embedding_worker: RoleSpec
    """The servers that prepare embeddings of batches."""
    nn_worker: NnWorkerSpec | None = None
    """The pods that train the dense network. Required, unless there is `inference`."""
    dataloader: RoleSpec | None = None
    """The pods that send batches; none where the training script has its own data."""
    inference: InferenceSpec | None = None
    """The pods that answer requests with predictions of a checkpoint, over gRPC; instead of `nnWorker` and
    `dataloader`. The job runs until it is deleted."""
    global_config_path: Text | None = None
    """Older spelling of `persiaEnv.PERSIA_GLOBAL_CONFIG`."""
    embedding_config_path: Text | None = None
    """Older spelling of `persiaEnv.PERSIA_EMBEDDING_CONFIG`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A PersiaJob as the rest of this package sees it."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: str = ""  # by the clock of the API server
    spec: JobSpec

    @staticmethod
    def from_object(resource: Mapping[str, Any]) -> Job:
        """Reads the object that the API server stores. Raises SpecError."""
        metadata = resource["metadata"]
        job = Job(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            created=metadata.get("creationTimestamp", ""),
            spec=parse(JobSpec, resource.get("spec"), "spec"),
        )
        # The CRD refuses these, too; an object of an older CRD may still have them.
        if job.embedding_config is None:
            raise SpecError("spec.persiaEnv.PERSIA_EMBEDDING_CONFIG is missing: name the embedding config")
        if (job.spec.nn_worker is None) == (job.spec.inference is None):
            raise SpecError("spec.nnWorker is missing, or spec.inference: a job trains, or answers requests")
        if job.spec.inference is not None and job.spec.dataloader is not None:
            raise SpecError("spec.dataloader is of no use beside spec.inference: leave it out")
        if job.spec.inference is not None and Role.STANDBY in job.roles:
            raise SpecError(
                "spec.embeddingParameterServer.standbys is 1 beside spec.inference: such servers load their "
                "rows again from the checkpoint; leave it out"
            )
        if job.spec.security.tls and not job.has_own_nats and not job.is_inference:
            raise SpecError(
                "spec.security.tls is true and the job names a broker: the operator makes certificates for "
                "its own broker only; remove spec.nats.url and PERSIA_NATS_URL, or set PERSIA_TLS_DIR in "
                "spec.env instead"
            )
        _check_template("spec.nats", job.spec.nats.pod_template)
        for role, section in job.roles.items():
            _check_template(f"spec.{role.field}", section.pod_template)
        return job

    @property
    def embedding_config(self) -> str | None:
        # The newer spelling wins.
        return self.spec.persia_env.embedding_config or self.spec.embedding_config_path

    @property
    def global_config(self) -> str | None:
        return self.spec.persia_env.global_config or self.spec.global_config_path

    @property
    def roles(self) -> dict[Role, RoleSpec]:
        """The roles with a section of their own, in the order in which they start."""
        servers = self.spec.embedding_parameter_server
        sections = {
            Role.PARAMETER_SERVER: servers,
            Role.STANDBY: servers if servers.standbys else None,
            Role.EMBEDDING_WORKER: self.spec.embedding_worker,
            Role.INFERENCE: self.spec.inference,
            Role.DATA_LOADER: self.spec.dataloader,
            Role.NN_WORKER: self.spec.nn_worker,
        }
        return {role: section for role, section in sections.items() if section is not None}

    def with_standbys(self, number: int) -> Job:
        """This job with so many standbys of each parameter server."""
        section = self.spec.embedding_parameter_server.model_copy(update={"standbys": number})
        return replace(self, spec=self.spec.model_copy(update={"embedding_parameter_server": section}))

    @property
    def scaled_role(self) -> Role:
        """The role of `spec.replicas`."""
        return Role.INFERENCE if self.is_inference else Role.EMBEDDING_WORKER

    @property
    def replicas(self) -> dict[Role, int]:
        """The wanted number of pods of each role with a section of its own."""
        own = {role: section.replicas for role, section in self.roles.items()}
        return own if self.spec.replicas is None else {**own, self.scaled_role: self.spec.replicas}

    @property
    def wish(self) -> int:
        """Digest of the number of parameter servers and of all fields that a resize depends on. A resize that
        has failed is tried again once this changes."""
        # Without defaults: the fields of a later version must not change what an earlier one has stored.
        fields = self.spec.model_dump(mode="json", include=_OF_RESIZE, exclude_defaults=True)
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()
        return int.from_bytes(digest[:6], "big")  # every reader of JSON has integers of 48 bits

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one NN worker pod; 1 without NN workers."""
        return 1 if self.spec.nn_worker is None else self.spec.nn_worker.nproc_per_node

    @property
    def is_inference(self) -> bool:
        """True if the job serves predictions instead of training. Such a job needs no broker."""
        return self.spec.inference is not None

    @property
    def has_own_nats(self) -> bool:
        """True if the operator runs the job's broker, because the spec names none."""
        # A variable from a Secret counts, too: its value is not known here, and need not be.
        is_named = any(variable["name"] == "PERSIA_NATS_URL" for variable in self.spec.env)
        return self.spec.nats.url is None and not is_named and not self.is_inference


def _check_template(path: str, template: Object) -> None:
    """Raises SpecError for a field by which the operator finds or counts pods."""
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    taken = {
        **{f"metadata.labels.{name}": name in (metadata.get("labels") or {}) for name in _OWN_LABELS},
        **{f"metadata.{name}": name not in ("labels", "annotations") for name in metadata},
        **{f"spec.{name}": name in spec for name in ("restartPolicy", "hostname", "subdomain")},
        **{f"{name}": name not in ("metadata", "spec") for name in template},
    }
    for name, is_taken in taken.items():
        if is_taken:
            raise SpecError(
                f"{path}.podTemplate.{name} cannot be set: the operator sets it, or no pod has it"
            )
