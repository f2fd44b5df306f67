"""The context of a data loader: sends batches into the job, and tells every rank when it is done."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from persia import env
from persia.ctx.base import BaseCtx, has_failed
from persia.embedding.data import PersiaBatch
from persia.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    PersiaError,
    StreamClosedError,
)
from persia.job.connection import JobConnection
from persia.job.embedded import find_embedded_job
from persia.logger import get_default_logger, set_role
from persia.messaging.subjects import DATA_LOADER
from persia.observability.phases import SEND_BATCH
from persia.observability.sources import DataLoaderSource
from persia.pipeline.send import BatchSender, TrainingFailedError
from persia.security.secret import LOADER

if TYPE_CHECKING:  # it needs torch, which a loader does without
    from persia.ctx.embedding import EmbeddingCtx

_SHORT_END_DEADLINE_S = 5.0  # for telling the ranks of the end after a failure


class DataCtx(BaseCtx):
    """`with DataCtx() as ctx: ctx.send_data(batch)`.

    Waits on creation for the embedding workers and for the NN workers. Used without `with`, it ends with the
    process. When the NN workers leave their training loops before the data ends, `send_data` raises
    StreamClosedError, and the `with` block ends there without an error: the outcome of the job is theirs.
    When an error has ended the training, `send_data` raises UnavailableError, and the `with` block logs it
    and ends the process with exit code 75: its batches were not taken. Without `with` the exit code is the
    same.

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
        to: EmbeddingCtx | None = None,
        replica_index: int | None = None,
        replica_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.replica_index, self.replica_size = index, replicas = _replica(replica_index, replica_size)
        self._deadline_s = env.get_deadline_s()
        self._num_ids_sent = 0
        self._failure: PersiaError | None = None
        self._is_embedded = True
        self.connection = connection = self._connect(to)
        try:
            sender = BatchSender(connection.session, connection.directory, index, replicas, self._deadline_s)
            connection.observe(
                DataLoaderSource(index, replicas, lambda: sender.num_sent, lambda: self._num_ids_sent)
            )
            # Before it waits for the job: ranks ask whether their loaders are alive from the start.
            connection.advertise(DATA_LOADER, index, replicas)
            sender.wait_for_job()
        except BaseException:
            connection.close()
            raise
        self._sender = sender
        self.world_size = sender.world_size
        # Published scripts use DataCtx without `with`, and ranks would wait for an end that is never sent.
        atexit.register(self._close_at_exit)

    def _connect(self, to: EmbeddingCtx | None) -> JobConnection:
        name = f"data-loader-{self.replica_index}"
        if to is None and env.get_nats_url() is not None:
            # Set here: a loader on a thread of a training process must not rename its logs.
            set_role(DATA_LOADER, self.replica_index)
            self._is_embedded = False
            return JobConnection.connect(name, LOADER)
        job = find_embedded_job() if to is None else to.runtime.embedded if to.owns_runtime else None
        if job is None:
            raise FailedPreconditionError(
                "the context given as `to` has no embedded job of its own: loaders of a cluster leave it out"
            )
        return job.connect(name)

    @property
    def position(self) -> int:
        """The number of this loader's next batch, from 0 in the whole job: its batches sent and left out."""
        return self._sender.position

    def resume(self) -> int:
        """Continues with the first batch that the job needs; returns its `position`.

        After a restart of the loader, that is the first that ranks do not have; after `load_checkpoint` in
        the ranks, the first one that the checkpoint does not have. Call it before the first `send_data`, in
        all loaders or in none. A loader that does not call it sends its first batch first: `send_data` leaves
        out what ranks have got in this run, and batches of a checkpoint are taken for those of other data.

        Position `p` of loader `i` of `n` is batch `p * n + i` of the job. A loader that splits the data in
        this way may continue with another number of loaders.
        """
        if self._sender.position:
            raise FailedPreconditionError(
                f"{self._sender.position} batches are sent: call resume() before the first send_data"
            )
        return self._sender.resume()

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Sends one batch, unless ranks have it; waits while the receivers' buffers are full.

        Raises StreamClosedError when the NN workers take no more batches, UnavailableError when an error has
        ended the training, FailedPreconditionError for a batch that was sent before, what a receiver refused
        it for, and UnavailableError or DeadlineExceededError naming the receiver that could not be reached by
        the deadline. After an error the stream has a gap: nothing more can be sent. InvalidTypeError for what
        is no batch.
        """
        if not isinstance(persia_batch, PersiaBatch):
            raise InvalidTypeError(f"send_data takes a PersiaBatch, not {type(persia_batch).__name__}")
        if self._failure is not None:
            raise FailedPreconditionError(
                "an earlier send_data failed: the stream has ended"
            ) from self._failure
        # Marked before it is sent: after a failure a worker may have it, and would train it twice.
        persia_batch.mark_sent()
        if self._sender.skip_known():
            return
        dense, id_features = persia_batch.encode_dense(), persia_batch.encode_id_features()
        batch_id = self._sender.next_batch_id
        try:
            with SEND_BATCH.of(batch_id):
                self._sender.send(id_features, dense, requires_grad=persia_batch.requires_grad)
        except PersiaError as failure:
            self._failure = failure
            if not isinstance(failure, (StreamClosedError, TrainingFailedError)):
                get_default_logger().error(
                    "batch %d was not sent: %s", batch_id, failure, extra={"batch_id": batch_id}
                )
            raise
        self._num_ids_sent += persia_batch.num_ids

    def _close(self, error: str | None) -> None:
        """Tells every rank of the end, then leaves. Idempotent."""
        # At exit the interpreter would close it again.
        atexit.unregister(self._close_at_exit)
        has_failed = self._failure is not None or error is not None
        try:
            self._sender.end(error, _SHORT_END_DEADLINE_S if has_failed else self._deadline_s)
        except StreamClosedError:
            pass  # no rank waits for the end
        except TrainingFailedError as failure:
            self._failure = self._failure or failure
        except PersiaError:
            if not has_failed:  # else the error that made this loader fail is the one to show
                raise
        finally:
            self.connection.close()

    def _close_at_exit(self) -> None:
        # Set by the interpreter when the script ended with an uncaught error.
        error = getattr(sys, "last_value", None)
        self._close(self._error_text(error))
        if self._was_refused(error) and not self._is_embedded:
            get_default_logger().error("batches were not taken: exit code %d", os.EX_TEMPFAIL)
            logging.shutdown()
            # Its reader may have gone, or it is closed, or None.
            with suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
            os._exit(os.EX_TEMPFAIL)  # the interpreter has no other way to change it now

    def _was_refused(self, error: BaseException | None) -> bool:
        """Whether an error has ended the training, and no other one the script."""
        return isinstance(self._failure, TrainingFailedError) and error in (None, self._failure)

    def _error_text(self, error: BaseException | None) -> str | None:
        if not has_failed(error):
            error = self._failure
        if isinstance(error, StreamClosedError):
            error = None
        return None if error is None else f"{type(error).__name__}: {error}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # A StreamClosedError of something else in the block is the script's own and is not hidden.
        closed = isinstance(error, StreamClosedError) and error is self._failure
        try:
            self._close(self._error_text(error))
        finally:
            super().__exit__(kind, error, trace)
        refused = self._was_refused(error)
        if closed or refused:
            stopped = "stopped sending after %d batches: %s"
            get_default_logger().warning(stopped, self._sender.num_sent, self._failure)
        # Also where the script has caught it: a supervisor must not take the data for trained. A thread of
        # the process that trains leaves the end to that.
        if refused and not self._is_embedded:
            get_default_logger().error("batches were not taken: exit code %d", os.EX_TEMPFAIL)
            raise SystemExit(os.EX_TEMPFAIL) from None
        return closed or refused


def _replica(index: int | None, size: int | None) -> tuple[int, int]:
    if index is None and size is None:
        return env.get_replica_index() or 0, env.get_replica_size() or 1
    if index is None or size is None or not 0 <= index < size:
        raise InvalidArgumentError(
            f"replica_index={index} and replica_size={size}: give both, the index from 0 and below the size"
        )
    return index, size
