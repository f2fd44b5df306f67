"""Runs the checkpoint operations of one server: one at a time, and remembers those that ended."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.checkpoint.server_job import DumpJob, JobMaker, LoadJob, ServerJob, ServerShare
from persia.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from persia.security import audit

# Far above the pauses between polls: a coordinator that is slow, or on a loaded machine, keeps its operation.
_LEASE_S = 60.0
_BEGINNINGS = (Verb.DUMP, Verb.LOAD, Verb.TRACK, Verb.TAKE)


class ChangeTracker(JobMaker, Protocol):
    """The changes of a server since a packet, and the jobs that write them (persia.packets.changes)."""

    def begin(self, request: Request) -> None: ...

    def status(self) -> dict[str, Any]: ...


class CheckpointService:
    """Answers a coordinator; every request may be repeated. Thread-safe."""

    def __init__(
        self, share: ServerShare, changes: ChangeTracker | None = None, *, lease_s: float = _LEASE_S
    ) -> None:
        """An operation without a question for `lease_s` ends by itself, and is forgotten."""
        self._share = share
        self._changes = changes
        self._lease_s = lease_s
        self._lock = threading.Lock()
        # By operation. Ended ones stay: this server may have ended a dump and begun a packet of another
        # coordinator while the dump's coordinator still waits for slower servers.
        self._jobs: dict[str, ServerJob] = {}

    def handle(self, payload: bytes) -> bytes:
        """`answer` in bytes, for a NATS subject."""
        request = Request.decode(payload)
        outcome = "ok"
        try:
            return self.answer(request).encode()
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            if request.verb in (Verb.DUMP, Verb.LOAD):
                self._audit(request, outcome)

    @staticmethod
    def _audit(request: Request, outcome: str) -> None:
        # The broker says no sender; it lets these two roles ask.
        audit.record(
            peer="NATS",
            role="trainer or admin",
            method=f"checkpoint {request.verb.value}",
            outcome=outcome,
            directory=request.arguments.get("directory"),
        )

    def answer(self, request: Request) -> Report:
        """NotFoundError: an operation that this server does not know, or one that begins with another number
        or generation of servers. ResourceExhaustedError: it is busy.
        """
        if request.verb in _BEGINNINGS:
            self._require_same_servers(request)
        if request.verb in (Verb.DUMP, Verb.LOAD, Verb.TAKE):
            return self._begin(request).report()
        if request.verb in (Verb.TRACK, Verb.CHANGES):
            if request.verb is Verb.TRACK:
                packet = self._running()
                if packet is not None and packet.is_packet:  # left over by a trainer that was killed
                    packet.cancel()
                self._require_changes().begin(request)
            # Answered without the lock and without a job: a trainer asks this many times a second.
            status = {"settings": None} if self._changes is None else self._changes.status()
            return Report(state=State.DONE, result=status)
        # Without the lock: a poll must not wait for the snapshot that another request begins with.
        # Also of an operation that has ended: its coordinator may ask again after a lost reply.
        job = self._jobs.get(request.operation)
        if job is None:
            raise NotFoundError(f"this server knows no operation {request.operation}: it has restarted since")
        if request.verb is Verb.CANCEL:
            job.cancel()
        elif request.verb is Verb.APPLY:
            job.apply()
        return job.report()

    @property
    def is_busy(self) -> bool:
        return self._running() is not None

    @property
    def is_loading(self) -> bool:
        return isinstance(self._running(), LoadJob)

    def close(self) -> None:
        """Ends the running operation, because the server ends."""
        job = self._running()
        if job is not None:
            job.close()

    def _require_same_servers(self, request: Request) -> None:
        # A subject names an index alone. With another number of servers the rows of this one are another
        # share: a checkpoint of both would lack rows, or have them twice.
        asked, own = (request.replicas, request.generation), (self._share.replicas, self._share.generation)
        if request.replicas and asked != own:
            raise NotFoundError(
                f"this server is of {own[0]} (generation {own[1]}), and one of {asked[0]} (generation "
                f"{asked[1]}) was asked: the number of servers was changed meanwhile"
            )

    def _begin(self, request: Request) -> ServerJob:
        # Under the lock: of two requests that arrive at once, one would overwrite the other's snapshot.
        with self._lock:
            if request.operation in self._jobs:
                return self._jobs[request.operation]
            running = self._running()
            if running is not None:
                raise ResourceExhaustedError(
                    f"this server is busy with {running.operation}; one operation runs at a time"
                )
            job = self._make(request)
            for ended in tuple(self._jobs.values()):
                # One coordinator writes packets, and begins a packet after it has ended the one before.
                if ended.is_abandoned or (request.verb is Verb.TAKE and ended.is_packet):
                    del self._jobs[ended.operation]
            self._jobs[request.operation] = job
            job.start()
            return job

    def _running(self) -> ServerJob | None:
        return next((job for job in tuple(self._jobs.values()) if not job.is_over), None)

    def _make(self, request: Request) -> ServerJob:
        if request.verb is Verb.TAKE:
            return self._require_changes().make_job(request, self._share, self._lease_s)
        if request.arguments.get("in_place"):
            if self._share.tier is None:
                raise InvalidArgumentError(
                    "in_place=True, or a checkpoint that was dumped so, needs a storage tier, and the rows "
                    "of this server are in memory alone: set embedding_parameter_server_config.storage in "
                    "its global config, or use a checkpoint in files"
                )
            return self._share.tier.make_job(request, self._share, self._lease_s)
        kind = DumpJob if request.verb is Verb.DUMP else LoadJob
        return kind(request, self._share, self._lease_s)

    def _require_changes(self) -> ChangeTracker:
        if self._changes is None:
            raise FailedPreconditionError(
                "this server has no incremental updates: set enable_incremental_update in its global config"
            )
        return self._changes
