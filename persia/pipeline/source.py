"""Stages 2 and 3: a batch before its lookup, of the loaders' stream or of a data set in this process.

In: `PersiaBatch`es of an iterable, or a `SubmittedBatch` of the loaders' stream (`receive.py`). Out:
`PendingBatch`es, which `Prefetcher._feed` (`prefetch.py`) takes from either source.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from persia._native import BatchReference
from persia.embedding.data import PersiaBatch
from persia.errors import InvalidTypeError
from persia.messaging.payloads import SubmittedBatch
from persia.pipeline.queues import BoundedQueue, QueueClosed


@dataclasses.dataclass(frozen=True)
class PendingBatch:
    """A batch before its lookup."""

    batch_id: int
    requires_grad: bool
    reference: BatchReference | None  # where a loader has registered it
    id_features: bytes | memoryview
    # The dense section. LookupService.look_up (lookup.py) decodes it on a lookup thread, in parallel: the
    # feeder would do it for all batches in turn.
    dense: bytes | memoryview


class BatchSource(Protocol):
    """Used by one prefetcher thread; `stop` may be called from any."""

    def take(self) -> PendingBatch | None:
        """The next batch; None at the end. Raises what went wrong, or QueueClosed once stopped."""

    def yielded(self, batch_id: int) -> None:
        """The loop has got the batch, after all those that were taken before it."""

    def stop(self) -> list[PendingBatch]:
        """Wakes `take` and returns the registered batches that were not taken."""

    def close(self) -> None:
        """Frees what the source holds, after `stop`."""


def pending_from_stream(batch: SubmittedBatch) -> PendingBatch:
    """A batch that a loader registered and submitted."""
    reference = BatchReference(batch.worker_index, batch.worker_incarnation, batch.reference)
    return PendingBatch(batch.batch_id, batch.requires_grad, reference, batch.id_features, batch.dense)


def pending_from(batch: PersiaBatch, batch_id: int) -> PendingBatch:
    """A batch built in this process. It cannot be sent or looked up again."""
    if not isinstance(batch, PersiaBatch):
        raise InvalidTypeError(
            f"a data set must yield PersiaBatch objects, batch {batch_id} is {type(batch).__name__}"
        )
    # Encoded although it stays in this process: the engine reads the wire format, and a model then sees the
    # same bits as in a cluster.
    batch.mark_sent()
    ids, dense = batch.encode_id_features(), batch.encode_dense()
    return PendingBatch(batch_id, batch.requires_grad, None, ids, dense)


class LocalSource:
    """Iterates a data set on a thread of its own, `buffer_size` batches ahead."""

    def __init__(
        self, batches: Iterable[PersiaBatch], buffer_size: int, on_received: Callable[[], None]
    ) -> None:
        self._batches = batches
        self._on_received = on_received
        self._queue: BoundedQueue[PendingBatch] = BoundedQueue(buffer_size)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="persia-dataset", daemon=True)
        self._thread.start()

    def take(self) -> PendingBatch | None:
        try:
            pending = self._queue.get()
        except QueueClosed:
            if self._failure is not None:
                raise self._failure from None
            return None
        self._on_received()
        return pending

    def yielded(self, batch_id: int) -> None:
        pass  # the script iterates the data set, and knows where it is

    def stop(self) -> list[PendingBatch]:
        self._queue.drain()  # not registered anywhere: nothing to release
        return []

    def close(self) -> None:
        # A data set that blocks in the user's code cannot be interrupted; its thread is a daemon.
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            for batch_id, batch in enumerate(self._batches):
                self._queue.put(pending_from(batch, batch_id))
        except QueueClosed:
            pass
        except BaseException as failure:  # also sys.exit(): the loop must not wait for more
            # Raised in the training loop, after the batches before it.
            self._failure = failure
        self._queue.close()
