"""Stages 1 and 2: a loader registers ID features at an embedding worker, and submits the batch to a rank.

`BatchSender` runs in the loader, `RegisterBatchHandler` in the embedding worker; the rank's side is
`persia.pipeline.receive`. Python sees the ID features as one message and never looks inside.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PersiaError,
    ResourceExhaustedError,
    StreamClosedError,
    UnavailableError,
)
from persia.messaging.discovery import Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.interface import Session
from persia.messaging.payloads import (
    EndOfStream,
    FlowReply,
    IdsRequest,
    PositionReply,
    PositionRequest,
    ReplyStatus,
    SubmittedBatch,
)
from persia.messaging.subjects import EMBEDDING_WORKER, NN_WORKER
from persia.pipeline.position import DataPosition
from persia.pipeline.queues import Deadline

if TYPE_CHECKING:
    from persia._native import EmbeddingWorker

# Much longer than a receiver holds a request, so that its reply is not given up on its way.
_REQUEST_TIMEOUT_S = 10.0
_RETRY_S = 0.1  # after a peer that is absent, or did not answer
# Of a worker that another one can replace: the broker still delivers to one whose host has vanished. At least
# the second number times as long as the last answer took, or slow workers would seem to be dead.
_REPLACEABLE_TIMEOUT_S, _TIMES_LAST_ANSWER = 3.0, 3.0
# How long a worker that did not answer is left out, while another one takes its batches: doubled each time.
_UNAVAILABLE_S, _LONGEST_UNAVAILABLE_S = 5.0, 40.0
# A receiver that answers "full" is alive, and a long evaluation is no failure: it has this many times the
# deadline of one that does not answer.
_FULL_PATIENCE = 12
_RETRY_MS = (5, 20)  # loaders that were refused together try again at different times

# (loader index, ID features) -> (incarnation of the worker, reference). ResourceExhaustedError: it is full.
RegisterBatch = Callable[[int, "bytes | memoryview"], "tuple[int, int]"]


class TrainingFailedError(UnavailableError):
    """A rank takes no more batches, as an error has ended its training."""


@dataclasses.dataclass(frozen=True)
class LoaderShare:
    """A loader's sequences for one rank: `first_sequence` (None: none), then every `stride`-th."""

    loader_index: int
    num_loaders: int
    first_sequence: int | None
    stride: int

    @classmethod
    def of(cls, loader_index: int, num_loaders: int, rank: int, world_size: int) -> LoaderShare:
        """Solves `(sequence * num_loaders + loader_index) % world_size == rank`."""
        # Ranks repeat after `stride` sequences: sequence * num_loaders mod world_size has that period.
        stride = world_size // math.gcd(num_loaders, world_size)
        first = next(
            (s for s in range(stride) if (s * num_loaders + loader_index) % world_size == rank), None
        )
        return cls(loader_index, num_loaders, first, stride)

    def batch_id(self, position: int) -> int:
        """The batch_id of this rank's `position`-th batch from the loader."""
        if self.first_sequence is None:
            raise InvalidArgumentError(f"data loader {self.loader_index} sends nothing to this rank")
        return (self.first_sequence + position * self.stride) * self.num_loaders + self.loader_index

    def count(self, num_batches: int) -> int:
        """How many of the loader's `num_batches` batches, to all ranks together, are this rank's."""
        if self.first_sequence is None or num_batches <= self.first_sequence:
            return 0
        return (num_batches - 1 - self.first_sequence) // self.stride + 1


