"""A job's servers as one process sees them: its NATS session, its announcement, and the embedding workers.

Embedding workers may restart on another port: their announcements are followed for as long as the backend is
open.
"""

from __future__ import annotations

import os
import secrets

from persia import env
from persia._native import BatchReference, LookupResult, RemoteClient, TrainConfig
from persia.errors import FailedPreconditionError, PersiaError, UnavailableError
from persia.logger import get_default_logger
from persia.messaging.discovery import Advertiser, Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.interface import Session
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.observability.process import ProcessObserver
from persia.observability.settings import ObservabilitySettings
from persia.observability.sources import Source
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.staleness import ALL_SLOTS

__all__ = ["ClusterBackend", "JobConnection"]

_PROBE_S = 5.0


class JobConnection:
    """This process' connection to its job. Create it with `JobConnection.connect`, end it with `close`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.directory = Directory(session)
        self._advertisers: list[Advertiser] = []
        self._observer: ProcessObserver | None = None

    @classmethod
    def connect(cls, name: str) -> JobConnection:
        """Connects to the broker in PERSIA_NATS_URL; `name` labels the connection in the broker's logs."""
        url = env.get_nats_url()
        if url is None:
            raise FailedPreconditionError(
                "PERSIA_NATS_URL is not set: start the script with persia-launcher, or name the job's NATS "
                "broker in it"
            )
        session = NatsSession(url, env.get_job_name(), name=name)
        session.connect(env.get_deadline_s())
        return cls(session)

    def observe(self, source: Source) -> None:
        """Shows metrics and status of this process until `close`. Before `announce`, which tells where."""
        settings = ObservabilitySettings.from_environment(port_offset=env.get_local_rank() or 0)
        self._observer = ProcessObserver(source, self.session, settings)
        self._observer.serving = True

    def announce(
        self,
        role: str,
        index: int,
        replicas: int,
        *,
        address: str = "",
        schema: str = "",
        slot_modes: tuple[str, ...] = (),
    ) -> None:
        """Makes this process known as replica `index` of `role`, until `close`."""
        info = ServiceInfo(
            role=role,
            index=index,
            replicas=replicas,
            incarnation=secrets.randbits(64),
            address=address,
            schema=schema,
            pid=os.getpid(),
            status_address="" if self._observer is None else self._observer.address,
            slot_modes=slot_modes,
        )
        advertiser = Advertiser(self.session, info)
        advertiser.start()
        self._advertisers.append(advertiser)

    def close(self) -> None:
        """Says bye and disconnects; idempotent."""
        while self._advertisers:
            self._advertisers.pop().stop()
        if self._observer is not None:
            self._observer.close()
        self.session.close()


class ClusterBackend(EmbeddingBackend):
    """Embedding workers of a cluster behind RPC. Waits for all of them on creation.

    Workers that are started later are used; one that says bye is asked only for the batches that it holds.
    `schema`: the hash of this process' slots, which must be theirs; "" to accept any.
    """

    def __init__(self, cluster: JobConnection, *, schema: str = "") -> None:
        deadline_s = env.get_deadline_s()
        self._directory = cluster.directory
        self._incarnations: dict[int, int] = {}  # of the workers that have an address
        self._config: TrainConfig | None = None
        self._watch = cluster.directory.watch(EMBEDDING_WORKER, self._on_event)
        self._remote: RemoteClient | None = None
        try:
            workers = cluster.directory.wait_for(EMBEDDING_WORKER, deadline_s, schema=schema)
            self._remote = RemoteClient(len(workers), wire_dtype=env.get_wire_dtype())
            # Asked once more: a restart between the first answers and the client would go unnoticed.
            for worker in cluster.directory.wait_for(EMBEDDING_WORKER, deadline_s):
                self._use(worker)
        except BaseException:
            self._watch.close()
            raise
        super().__init__(
            self._remote,
            deadline_s=deadline_s,
            slot_modes=workers[0].slot_modes,
        )

    @property
    def client(self) -> RemoteClient:
        """What the calls go through; for its counts."""
        assert self._remote is not None, "made with this"
        return self._remote

    def configure(self, config: TrainConfig, *, replace: bool = False) -> None:
        super().configure(config, replace=replace)
        self._config = config

    def lookup(
        self, reference: BatchReference, *, requires_grad: bool, slots: int = ALL_SLOTS
    ) -> LookupResult:
        # A loader may have heard of a new worker before this process has.
        if reference.worker_index not in self._incarnations:
            self._find(reference.worker_index)
        return super().lookup(reference, requires_grad=requires_grad, slots=slots)

    def close(self) -> None:
        self._watch.close()

    def _find(self, index: int) -> None:
        worker = self._directory.probe(EMBEDDING_WORKER, index, _PROBE_S)
        if worker is None:
            raise UnavailableError(f"embedding worker {index} does not answer, which a data loader has used")
        self._use(worker)

    def _use(self, worker: ServiceInfo) -> None:
        assert self._remote is not None, "made before anybody asks for a worker"
        self._remote.set_worker(worker.index, worker.address)
        self._incarnations[worker.index] = worker.incarnation

    def _on_event(self, event: ServiceEvent) -> None:
        if self._remote is None:
            return
        worker, is_new = event.info, event.info.index not in self._incarnations
        try:
            if event.kind is EventKind.BYE:
                # A successor at its index may have said hello before.
                if self._incarnations.get(worker.index) == worker.incarnation:
                    self._remote.retire_worker(worker.index)
                return
            self._use(worker)
            if is_new:
                get_default_logger().info("%s is used from now on", worker)
            if self._config is not None:  # workers keep it for servers that restart
                super().configure(self._config)
        except PersiaError as failure:
            get_default_logger().error("%s announced itself and is not usable: %s", worker, failure)
