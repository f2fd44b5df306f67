"""Stage 2, the rank's end: receives the batches of all loaders, in order, bounded, and knows when they end.

In: messages of `BatchSender` (`send.py`), on threads of the session. Out: `PendingBatch`es, to the feeder
thread of `prefetch.py`. `StreamReceiver` answers and asks loaders, `Inbox` holds and orders their batches.
A stream ends because its loaders said so, never because time passed. Silence only makes the rank ask the
loader whether it is alive (`loader_watch.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PersiaError,
    StreamClosedError,
    UnavailableError,
)
from persia.messaging.discovery import Directory
from persia.messaging.interface import Registration, Session
from persia.messaging.payloads import (
    EndOfStream,
    FlowReply,
    PositionReply,
    PositionRequest,
    ReplyStatus,
    SubmittedBatch,
)
from persia.observability.phases import QUEUE_OF_SUBMITTED
from persia.pipeline.loader_watch import LoaderWatch
from persia.pipeline.position import DataPosition
from persia.pipeline.queues import QueueClosed
from persia.pipeline.send import LoaderShare
from persia.pipeline.source import PendingBatch, pending_from_stream

LOADER_REMEDY = "start one with `persia-launcher data-loader`, the same PERSIA_JOB_NAME and PERSIA_NATS_URL"

# How long a submitted batch waits for room before the loader is answered "full": long, as the loader must
# send the batch again then.
_HOLD_S = 1.0
# Batches handled at a time. Each loader has one under way, and in reproducible mode the one that the rank
# waits for must not be stuck behind those that wait for room.
_MAX_LOADERS_AT_A_TIME = 256


class StreamReceiver:
    """A `BatchSource` that answers the loaders from creation on.

    `remedy`: how to start a loader. `trained`: the batches that loaders leave out which resume. `failure`:
    the error that ends the training, once `stop` is called; "" if none does. `on_taken` answers rank 0,
    which dumps a checkpoint.
    """

    def __init__(
        self,
        session: Session,
        directory: Directory,
        *,
        rank: int,
        world_size: int,
        buffer_size: int,
        ordered: bool,
        trained: DataPosition,
        remedy: str,
        failure: Callable[[], str],
        on_received: Callable[[], None],
        on_superseded: Callable[[PendingBatch], None],
        on_taken: Callable[[bytes], bytes],
    ) -> None:
        self.inbox = Inbox(rank, world_size, buffer_size, ordered=ordered, trained=trained)
        self._watch = LoaderWatch(session, directory, self.inbox, remedy)
        self._failure = failure
        self._on_received = on_received
        self._on_superseded = on_superseded
        # A fraction of the silence, so that a loader is missed soon after it; at most a second, as `take`
        # wakes only then.
        self._check_interval_s = min(1.0, self._watch.silence_s / 4)
        self._next_check = time.monotonic() + self._check_interval_s
        self.before_close: Callable[[], object] = lambda: None  # set where a loader runs in this process
        # From here on loaders are answered, on threads of the session: everything above must be in place.
        subjects, concurrency = session.subjects, _MAX_LOADERS_AT_A_TIME
        self._registrations: list[Registration] = [
            session.respond(subjects.batch(rank), self._on_batch, max_concurrency=concurrency),
            session.respond(subjects.end(rank), self._on_end, max_concurrency=concurrency),
            session.respond(subjects.position(rank), self._on_position, max_concurrency=concurrency),
            session.respond(subjects.taken(rank), on_taken),
        ]

    def _on_batch(self, payload: bytes) -> bytes:
        """Answers BatchSender.send (send.py)."""
        batch = SubmittedBatch.decode(payload)
        try:
            offer = self.inbox.offer(batch, hold_s=_HOLD_S)
        except StreamClosedError as closed:
            return self._closed(closed)
        if offer is Offer.FULL:
            return FlowReply(ReplyStatus.FULL).encode()
        if offer is Offer.QUEUED:
            self._on_received()
        # A restarted loader has registered it anew. One of the two registrations must be released, or it
        # would occupy a place at its worker until it expires.
        elif offer is Offer.SUPERSEDED:
            self._on_superseded(pending_from_stream(batch))
        return FlowReply(ReplyStatus.OK).encode()

    def _on_end(self, payload: bytes) -> bytes:
        """Answers BatchSender.end (send.py)."""
        try:
            self.inbox.end(EndOfStream.decode(payload))
        except StreamClosedError as closed:  # the loop has ended before the stream
            return self._closed(closed)
        return FlowReply(ReplyStatus.OK).encode()

    def _closed(self, closed: StreamClosedError) -> bytes:
        failure = self._failure()
        status = ReplyStatus.FAILED if failure else ReplyStatus.CLOSED
        return FlowReply(status, message=failure or str(closed)).encode()

    def _on_position(self, payload: bytes) -> bytes:
        """Answers BatchSender.known (send.py)."""
        request = PositionRequest.decode(payload)
        received = self.inbox.received(request.loader_index, request.loader_replicas, resume=request.resume)
        return PositionReply(self.inbox.trained.stripes, received).encode()

    def yielded(self, batch_id: int) -> None:
        self.inbox.yielded(batch_id)

    def take(self) -> PendingBatch | None:
        """The next batch, None at the end. Raises a loader's failure, QueueClosed after `stop`."""
        while True:
            # Also while batches arrive: those of one loader must not hide that another one has died.
            if time.monotonic() >= self._next_check:
                self._watch.check()
                self._next_check = time.monotonic() + self._check_interval_s
            with contextlib.suppress(DeadlineExceededError):
                batch = self.inbox.take(self._check_interval_s)
                return None if batch is None else pending_from_stream(batch)

    def stop(self) -> list[PendingBatch]:
        """Wakes `take` and refuses what loaders still send; returns the batches that were not taken."""
        return [pending_from_stream(batch) for batch in self.inbox.close()]

    def close(self) -> None:
        """Stops listening, after `stop`."""
        # First: a loader thread of this process must find its requests answered while it ends.
        self.before_close()
        while self._registrations:
            self._registrations.pop().close()