class BatchSender:
    """The loader's end of its streams to all ranks."""

    def __init__(
        self, session: Session, directory: Directory, index: int, replicas: int, deadline_s: float
    ) -> None:
        self._session = session
        self._directory = directory
        self._index, self._replicas = index, replicas
        self._deadline_s = deadline_s
        self._departed: dict[int, str] = {}  # ranks that have left, and the error that made them, if one did
        self._workers: dict[int, int] = {}  # index to incarnation, of those that take batches
        # Of workers that did not answer: until when they are left out (time.monotonic()), and for how long.
        self._unavailable: dict[int, tuple[float, float]] = {}
        self._last_answer_s = math.inf  # how long the last worker took to answer
        self._known: DataPosition | None = None  # of this loader's batches: those that no rank needs
        self.position = 0  # batches of this loader before the next one
        self.num_sent = self.world_size = 0

    def wait_for_job(self) -> None:
        """Returns once all embedding workers and NN workers answer; later ones are followed."""
        # Watched first: a process that leaves between question and watch would be asked until the deadline.
        self._directory.watch(NN_WORKER, self._on_nn_worker, on_joined=self._on_rank_joined)
        self._directory.watch(EMBEDDING_WORKER, self._on_embedding_worker, on_joined=self._on_worker_joined)
        # Before a cut was noticed, workers seemed not to answer; some have joined again before this process.
        self._session.on_reconnect(self._unavailable.clear)
        for worker in self._directory.wait_for(EMBEDDING_WORKER, self._deadline_s):
            self._workers[worker.index] = worker.incarnation
        self.world_size = len(self._directory.wait_for(NN_WORKER, self._deadline_s))

    @property
    def next_batch_id(self) -> int:
        return self.position * self._replicas + self._index

    def resume(self) -> int:
        """Continues with the first batch that a rank needs; returns its position."""
        known = self._known_position(resume=True)
        self.position = known.first_missing(self._index, self._replicas)
        return self.position

    def skip_known(self) -> bool:
        """Whether no rank needs the next batch; then it counts as sent."""
        known = self._known or self._known_position(resume=False)
        if not known.stripes or self.next_batch_id not in known:
            return False
        self.position += 1
        return True

    def _known_position(self, *, resume: bool) -> DataPosition:
        """Asked of all ranks once: later, only this loader changes it."""
        if self._known is None:
            request = PositionRequest(self._index, self._replicas, resume).encode()
            trained, received = DataPosition(), []
            for rank in range(self.world_size):
                left = partial(self._has_departed, rank)
                # Answered by StreamReceiver._on_position (receive.py).
                subject = self._session.subjects.position(rank)
                answer = self._request(
                    subject, request, f"NN worker {rank}", Deadline(self._deadline_s), left
                )
                if answer is None:
                    received.append(0)
                    continue
                reply = PositionReply.decode(answer)
                trained = DataPosition(reply.trained)
                received.append(reply.received)
            self._known = trained.joined(received)
        return self._known

    def send(self, id_features: bytes, dense: bytes, *, requires_grad: bool) -> None:
        """Registers the ID features, then submits the batch to its rank. Waits while either is full."""
        batch_id = self.next_batch_id
        worker_index, reply = self._register(id_features)
        # If this cannot be submitted, the registered features expire at the worker: nothing refers to them.
        batch = SubmittedBatch(
            batch_id=batch_id,
            worker_incarnation=reply.worker_incarnation,
            reference=reply.reference,
            worker_index=worker_index,
            loader_index=self._index,
            loader_replicas=self._replicas,
            requires_grad=requires_grad,
            dense=dense,
            id_features=id_features,
        )
        rank = batch_id % self.world_size
        # Answered by StreamReceiver._on_batch (receive.py), on a thread of the rank's session.
        self._submit(rank, self._session.subjects.batch(rank), batch.encode(), self._deadline_s)
        self.num_sent += 1
        self.position += 1

    def end(self, error: str | None, deadline_s: float) -> None:
        """Tells every rank how many batches this loader has sent, or that it failed.

        Raises StreamClosedError or TrainingFailedError when a rank does not wait for that.
        """
        end = EndOfStream(self._index, self._replicas, self.position, error)
        for rank in range(self.world_size):
            # A rank that gets nothing from this loader does not wait for its end, and may have left. One that
            # has left after an error is asked, and found to be gone.
            share = LoaderShare.of(self._index, self._replicas, rank, self.world_size)
            if share.first_sequence is not None and self._departed.get(rank) != "":
                self._submit(rank, self._session.subjects.end(rank), end.encode(), deadline_s)

    def _register(self, id_features: bytes) -> tuple[int, FlowReply]:
        """(the embedding worker that took the ID features, its reply). Workers take turns."""
        request = IdsRequest(self._index, self._replicas, id_features).encode()
        room = Deadline(_FULL_PATIENCE * self._deadline_s)
        silence = Deadline(self._deadline_s)  # of all workers together
        while True:
            index = self._next_worker()
            peer, left = f"embedding worker {index}", partial(self._can_replace, index)
            # Answered by RegisterBatchHandler below, on a thread of the worker's session.
            subject = self._session.subjects.ids(index)
            timeout_s, begin = self._timeout_of(index), time.monotonic()
            answer = self._request(subject, request, peer, silence, left, timeout_s)
            if answer is None:  # to another worker
                if silence.over:
                    raise UnavailableError(
                        f"no embedding worker answered in {self._deadline_s:g} s (PERSIA_DEADLINE_SEC), "
                        f"{peer} was asked last"
                    )
                self._leave_out(index)
                continue
            self._last_answer_s = time.monotonic() - begin
            self._unavailable.pop(index, None)
            silence = Deadline(self._deadline_s)
            reply = FlowReply.decode(answer)
            if reply.status is ReplyStatus.OK:
                return index, reply
            _wait_for_room(reply, peer, room)

    def _submit(self, rank: int, subject: str, payload: bytes, deadline_s: float) -> None:
        peer, left = f"NN worker {rank}", partial(self._has_departed, rank)
        room = Deadline(_FULL_PATIENCE * deadline_s)
        while True:
            answer = self._request(subject, payload, peer, Deadline(deadline_s), left)
            if answer is None:
                if failure := self._departed.get(rank):
                    raise TrainingFailedError(f"{peer} has left the job after an error: {failure}")
                raise StreamClosedError(f"{peer} has left the job and takes no more batches")
            reply = FlowReply.decode(answer)
            if reply.status is ReplyStatus.OK:
                return
            _wait_for_room(reply, peer, room)

    def _request(
        self,
        subject: str,
        payload: bytes,
        peer: str,
        deadline: Deadline,
        has_left: Callable[[PersiaError], bool],
        timeout_s: float = _REQUEST_TIMEOUT_S,
    ) -> bytes | None:
        """Repeats the request until it is answered.

        A rank recognises a repeated batch by its batch_id. An embedding worker registers repeated ID features
        again, and the unused reference expires.

        None: it failed with an error after which the peer `has_left`, or is to be replaced.
        """
        while True:
            try:
                return self._session.request(subject, payload, min(timeout_s, deadline.left_s()))
            except (UnavailableError, DeadlineExceededError) as failure:
                if has_left(failure):
                    return None
                if deadline.left_s() <= _RETRY_S:  # no time for another try, whose error would say nothing
                    raise UnavailableError(
                        f"{peer} did not answer in {self._deadline_s:g} s (PERSIA_DEADLINE_SEC): {failure}"
                    ) from failure
                time.sleep(_RETRY_S)

    def _next_worker(self) -> int:
        # By the position, and not by chance: workers get equal shares, and a run can be repeated.
        workers = self._available_workers() or sorted(self._workers) or [0]
        return workers[self.position % len(workers)]

    def _available_workers(self) -> list[int]:
        now = time.monotonic()
        return [i for i in sorted(self._workers) if self._unavailable.get(i, (now, 0.0))[0] <= now]

    def _leave_out(self, index: int) -> None:
        _, before_s = self._unavailable.get(index, (0.0, _UNAVAILABLE_S / 2))
        for_s = min(2 * before_s, _LONGEST_UNAVAILABLE_S)
        self._unavailable[index] = (time.monotonic() + for_s, for_s)

    def _timeout_of(self, index: int) -> float:
        if not self._can_replace(index):
            return _REQUEST_TIMEOUT_S
        patience_s = max(_REPLACEABLE_TIMEOUT_S, _TIMES_LAST_ANSWER * self._last_answer_s)
        return min(patience_s, _REQUEST_TIMEOUT_S)

    def _can_replace(self, index: int, failure: PersiaError | None = None) -> bool:
        """Whether another worker is to be asked instead of one that does not answer."""
        # The worker may be well if a connection to the broker was lost, its own or that of this process.
        if getattr(failure, "is_lost", False) or not self._session.is_connected:
            return False
        return any(i != index for i in self._available_workers())

    def _has_departed(self, rank: int, _failure: PersiaError) -> bool:
        return rank in self._departed

    def _on_nn_worker(self, event: ServiceEvent) -> None:
        if event.kind is EventKind.LEFT:
            self._departed[event.info.index] = event.failure
        else:
            self._departed.pop(event.info.index, None)

    def _on_embedding_worker(self, event: ServiceEvent) -> None:
        index, incarnation = event.info.index, event.info.incarnation
        if event.kind is EventKind.JOINED:
            self._workers[index] = incarnation
            self._unavailable.pop(index, None)
        elif self._workers.get(index) == incarnation:  # else its successor has joined before
            del self._workers[index]

    def _on_rank_joined(self, rank: ServiceInfo) -> None:
        subjects = self._session.subjects
        for subject in (subjects.position, subjects.batch, subjects.end):
            self._session.interrupt(subject(rank.index))

    def _on_worker_joined(self, worker: ServiceInfo) -> None:
        self._unavailable.pop(worker.index, None)
        self._session.interrupt(self._session.subjects.ids(worker.index))


