"""Names, labels and ports of a job's objects. The published ones are marked so: scripts rely on them."""

from __future__ import annotations

from enum import Enum

GROUP = "persia.com"  # published
VERSION = "v1"  # published
KIND = "PersiaJob"  # published
PLURAL = "persiajobs"  # published
CRD_NAME = f"{PLURAL}.{GROUP}"
# Keeps a deleted job until its daemon has ended, so that no pod is created for it afterwards.
FINALIZER = f"{GROUP}/operator"

JOB_LABEL = "persia_job"  # published
ROLE_LABEL = f"{GROUP}/role"
ATTEMPT_LABEL = f"{GROUP}/attempt"
GENERATION_LABEL = f"{GROUP}/generation"  # of parameter servers that have replaced others
SOURCES_LABEL = f"{GROUP}/sources"  # of a parameter server that begins by gathering rows: from how many
POD_GROUPS = "scheduling.x-k8s.io"  # the API group of the scheduler plug-ins
POD_GROUP_LABEL = f"{POD_GROUPS}/pod-group"
MASTER_SECRET = ("persia-system", "persia-operator-master")  # namespace and name, by default
CLIENT = "client"  # what the label of a role says of the certificate for clients of the job
HASH_ANNOTATION = f"{GROUP}/spec-hash"

NATS_PORT = 4222
# Port of metrics, status and readiness in every pod; further ranks of a pod use the following ports.
METRICS_PORT = 9100
# A StatefulSet's name, which is the job's with "-embedding-worker", is part of a label of its pods together
# with a hash of up to 11 characters; labels have 63.
MAX_JOB_NAME = 35


class Role(Enum):
    """The roles of a job. `field`: its name in spec and status; `suffix`: of object names (published)."""

    NATS = ("nats", "nats", "nats-server", NATS_PORT)
    PARAMETER_SERVER = ("embeddingParameterServer", "embedding-ps", "emb-server", 8888)
    STANDBY = ("standby", "standby", "emb-server", 8888)
    EMBEDDING_WORKER = ("embeddingWorker", "embedding-worker", "embedding-worker", 8887)
    NN_WORKER = ("nnWorker", "nn-worker", "nn-worker", 23456)
    INFERENCE = ("inference", "inference", "inference", 8001)  # answers requests with predictions
    DATA_LOADER = ("dataloader", "dataloader", "data-loader", 0)
    ROWS = ("rows", "rows", "rows", 0)  # carries rows from some parameter servers to others

    def __init__(self, field: str, suffix: str, container: str, port: int) -> None:
        self.field = field
        self.suffix = suffix
        self.container = container  # published, but for that of the NATS server
        self.port = port  # 0: none

    @property
    def is_training(self) -> bool:
        """These end by themselves, and end the job."""
        return self in (Role.NN_WORKER, Role.DATA_LOADER)

    @property
    def is_server(self) -> bool:
        """Servers are StatefulSets, started anew in their place; all others are single pods."""
        return not (self.is_training or self is Role.ROWS)


# Of an index of these two, either pod may have the rows.
PAIR = (Role.PARAMETER_SERVER, Role.STANDBY)


def object_name(job: str, role: Role, generation: int = 0) -> str:
    """The StatefulSet, service and disruption budget of a role.

    `generation`: of parameter servers. Those of two exist at once, each with a StatefulSet of its own.
    """
    return f"{job}-{role.suffix}" + (f"-g{generation}" if generation else "")


def pod_group_name(job: str, role: Role) -> str:
    """The gang of a role: pods that are scheduled together."""
    return f"{job}-servers" if role.is_server else f"{job}-training"


def secret_name(job: str, uid: str, suspensions: int) -> str:
    """The job's secret: a new one for each job, also of the same name, and after each suspension.

    The operator may create Secrets and not read them, so the name must tell that a secret is the job's.
    """
    return f"{job}-secret-{uid[:8]}-{suspensions}"


def tls_name(job: str, uid: str, suffix: str) -> str:
    """The Secret with a role's certificate, or that of clients. With the uid for the same reason."""
    return f"{job}-tls-{suffix}-{uid[:8]}"


def pod_address(job: str, role: Role, index: int) -> str:
    """`host:port` of a server's pod, wherever it runs; other pods of the job find it by this."""
    return f"{pod_name(job, role, index)}.{object_name(job, role)}:{role.port}"


def pod_name(job: str, role: Role, index: int, generation: int = 0) -> str:
    """Published. For servers it is what a StatefulSet calls its pods."""
    return f"{object_name(job, role, generation)}-{index}"
