"""The servers of a job as a coordinator sees them: behind NATS, or in this process.

In: a `Request`. Out: a `Report`, or an error that tells whether the request may be repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from persia.checkpoint.protocol import Report, Request
from persia.checkpoint.service import CheckpointService
from persia.messaging.discovery import Directory, ServiceInfo
from persia.messaging.interface import Session
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER


class Peer(Protocol):
    """A server that takes part in an operation."""

    @property
    def is_remote(self) -> bool:
        """Whether the peer accesses storage from another process."""

    def call(self, request: Request, timeout_s: float) -> Report:
        """Sends the request once. UnavailableError, DeadlineExceededError: it may be repeated."""

    def __str__(self) -> str:
        """For messages."""


class NatsPeer:
    """A parameter server of the job."""

    is_remote = True

    def __init__(self, session: Session, info: ServiceInfo) -> None:
        self._session = session
        self._info = info
        self._subject = session.subjects.checkpoint(info.index)

    def call(self, request: Request, timeout_s: float) -> Report:
        # The subject names an index alone: of another number of servers, another one would answer.
        request = replace(request, replicas=self._info.replicas, generation=self._info.generation)
        return Report.decode(self._session.request(self._subject, request.encode(), timeout_s))

    def __str__(self) -> str:
        return str(self._info)


class LocalPeer:
    """A store of this process."""

    is_remote = False

    def __init__(self, service: CheckpointService) -> None:
        self._service = service

    def call(self, request: Request, timeout_s: float) -> Report:
        return self._service.answer(request)

    def __str__(self) -> str:
        return "the store of this process"


def find_servers(session: Session, deadline_s: float) -> list[Peer]:
    """Waits for all parameter servers of the job; returns them by index."""
    # All: rows of a server that is missing would be missing in the checkpoint, without an error.
    servers = Directory(session).wait_for(EMBEDDING_PARAMETER_SERVER, deadline_s)
    return [NatsPeer(session, server) for server in servers]
