"""The context of a data loader: sends batches into the job, and tells every rank when it is done."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from persia import env
from persia.ctx.base import BaseCtx
from persia.data.cluster import Cluster
from persia.data.embedded import find_embedded_job
from persia.data.order import LoaderShare
from persia.embedding.data import PersiaBatch
from persia.embedding.deadline import Deadline
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PersiaError,
    StreamClosedError,
    UnavailableError,
)
from persia.logger import get_default_logger, set_role
from persia.messaging.discovery import EventKind, ServiceEvent
from persia.messaging.payloads import (
    BatchAnnouncement,
    EndOfStream,
    FlowReply,
    IdsReply,
    IdsRequest,
    ReplyStatus,
)
from persia.messaging.subjects import DATA_LOADER, EMBEDDING_WORKER, NN_WORKER
from persia.observability.phases import SEND_BATCH
from persia.observability.sources import DataLoaderSource

if TYPE_CHECKING:  # it needs torch, which a loader does without
    from persia.data.host import LoaderHost

__all__ = ["DataCtx"]

_REQUEST_TIMEOUT_S = 10.0
_RETRY_S = 0.1  # after a peer was not there, or did not answer
_SHORT_END_DEADLINE_S = 5.0  # for telling the ranks of the end after something has failed
# A receiver that answers "full" is alive, and a long evaluation is no failure: it has this many times the
# deadline of one that does not answer.
_FULL_PATIENCE = 12


class DataCtx(BaseCtx):
    """`with DataCtx() as ctx: ctx.send_data(batch)`.

    Waits on creation for the embedding workers and for the NN workers. Used without `with`, it ends with the
    process. When the NN workers leave their training loops before the data ends, `send_data` raises
    StreamClosedError, and the `with` block ends there without an error: the outcome of the job is theirs.

    Without a cluster it runs on a thread of the process that trains, and feeds the context there.

    Args:
        to: the embedded context to feed; None: the one whose loader this is, or the only one.
        replica_index: number of this loader, from 0, of the `replica_size` of the job; None: REPLICA_INDEX
            and REPLICA_SIZE.
        args, kwargs: as for `BaseCtx`.
    """

    def __init__(
        self,
        *args: Any,
        to: LoaderHost | None = None,
        replica_index: int | None = None,
        replica_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.replica_index, self.replica_size = _replica(replica_index, replica_size)
        self._deadline_s = env.get_deadline_s()
        self._num_sent = self._num_ids_sent = 0
        self._departed: set[int] = set()
        self._workers: dict[int, int] = {}  # index to incarnation, of those that take batches
        self._failure: PersiaError | None = None
        self._cluster = self._connect(to)
        try:
            self._join_job()
        except BaseException:
            self._cluster.close()
            raise
        atexit.register(self._close_at_exit)

    def _connect(self, to: LoaderHost | None) -> Cluster:
        name = f"data-loader-{self.replica_index}"
        if to is None and env.get_nats_url() is not None:
            set_role(DATA_LOADER, self.replica_index)
            return Cluster.connect(name)
        job = find_embedded_job() if to is None else to.embedded_job
        if job is None:
            raise FailedPreconditionError(
                "the context given as `to` has no embedded job of its own: loaders of a cluster leave it out"
            )
        return job.connect(name)

    def _join_job(self) -> None:
        source = DataLoaderSource(
            self.replica_index, self.replica_size, lambda: self._num_sent, lambda: self._num_ids_sent
        )
        self._cluster.observe(source)
        self._cluster.announce(DATA_LOADER, self.replica_index, self.replica_size)
        directory = self._cluster.directory
        directory.watch(NN_WORKER, self._on_nn_worker)
        directory.watch(EMBEDDING_WORKER, self._on_embedding_worker)
        for worker in directory.wait_for(EMBEDDING_WORKER, self._deadline_s):
            self._workers[worker.index] = worker.incarnation
        self.world_size = len(directory.wait_for(NN_WORKER, self._deadline_s))

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Sends one batch; waits while the receivers' buffers are full.

        Raises StreamClosedError when the NN workers take no more batches, FailedPreconditionError for a
        batch that was sent before, what a receiver refused it for, and UnavailableError or
        DeadlineExceededError naming the receiver that could not be reached by the deadline. After an error
        the stream has a gap: nothing more can be sent.
        """
        if self._failure is not None:
            raise FailedPreconditionError(
                "an earlier send_data failed: the stream has ended"
            ) from self._failure
        persia_batch.mark_sent()
        dense, id_features = persia_batch.encode_dense(), persia_batch.encode_id_features()
        batch_id = self._num_sent * self.replica_size + self.replica_index
        try:
            with SEND_BATCH.of(batch_id):
                self._send(batch_id, id_features, dense, persia_batch.requires_grad)
        except PersiaError as failure:
            self._failure = failure
            if not isinstance(failure, StreamClosedError):
                get_default_logger().error(
                    "batch %d was not sent: %s", batch_id, failure, extra={"batch_id": batch_id}
                )
            raise
        self._num_sent += 1
        self._num_ids_sent += persia_batch.num_ids

    def _send(self, batch_id: int, id_features: bytes, dense: bytes, requires_grad: bool) -> None:
        worker_index, reply = self._register(id_features)
        announcement = BatchAnnouncement(
            batch_id=batch_id,
            worker_incarnation=reply.worker_incarnation,
            reference=reply.reference,
            worker_index=worker_index,
            loader_index=self.replica_index,
            loader_replicas=self.replica_size,
            requires_grad=requires_grad,
            dense=dense,
        )
        rank = batch_id % self.world_size
        subject = self._cluster.session.subjects.batch(rank)
        self._request_flow(subject, announcement.encode(), f"NN worker {rank}", rank, self._deadline_s)

    def _register(self, id_features: bytes) -> tuple[int, IdsReply]:
        """(the embedding worker that took the ID features, its reply). Workers take turns."""
        request = IdsRequest(self.replica_index, self.replica_size, id_features).encode()
        room = Deadline(_FULL_PATIENCE * self._deadline_s)
        while True:
            index = self._next_worker()
            subject, peer = self._cluster.session.subjects.ids(index), f"embedding worker {index}"
            left = partial(self._worker_left, index)
            answer = self._request(subject, request, peer, Deadline(self._deadline_s), left)
            if answer is None:
                continue
            reply = IdsReply.decode(answer)
            if reply.status is ReplyStatus.OK:
                return index, reply
            self._wait_for_room(reply.status, reply.retry_ms, reply.message, peer, room)

    def _next_worker(self) -> int:
        workers = sorted(self._workers) or [0]  # without any, the first is waited for
        return workers[self._num_sent % len(workers)]

    def _worker_left(self, index: int) -> bool:
        """Whether another one is to be asked instead."""
        return bool(self._workers) and index not in self._workers

    def _request_flow(self, subject: str, payload: bytes, peer: str, rank: int, deadline_s: float) -> None:
        room = Deadline(_FULL_PATIENCE * deadline_s)
        while True:
            left = partial(self._departed.__contains__, rank)
            answer = self._request(subject, payload, peer, Deadline(deadline_s), left)
            if answer is None:
                raise StreamClosedError(f"{peer} has left the job and takes no more batches")
            reply = FlowReply.decode(answer)
            if reply.status is ReplyStatus.OK:
                return
            self._wait_for_room(reply.status, reply.retry_ms, reply.message, peer, room)

    def _request(
        self, subject: str, payload: bytes, peer: str, deadline: Deadline, has_left: Callable[[], bool]
    ) -> bytes | None:
        """Repeats the request until it is answered: receivers know a repetition by its batch_id.

        None: the peer does not answer and `has_left`.
        """
        while True:
            try:
                return self._cluster.session.request(
                    subject, payload, min(_REQUEST_TIMEOUT_S, deadline.left_s())
                )
            except (UnavailableError, DeadlineExceededError) as failure:
                if has_left():
                    return None
                if deadline.left_s() <= _RETRY_S:  # no time for another try, whose error would say nothing
                    raise UnavailableError(
                        f"{peer} did not answer in {self._deadline_s:g} s (PERSIA_DEADLINE_SEC): {failure}"
                    ) from failure
                time.sleep(_RETRY_S)

    def _wait_for_room(
        self, status: ReplyStatus, retry_ms: int, text: str, peer: str, room: Deadline
    ) -> None:
        if status is ReplyStatus.CLOSED:
            raise StreamClosedError(f"{peer} takes no more batches: {text}")
        if status is ReplyStatus.ERROR:
            raise FailedPreconditionError(f"{peer} refused the batch: {text}")
        if room.over:
            raise DeadlineExceededError(
                f"the buffer of {peer} was full all the time, for {_FULL_PATIENCE} times PERSIA_DEADLINE_SEC"
            )
        time.sleep(retry_ms / 1000)

    def _on_nn_worker(self, event: ServiceEvent) -> None:
        if event.kind is EventKind.BYE:
            self._departed.add(event.info.index)
        else:
            self._departed.discard(event.info.index)

    def _on_embedding_worker(self, event: ServiceEvent) -> None:
        index, incarnation = event.info.index, event.info.incarnation
        if event.kind is EventKind.HELLO:
            self._workers[index] = incarnation
        elif self._workers.get(index) == incarnation:  # else its successor has said hello before
            del self._workers[index]

    def _close(self, error: str | None) -> None:
        """Announces the end to every rank, then leaves. Idempotent."""
        atexit.unregister(self._close_at_exit)
        cluster, subjects = self._cluster, self._cluster.session.subjects
        end = EndOfStream(self.replica_index, self.replica_size, self._num_sent, error)
        deadline_s = self._deadline_s if self._failure is None and error is None else _SHORT_END_DEADLINE_S
        try:
            for rank in range(self.world_size):
                # A rank that gets nothing from this loader does not wait for its end, and may have left.
                share = LoaderShare.of(self.replica_index, self.replica_size, rank, self.world_size)
                if share.first_sequence is None or rank in self._departed:
                    continue
                self._request_flow(subjects.end(rank), end.encode(), f"NN worker {rank}", rank, deadline_s)
        except StreamClosedError:
            pass  # nobody waits for the end
        except PersiaError:
            if error is None and self._failure is None:
                raise
            # The error that made this loader fail is the one to show.
        finally:
            cluster.close()

    def _close_at_exit(self) -> None:
        # Set by the interpreter when the script ended with an uncaught error.
        error = getattr(sys, "last_value", None)
        self._close(self._error_text(error))

    def _error_text(self, error: BaseException | None) -> str | None:
        if isinstance(error, SystemExit) and not error.code:
            error = None
        if error is None:
            error = self._failure
        if isinstance(error, StreamClosedError):
            error = None
        return None if error is None else f"{type(error).__name__}: {error}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        closed = isinstance(error, StreamClosedError) and error is self._failure
        try:
            self._close(self._error_text(error))
        finally:
            super().__exit__(kind, error, trace)
        if closed:
            get_default_logger().warning("stopped sending after %d batches: %s", self._num_sent, error)
        return closed


def _replica(index: int | None, size: int | None) -> tuple[int, int]:
    if index is None and size is None:
        return env.get_replica_index() or 0, env.get_replica_size() or 1
    if index is None or size is None or not 0 <= index < size:
        raise InvalidArgumentError(
            f"replica_index={index} and replica_size={size}: give both, the index from 0 and below the size"
        )
    return index, size
