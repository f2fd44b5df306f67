"""The receiving end of the data loaders' stream at one rank: NATS on one side, the prefetcher on the other.

A stream ends because its loaders said so, never because time passed. Silence only makes the rank ask the
loader whether it is still there; one that does not answer has died, and is named in the error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from persia import env
from persia.data.cluster import Cluster
from persia.data.inbox import Inbox, Offer
from persia.embedding.deadline import Deadline
from persia.errors import DeadlineExceededError, PersiaError, StreamClosedError, UnavailableError
from persia.logger import get_default_logger
from persia.messaging.payloads import BatchAnnouncement, EndOfStream, FlowReply, ReplyStatus
from persia.messaging.session import Registration
from persia.messaging.subjects import DATA_LOADER

__all__ = ["StreamReceiver"]

# How long an announcement waits for room before it is answered "full": long, as the loader must send it again
# then.
_HOLD_S = 1.0
# Announcements handled at a time. Each loader has one under way, and in reproducible mode the one that the
# rank waits for must not be stuck behind those that wait for room.
_MAX_LOADERS_AT_A_TIME = 256
_PROBE_TIMEOUT_S = 2.0
_NUM_PROBES = 2
_REPORT_INTERVAL_S = 5.0


class StreamReceiver:
    """Answers the loaders from creation on; `take` and `close` are the prefetcher's."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        rank: int,
        world_size: int,
        buffer_size: int,
        ordered: bool,
        on_received: Callable[[], None],
        on_superseded: Callable[[BatchAnnouncement], None],
    ) -> None:
        self._cluster = cluster
        self._inbox = Inbox(rank, world_size, buffer_size, ordered=ordered)
        self._on_received = on_received
        self._on_superseded = on_superseded
        self._silence_s = env.loader_silence_s()
        self._start = Deadline(env.get_deadline_s())
        self._check_interval_s = min(1.0, self._silence_s / 4)
        self._next_check = time.monotonic() + self._check_interval_s
        self._next_report = time.monotonic() + _REPORT_INTERVAL_S
        session, concurrency = cluster.session, _MAX_LOADERS_AT_A_TIME
        self._registrations: list[Registration] = [
            session.respond(session.subjects.batch(rank), self._on_batch, max_concurrency=concurrency),
            session.respond(session.subjects.end(rank), self._on_end, max_concurrency=concurrency),
        ]

    def take(self) -> BatchAnnouncement | None:
        """The next batch, None at the end. Raises a loader's failure, QueueClosed after `stop`."""
        while True:
            # Also while batches come: those of one loader must not hide that another one has died.
            if time.monotonic() >= self._next_check:
                self._check_loaders()
                self._next_check = time.monotonic() + self._check_interval_s
            with contextlib.suppress(DeadlineExceededError):
                return self._inbox.take(self._check_interval_s)

    def stop(self) -> list[BatchAnnouncement]:
        """Wakes `take` and refuses what loaders still send; returns the batches that nobody took."""
        return self._inbox.close()

    def fail(self, failure: PersiaError) -> None:
        """The loaders' stream has broken off: `take` raises `failure` after the batches received."""
        self._inbox.fail(failure)

    @property
    def has_heard(self) -> bool:
        """Whether any loader has sent anything, be it the end of its data."""
        return self._inbox.num_loaders is not None

    def close(self) -> None:
        """Stops listening."""
        while self._registrations:
            self._registrations.pop().close()

    def _on_batch(self, payload: bytes) -> bytes:
        batch = BatchAnnouncement.decode(payload)
        try:
            offer = self._inbox.offer(batch, hold_s=_HOLD_S)
        except StreamClosedError as closed:
            return FlowReply(ReplyStatus.CLOSED, message=str(closed)).encode()
        if offer is Offer.FULL:
            return FlowReply(ReplyStatus.FULL).encode()
        if offer is Offer.QUEUED:
            self._on_received()
        elif offer is Offer.SUPERSEDED:
            self._on_superseded(batch)
        return FlowReply(ReplyStatus.OK).encode()

    def _on_end(self, payload: bytes) -> bytes:
        with contextlib.suppress(StreamClosedError):  # nobody waits for the end any more
            self._inbox.end(EndOfStream.decode(payload))
        return FlowReply(ReplyStatus.OK).encode()

    def _check_loaders(self) -> None:
        """Raises when something that the stream needs will never come."""
        if self._inbox.num_loaders is None:
            self._wait_for_first_loader()
        for loader_index in self._inbox.silent_loaders(self._silence_s):
            if self._is_alive(loader_index):
                self._inbox.heard(loader_index)
            elif loader_index in self._inbox.silent_loaders(self._silence_s):  # it may have ended meanwhile
                self._give_up(loader_index)

    def _wait_for_first_loader(self) -> None:
        if self._start.over and not self._is_alive(0):
            raise DeadlineExceededError(
                "no data loader has sent anything yet: start one with `persia-launcher data-loader`, the "
                "same PERSIA_JOB_NAME and PERSIA_NATS_URL (the deadline is PERSIA_DEADLINE_SEC)"
            )
        self._report("waiting for the first batch of the data loaders")

    def _is_alive(self, loader_index: int) -> bool:
        """Also when nobody can tell; then the time-out of the data loader ends the wait."""
        for _ in range(_NUM_PROBES):
            try:
                if self._cluster.directory.probe(DATA_LOADER, loader_index, _PROBE_TIMEOUT_S) is not None:
                    return True
                failure = "" if self._cluster.session.is_connected else "the connection to NATS is lost"
            except PersiaError as error:
                failure = str(error)
            if failure:
                # Without the broker nobody can answer, which says nothing about the loader.
                self._report(f"data loader {loader_index} cannot be asked whether it is alive: {failure}")
                return True
        return False

    def _give_up(self, loader_index: int) -> None:
        if not self._inbox.has_heard(loader_index) and not self._start.over:
            self._report(f"waiting for data loader {loader_index} of {self._inbox.num_loaders}")
            return
        raise UnavailableError(
            f"data loader {loader_index} of {self._inbox.num_loaders} was silent for {self._silence_s:g} s "
            "(PERSIA_LOADER_SILENCE_SEC), did not announce the end of its data and does not answer: it died"
        )

    def _report(self, text: str) -> None:
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + _REPORT_INTERVAL_S
            get_default_logger().info(text)
