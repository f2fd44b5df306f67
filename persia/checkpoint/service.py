"""The checkpoint operations of one server, by request: one at a time, the last one is remembered."""

from __future__ import annotations

import threading

from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.checkpoint.server_changes import ChangesJob, ServerChanges
from persia.checkpoint.server_job import DumpJob, LoadJob, ServerJob, ServerShare, TwoPhaseJob
from persia.errors import NotFoundError, ResourceExhaustedError

__all__ = ["CheckpointService"]

_LEASE_S = 60.0
_PACKET_LEASE_S = 15.0  # one that is given up costs nothing, and a dump may wait for it


class CheckpointService:
    """Answers a coordinator; every request may be repeated. Thread-safe."""

    def __init__(
        self, share: ServerShare, changes: ServerChanges | None = None, *, lease_s: float = _LEASE_S
    ) -> None:
        """`lease_s`: an operation that nobody asks about for so long ends by itself."""
        self._share = share
        self._changes = changes or ServerChanges(share.store)
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._job: ServerJob | None = None

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
                self._changes.begin(request.arguments)
            return Report(state=State.DONE, result=self._changes.status())
        job = self._job
        if job is None or job.operation != request.operation:
            raise NotFoundError(f"this server knows no operation {request.operation}: it has restarted since")
        if request.verb is Verb.CANCEL:
            job.cancel()
        elif request.verb is Verb.APPLY and isinstance(job, TwoPhaseJob):
            job.apply()
        return job.report()

    def close(self) -> None:
        """Ends what runs."""
        if self._job is not None:
            self._job.cancel()

    def _begin(self, request: Request) -> ServerJob:
        with self._lock:
            if self._job is not None and self._job.operation == request.operation:
                return self._job
            if self._job is not None and not self._job.is_over:
                raise ResourceExhaustedError(
                    f"this server is busy with {self._job.operation}; one operation runs at a time"
                )
            self._job = self._make(request)
            self._job.start()
            return self._job

    def _end_packet(self) -> None:
        # Who begins to take changes has no packet under way: it is one of a trainer that was killed.
        job = self._job
        if isinstance(job, ChangesJob) and not job.is_over:
            job.cancel()

    def _make(self, request: Request) -> ServerJob:
        if request.verb is Verb.TAKE:
            return ChangesJob(request.operation, self._share, self._lease_s, request.arguments, self._changes)
        kind = DumpJob if request.verb is Verb.DUMP else LoadJob
        return kind(request.operation, self._share, self._lease_s, request.arguments)