class Offer(enum.Enum):
    """What became of a submitted batch."""

    QUEUED = "queued"
    FULL = "full"
    REPEATED = "repeated"  # the same batch again: its first reply got lost
    SUPERSEDED = "superseded"  # a batch received before, registered anew by a loader that was restarted


class _Queued(NamedTuple):
    number: int  # in the order of arrival
    since_ns: int
    batch: SubmittedBatch


@dataclasses.dataclass
class _Loader:
    """What one loader has sent to this rank so far."""

    share: LoaderShare
    last_seen: float = -math.inf  # by time.monotonic(), when it sent or answered something
    queue: deque[_Queued] = dataclasses.field(default_factory=deque)  # batches that the rank did not take yet
    num_queued: int = 0  # those taken included, and those that were trained before this run
    yielded: int = 0  # the loop has got all batches below this batch_id
    last: SubmittedBatch | None = None  # queued last
    num_sent: int | None = None  # to all ranks; known once the loader told its end

    @property
    def is_done(self) -> bool:
        """Every batch of this rank was taken. `end` has compared their number with what was queued."""
        return self.share.first_sequence is None or (self.num_sent is not None and not self.queue)

    @property
    def next_batch_id(self) -> int:
        """The smallest batch_id that was not taken yet, arrived or not."""
        return self.queue[0].batch.batch_id if self.queue else self.share.batch_id(self.num_queued)


