"""The checkpoint operations of one server, by request: one at a time, and those that ended are remembered."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.checkpoint.server_job import DumpJob, JobMaker, LoadJob, ServerJob, ServerShare, TwoPhaseJob
from persia.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)

__all__ = ["CheckpointService"]

_LEASE_S = 60.0


class ChangeTracker(JobMaker, Protocol):
    """The changes of a server since a packet, and the jobs that write them (persia.packets.changes)."""

    def begin(self, arguments: dict[str, Any]) -> None: ...

    def status(self) -> dict[str, Any]: ...


class CheckpointService:
    """Answers a coordinator; every request may be repeated. Thread-safe."""

    def __init__(
        self, share: ServerShare, changes: ChangeTracker | None = None, *, lease_s: float = _LEASE_S
    ) -> None:
        """`lease_s`: an operation that nobody asks about for so long ends by itself, and is forgotten."""
        self._share = share
        self._changes = changes
        self._lease_s = lease_s
        self._lock = threading.Lock()
        # By operation. Of those that ended, too: this server may be done with a dump, and at the next packet
        # of another coordinator, while the dump's still waits for slower servers.
        self._jobs: dict[str, ServerJob] = {}

    def handle(self, payload: bytes) -> bytes:
        """`answer` in bytes, for a NATS subject."""
        return self.answer(Request.decode(payload)).encode()

    def answer(self, request: Request) -> Report:
        """NotFoundError: an operation that this server does not know; ResourceExhaustedError: it is busy."""
        if request.verb in (Verb.DUMP, Verb.LOAD, Verb.TAKE):
            return self._begin(request).report()
        if request.verb in (Verb.TRACK, Verb.CHANGES):
            if request.verb is Verb.TRACK:
                self._end_packet()
                self._require_changes().begin(request.arguments)
            status = {"settings": None} if self._changes is None else self._changes.status()
            return Report(state=State.DONE, result=status)
        job = self._jobs.get(request.operation)
        if job is None:
            raise NotFoundError(f"this server knows no operation {request.operation}: it has restarted since")
        if request.verb is Verb.CANCEL:
            job.cancel()
        elif request.verb is Verb.APPLY and isinstance(job, TwoPhaseJob):
            job.apply()
        return job.report()

    def close(self) -> None:
        """Ends what runs, as the server does."""
        job = self._running()
        if job is not None:
            job.close()

    def _begin(self, request: Request) -> ServerJob:
        with self._lock:
            if request.operation in self._jobs:
                return self._jobs[request.operation]
            running = self._running()
            if running is not None:
                raise ResourceExhaustedError(
                    f"this server is busy with {running.operation}; one operation runs at a time"
                )
            job = self._make(request)
            self._forget_ended(request.verb)
            self._jobs[request.operation] = job
            job.start()
            return job

    def _running(self) -> ServerJob | None:
        return next((job for job in tuple(self._jobs.values()) if not job.is_over), None)

    def _forget_ended(self, verb: Verb) -> None:
        """All are over. Packets are of one coordinator, which begins one when it has ended the one before."""
        for job in tuple(self._jobs.values()):
            if job.is_abandoned or (verb is Verb.TAKE and job.is_packet):
                del self._jobs[job.operation]

    def _end_packet(self) -> None:
        # Who begins to take changes has no packet under way: it is one of a trainer that was killed.
        job = self._running()
        if job is not None and job.is_packet:
            job.cancel()

    def _make(self, request: Request) -> ServerJob:
        if request.verb is Verb.TAKE:
            return self._require_changes().make_job(request, self._share, self._lease_s)
        if request.arguments.get("in_place"):
            if self._share.pool is None:
                raise InvalidArgumentError(
                    "in_place=True, or a checkpoint that was dumped so, needs a storage tier, and the rows "
                    "of this server are in memory alone: set embedding_parameter_server_config.storage in "
                    "its global config, or use a checkpoint in files"
                )
            return self._share.pool.make_job(request, self._share, self._lease_s)
        kind = DumpJob if request.verb is Verb.DUMP else LoadJob
        return kind(request.operation, self._share, self._lease_s, request.arguments)

    def _require_changes(self) -> ChangeTracker:
        if self._changes is None:
            raise FailedPreconditionError(
                "this server has no incremental updates: set enable_incremental_update in its global config"
            )
        return self._changes
