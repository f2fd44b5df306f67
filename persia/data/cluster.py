"""A job's servers as one process sees them: its NATS session, its announcement, and the embedding workers.

Embedding workers may restart on another port: their announcements are followed for as long as the backend is
open.
"""

from __future__ import annotations

import os
import secrets

from persia import env
from persia._native import RemoteClient
from persia.embedding.backend import ClientBackend
from persia.errors import FailedPreconditionError, PersiaError
from persia.logger import get_default_logger
from persia.messaging.discovery import Announcer, Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_WORKER

__all__ = ["Cluster", "ClusterBackend"]


class Cluster:
    """This process' connection to its job. Create it with `Cluster.connect`, end it with `close`."""

    def __init__(self, session: NatsSession) -> None:
        self.session = session
        self.directory = Directory(session)
        self._announcers: list[Announcer] = []

    @classmethod
    def connect(cls, name: str) -> Cluster:
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

    def announce(self, role: str, index: int, replicas: int, *, address: str = "") -> None:
        """Makes this process known as replica `index` of `role`, until `close`."""
        info = ServiceInfo(
            role=role,
            index=index,
            replicas=replicas,
            incarnation=secrets.randbits(64),
            address=address,
            pid=os.getpid(),
        )
        announcer = Announcer(self.session, info)
        announcer.start()
        self._announcers.append(announcer)

    def close(self) -> None:
        """Says bye and disconnects; idempotent."""
        while self._announcers:
            self._announcers.pop().stop()
        self.session.close()


class ClusterBackend(ClientBackend):
    """Embedding workers of a cluster behind RPC. Waits for all of them on creation."""

    def __init__(self, cluster: Cluster) -> None:
        deadline_s = env.get_deadline_s()
        self._watch = cluster.directory.watch(EMBEDDING_WORKER, self._on_event)
        self._remote: RemoteClient | None = None
        try:
            self._remote = RemoteClient(len(cluster.directory.wait_for(EMBEDDING_WORKER, deadline_s)))
            # Asked once more: a restart between the first answers and the client would go unnoticed.
            for worker in cluster.directory.wait_for(EMBEDDING_WORKER, deadline_s):
                self._remote.set_worker(worker.index, worker.address)
        except BaseException:
            self._watch.close()
            raise
        super().__init__(self._remote, deadline_s=deadline_s)

    def close(self) -> None:
        self._watch.close()

    def _on_event(self, event: ServiceEvent) -> None:
        if self._remote is None or event.kind is not EventKind.HELLO:
            return
        try:
            self._remote.set_worker(event.info.index, event.info.address)
        except PersiaError as failure:
            get_default_logger().error("%s announced itself and is not usable: %s", event.info, failure)
