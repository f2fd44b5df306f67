"""A process' connection to its job: session, directory of the other processes, metrics."""

from __future__ import annotations

import os
import secrets

from persia import env
from persia.errors import FailedPreconditionError
from persia.messaging.discovery import Advertiser, Directory, ServiceInfo
from persia.messaging.interface import Session
from persia.messaging.session import NatsSession
from persia.observability.process import ObservabilitySettings, ProcessObserver
from persia.observability.sources import Source
from persia.security import install


class JobConnection:
    """This process' connection to its job. Create it with `JobConnection.connect`, end it with `close`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.directory = Directory(session)
        self.failure = ""  # the error that ends this process, for the processes that wait for it
        self._advertisers: list[Advertiser] = []
        self._observer: ProcessObserver | None = None

    @classmethod
    def connect(
        cls, name: str, role: str, *, url: str | None = None, deadline_s: float | None = None
    ) -> JobConnection:
        """Connects to the broker at `url`, as `role` of persia.security, which the process has from now on.

        `name` labels the connection in the broker's logs. None: PERSIA_NATS_URL, PERSIA_DEADLINE_SEC.
        """
        url = url or env.get_nats_url()
        if url is None:
            raise FailedPreconditionError(
                "PERSIA_NATS_URL is not set: start the script with persia-launcher, or name the job's NATS "
                "broker in it"
            )
        install(role)
        # `connect` closes the session itself where it fails.
        session = NatsSession(url, env.get_job_name(), name=name, role=role)
        session.connect(deadline_s or env.get_deadline_s())
        return cls(session)

    def observe(self, source: Source) -> None:
        """Shows metrics and status of this process until `close`. Call it before `advertise`."""
        # Ranks of one host have one environment: with a fixed port each needs its own.
        settings = ObservabilitySettings.from_environment(port_offset=env.get_local_rank() or 0)
        self._observer = ProcessObserver(source, self.session, settings)
        self._observer.serving = True

    def advertise(
        self,
        role: str,
        index: int,
        replicas: int,
        *,
        address: str = "",
        schema: str = "",
        slot_modes: tuple[str, ...] = (),
        status_address: str = "",
    ) -> None:
        """Advertises this process as replica `index` of `role`, until `close`.

        `status_address`: of metrics and status, unless `observe` shows them.
        """
        info = ServiceInfo(
            role=role,
            index=index,
            replicas=replicas,
            # Tells a restarted process from the one before it at the same index: references to its batches
            # are void.
            incarnation=secrets.randbits(64),
            address=address,
            schema=schema,
            pid=os.getpid(),
            status_address=status_address if self._observer is None else self._observer.address,
            slot_modes=slot_modes,
        )
        advertiser = Advertiser(self.session, info)
        # Kept only when it has started: one that was refused must not say that it has left.
        advertiser.start()
        self._advertisers.append(advertiser)

    def close(self) -> None:
        """Publishes that this process has left, and disconnects; idempotent."""
        # First: others must stop asking before the session stops answering.
        while self._advertisers:
            self._advertisers.pop().stop(self.failure)
        # Metrics until the end: a scrape during a long stop must not look like a lost process.
        if self._observer is not None:
            self._observer.close()
        self.session.close()