def _wait_for_room(reply: FlowReply, peer: str, room: Deadline) -> None:
    if reply.status is ReplyStatus.CLOSED:
        raise StreamClosedError(f"{peer} takes no more batches: {reply.message}")
    if reply.status is ReplyStatus.FAILED:
        raise TrainingFailedError(f"{peer} takes no more batches after an error: {reply.message}")
    if reply.status is ReplyStatus.ERROR:
        raise FailedPreconditionError(f"{peer} refused the batch: {reply.message}")
    if room.over:
        raise DeadlineExceededError(
            f"the buffer of {peer} was full all the time, for {_FULL_PATIENCE} times PERSIA_DEADLINE_SEC"
        )
    time.sleep(reply.retry_ms / 1000)


class RegisterBatchHandler:
    """The embedding worker's answer to loaders: a reference, "full", or an error. Thread-safe."""

    def __init__(self, register: RegisterBatch) -> None:
        self._register = register

    @classmethod
    def of_worker(cls, worker: EmbeddingWorker) -> RegisterBatchHandler:
        return cls(lambda loader, ids: (worker.incarnation, worker.register_batch(loader, ids)))

    def __call__(self, payload: bytes) -> bytes:
        try:
            request = IdsRequest.decode(payload)
            # The native worker keeps the batch in its table until LookupService.look_up (lookup.py) asks.
            incarnation, reference = self._register(request.loader_index, request.id_features)
            reply = FlowReply(ReplyStatus.OK, worker_incarnation=incarnation, reference=reference)
        except ResourceExhaustedError:
            reply = FlowReply(ReplyStatus.FULL, retry_ms=random.randint(*_RETRY_MS))
        except PersiaError as error:
            reply = FlowReply(ReplyStatus.ERROR, message=str(error))
        return reply.encode()