class Inbox:
    """The batches that loaders submitted and the rank did not take yet. Thread-safe.

    `batch_id = sequence * num_loaders + loader_index`, and a batch goes to rank `batch_id % world_size`. That
    alone fixes which sequences of a loader this rank gets. So the rank knows the next batch_id of every
    loader, can merge the loaders into one total order, and knows the end as soon as every loader that
    concerns it has told how many batches it sent.

    Bounded by `capacity` for each loader, so that in reproducible mode a fast loader cannot fill the buffer
    while the rank waits for a batch of a slow one. `ordered`: taken by batch_id, else by arrival.
    Batches in `trained` are not expected if loaders resume; others send another data set from its start.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        capacity: int,
        *,
        ordered: bool,
        trained: DataPosition = DataPosition(),  # noqa: B008  # immutable
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._capacity = capacity
        self._ordered = ordered
        self._stored = trained
        self._resumes: bool | None = None  # None: no loader has said so
        self._loaders: list[_Loader] = []  # empty until the first message of any
        self._num_arrived = 0
        self._failure: PersiaError | None = None
        self._num_before_failure = 0
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, batch: SubmittedBatch, *, hold_s: float) -> Offer:
        """Queues the batch, waiting up to `hold_s` for room: a late reply slows a fast loader down.

        Raises InvalidArgumentError or FailedPreconditionError for a batch that cannot be this rank's next.
        """
        with self._changed:
            loader = self._see(batch.loader_index, batch.loader_replicas)
            if self._is_repeated(loader, batch.batch_id):
                is_same = loader.last is not None and _reference(batch) == _reference(loader.last)
                return Offer.REPEATED if is_same else Offer.SUPERSEDED
            if not self._changed.wait_for(lambda: self._closed or len(loader.queue) < self._capacity, hold_s):
                return Offer.FULL
            self._refuse_when_closed()
            # Judged again: while this call waited, a repetition of the batch may have been queued.
            if self._is_repeated(loader, batch.batch_id):
                return Offer.REPEATED
            # Taken by `StreamReceiver.take`, on the feeder thread of `persia.pipeline.prefetch`.
            loader.queue.append(_Queued(self._num_arrived, time.monotonic_ns(), batch))
            # The last one is enough to recognise a repetition: a loader waits for the reply to each batch.
            loader.last, loader.num_queued = batch, loader.num_queued + 1
            if self._resumes and self._stored.stripes:
                self._skip_trained(loader)
            self._num_arrived += 1
            self._changed.notify_all()
            return Offer.QUEUED

    def _skip_trained(self, loader: _Loader) -> None:
        while loader.share.batch_id(loader.num_queued) in self._stored:
            loader.num_queued += 1

    @property
    def trained(self) -> DataPosition:
        """The batches that loaders need not send, as they were trained before this run."""
        return DataPosition() if self._resumes is False else self._stored

    @property
    def resumes(self) -> bool:
        """Whether the loaders call `DataCtx.resume`; False: not, or none has asked yet."""
        return bool(self._resumes)

    def received(self, loader_index: int, num_loaders: int, *, resume: bool) -> int:
        """The batch_id that this rank expects next from the loader; 0 if it has none yet.

        FailedPreconditionError: there is a checkpoint, and some loaders resume and others do not.
        """
        with self._changed:
            loader = self._see(loader_index, num_loaders)
            if self._resumes is None:
                self._resumes = resume
                for each in self._loaders if resume and self._stored.stripes else ():
                    if each.share.first_sequence is not None:
                        first = self._stored.first_missing(each.share.loader_index, num_loaders)
                        each.num_queued = each.share.count(first)
                        self._skip_trained(each)
            if self._stored.stripes and resume is not self._resumes:
                raise FailedPreconditionError(
                    f"data loader {loader_index} {'calls' if resume else 'does not call'} DataCtx.resume(), "
                    "unlike another one, and a checkpoint was loaded: all loaders must, or none"
                )
            return loader.share.batch_id(loader.num_queued) if loader.num_queued else 0

    def yielded(self, batch_id: int) -> None:
        """The loop has got the batch, after those before it of the same loader."""
        self._loaders[batch_id % len(self._loaders)].yielded = batch_id + 1

    def bounds(self, held: Iterable[int]) -> tuple[int, ...] | None:
        """By loader: the loop is done with all batches below this batch_id. `held`: it got, but is not done.

        None: no loader has sent anything.
        """
        bounds = [loader.yielded for loader in self._loaders]
        for batch_id in held:
            index = batch_id % len(bounds)
            bounds[index] = min(bounds[index], batch_id)
        return tuple(bounds) or None

    @property
    def is_over(self) -> bool:
        """Whether the loop has got the last batch of this rank."""
        with self._changed:
            return self._is_finished() and all(
                loader.last is None or loader.yielded > loader.last.batch_id for loader in self._loaders
            )

    def _is_repeated(self, loader: _Loader, batch_id: int) -> bool:
        """Whether the batch was queued before: its reply got lost, or its loader restarted."""
        index, num_loaders = loader.share.loader_index, len(self._loaders)
        if batch_id % num_loaders != index or batch_id % self._world_size != self._rank:
            raise InvalidArgumentError(
                f"batch {batch_id} from data loader {index} of {num_loaders} "
                f"does not belong to rank {self._rank} of {self._world_size}"
            )
        expected = loader.share.batch_id(loader.num_queued)
        if batch_id > expected:  # a gap means that batches were lost
            raise FailedPreconditionError(
                f"rank {self._rank} expected batch {expected} from data loader {index} "
                f"and got {batch_id}: this NN worker was started after the loader had begun; "
                "start the loader again with it"
            )
        if batch_id == expected and loader.num_sent is not None:
            raise FailedPreconditionError(
                f"batch {batch_id} from data loader {index}, which ended its stream after "
                f"{loader.num_sent} batches: send all batches of a job through one DataCtx"
            )
        return batch_id < expected

    def end(self, message: EndOfStream) -> None:
        """A loader has sent all it will, or failed. Repeating it is fine, contradicting it is not."""
        with self._changed:
            loader = self._see(message.loader_index, message.loader_replicas)
            if message.error is None:
                self._end(loader, message.num_batches)
            else:
                self._fail(
                    UnavailableError(
                        f"data loader {message.loader_index} ended with an error "
                        f"after {message.num_batches} batches: {message.error}"
                    )
                )
            self._changed.notify_all()

    def _end(self, loader: _Loader, num_batches: int) -> None:
        index, expected = loader.share.loader_index, loader.share.count(num_batches)
        if loader.num_sent not in (None, num_batches):
            raise FailedPreconditionError(
                f"data loader {index} ended its stream after {num_batches} batches, "
                f"and before after {loader.num_sent}"
            )
        if expected != loader.num_queued:
            raise FailedPreconditionError(
                f"data loader {index} ended after {num_batches} batches, "
                f"{expected} of them for rank {self._rank}, which received {loader.num_queued}"
            )
        loader.num_sent = num_batches

    def fail(self, failure: PersiaError) -> None:
        """The stream will not end by itself: `take` raises `failure` after the batches before it."""
        with self._changed:
            self._fail(failure)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> SubmittedBatch | None:
        """The next batch, or None at the end of the stream.

        Raises DeadlineExceededError when none arrived in time, the failure of a loader once the batches that
        arrived before it are taken, and QueueClosed after `close`.
        """
        with self._changed:
            if not self._changed.wait_for(self._can_take, timeout_s):
                raise DeadlineExceededError(f"no batch arrived within {timeout_s:g} s")
            if self._closed:
                raise QueueClosed
            loader = self._next_loader()
            # Batches after a failure are not taken: other loaders may send for long, and would hide it.
            if loader is not None and (
                self._failure is None or loader.queue[0].number < self._num_before_failure
            ):
                _, since_ns, batch = loader.queue.popleft()
                self._changed.notify_all()
                if batch.requires_grad:
                    now_ns = time.monotonic_ns()
                    QUEUE_OF_SUBMITTED.record(since_ns, now_ns, batch.reference, batch.batch_id)
                return batch
            if not self._is_finished() and self._failure is not None:
                raise self._failure
            return None

    def stale_loaders(self, silence_s: float) -> list[int]:
        """Loaders that owe this rank something and were not seen alive for `silence_s`."""
        horizon = time.monotonic() - silence_s
        with self._changed:
            return [
                loader.share.loader_index
                for loader in self._loaders
                if not loader.is_done and loader.num_sent is None and loader.last_seen <= horizon
            ]

    def mark_alive(self, loader_index: int) -> None:
        """The loader answered when asked."""
        with self._changed:
            self._loaders[loader_index].last_seen = time.monotonic()

    @property
    def num_loaders(self) -> int | None:
        """None until the first message of any loader."""
        return len(self._loaders) or None

    def has_seen(self, loader_index: int) -> bool:
        """Whether the loader ever sent anything, or answered."""
        return self._loaders[loader_index].last_seen > -math.inf

    def close(self) -> list[SubmittedBatch]:
        """Refuses everything from now on; returns the batches that were not taken."""
        with self._changed:
            self._closed = True
            left = [queued.batch for loader in self._loaders for queued in loader.queue]
            for loader in self._loaders:
                loader.queue.clear()
            self._changed.notify_all()
            return left

    def _fail(self, failure: PersiaError) -> None:
        if self._failure is None:
            self._failure, self._num_before_failure = failure, self._num_arrived

    def _see(self, loader_index: int, num_loaders: int) -> _Loader:
        """Every message of a loader says how many there are; all must say the same."""
        self._refuse_when_closed()
        if not 0 <= loader_index < num_loaders:
            raise InvalidArgumentError(
                f"data loader index {loader_index} is not below its replica size {num_loaders}"
            )
        if not self._loaders:
            self._loaders = [
                _Loader(LoaderShare.of(i, num_loaders, self._rank, self._world_size))
                for i in range(num_loaders)
            ]
        if len(self._loaders) != num_loaders:
            raise FailedPreconditionError(
                f"data loader {loader_index} says there are {num_loaders} loaders, "
                f"another said {len(self._loaders)}: start all of them with the same --replica-size"
            )
        loader = self._loaders[loader_index]
        loader.last_seen = time.monotonic()
        return loader

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise StreamClosedError("this NN worker has stopped taking batches: its training loop has ended")

    def _can_take(self) -> bool:
        stopped = self._closed or self._failure is not None or self._is_finished()
        return stopped or self._next_loader() is not None

    def _is_finished(self) -> bool:
        """Every batch of this rank was taken. False until a loader has sent something."""
        return bool(self._loaders) and all(loader.is_done for loader in self._loaders)

    def _next_loader(self) -> _Loader | None:
        """The loader whose oldest queued batch is to be taken, if that batch is here."""
        if not self._ordered:
            queued = (loader for loader in self._loaders if loader.queue)
            return min(queued, key=lambda loader: loader.queue[0].number, default=None)
        unfinished = (loader for loader in self._loaders if not loader.is_done)
        loader = min(unfinished, key=lambda loader: loader.next_batch_id, default=None)
        return loader if loader is not None and loader.queue else None


def _reference(batch: SubmittedBatch) -> tuple[int, int, int]:
    return batch.worker_index, batch.worker_incarnation, batch.reference
