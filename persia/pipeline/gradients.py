"""Stage 5: returns gradients to the embedding workers in the background, and loses none.

`backward` hands a batch's gradients in and goes on; worker threads send them. Everything is bounded, so a
slow server slows training down instead of filling memory. The first failure is kept and raised by the next
`submit` or `drain`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from persia._native import TracedBatch
from persia.errors import DeadlineExceededError, FailedPreconditionError, PersiaError
from persia.logger import get_default_logger
from persia.pipeline.backend import EmbeddingBackend, SlotGradients
from persia.pipeline.counters import Counters
from persia.pipeline.lease import BatchLease, with_batch_id
from persia.pipeline.queues import BoundedQueue, Deadline, QueueClosed

__all__ = ["GradientSender"]


@dataclasses.dataclass(frozen=True)
class _Gradients:
    lease: BatchLease
    gradients: SlotGradients
    scale: float


class GradientSender:
    """`queue_capacity` batches may wait for a worker, `max_unacknowledged` may wait or be under way."""

    def __init__(
        self,
        backend: EmbeddingBackend,
        counters: Counters,
        *,
        num_workers: int,
        queue_capacity: int,
        max_unacknowledged: int,
        on_failure: Callable[[PersiaError], None] = lambda failure: None,
    ) -> None:
        self._backend = backend
        self._counters = counters
        self._max_unacknowledged = max_unacknowledged
        self._on_failure = on_failure
        self._queue: BoundedQueue[_Gradients] = BoundedQueue(queue_capacity)
        self._changed = threading.Condition()
        self._unacknowledged: set[BatchLease] = set()
        self._failure: PersiaError | None = None
        self._warned_of_nonfinite = False
        self._threads = [
            threading.Thread(target=self._run, name=f"persia-gradient-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lease: BatchLease, gradients: SlotGradients, *, scale: float) -> None:
        """Acquires the batch's lease and queues its gradients, unless it was given up before.

        Waits while the buffers are full; raises the first failure there was.
        """
        if not lease.acquire():
            return
        try:
            self._submit(lease, gradients, scale)
        except PersiaError:
            raise
        except BaseException:  # a signal's handler raised, while this waited for room
            with self._changed:
                self._unacknowledged.discard(lease)
            lease.give_back()
            raise

    def _submit(self, lease: BatchLease, gradients: SlotGradients, scale: float) -> None:
        with self._changed:
            # Ends: every batch under way is acknowledged or fails by the backend's deadline.
            self._changed.wait_for(
                lambda: self._failure or len(self._unacknowledged) < self._max_unacknowledged
            )
            failure = self._failure
            if failure is None:
                self._unacknowledged.add(lease)
        self._counters.add(gradients_submitted=1)
        if failure is not None:
            self._counters.add(batches_failed=1)
            lease.release()
            raise failure
        try:
            self._queue.put(_Gradients(lease, gradients, scale))  # taken up by _run, on a gradient thread
        except QueueClosed:
            self._done(
                lease, FailedPreconditionError(f"backward of batch {lease.batch_id}: the context has ended")
            )
            self.check()

    def check(self) -> None:
        """Raises the first failure there was."""
        if self._failure is not None:
            raise self._failure

    def wait(self, deadline_s: float) -> None:
        """Waits until every gradient handed in is acknowledged.

        Raises the first failure, or DeadlineExceededError naming the batches whose gradients were not
        acknowledged.
        """
        self._wait_acknowledged(deadline_s)
        self.check()

    def drain(self, deadline_s: float) -> None:
        """Like `wait`, and ends the threads."""
        self._queue.close()
        deadline = Deadline(deadline_s)
        try:
            self._wait_acknowledged(deadline_s)
        except DeadlineExceededError:
            self._queue.drain()
            raise
        for thread in self._threads:
            thread.join(deadline.left_s() + 1.0)  # nothing is left to do for them
        self.check()

    def _wait_acknowledged(self, deadline_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._unacknowledged, deadline_s)
            left = sorted(lease.batch_id for lease in self._unacknowledged)
        if left:
            error = DeadlineExceededError(
                f"the gradients of {len(left)} batches were not acknowledged within {deadline_s:g} s "
                f"(batches {', '.join(map(str, left[:10]))}{', ...' if len(left) > 10 else ''})"
            )
            raise error from self._failure

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get()
            except QueueClosed:
                return
            self._send(item)

    def _send(self, item: _Gradients) -> None:
        try:
            with TracedBatch(item.lease.batch_id):
                report = self._backend.return_gradients(
                    item.lease.reference, item.gradients, scale=item.scale
                )
        except Exception as failure:
            error = with_batch_id(failure, "the gradient", item.lease.batch_id)
            # Raised, too, but later, and only the first one.
            get_default_logger().error("%s", error, extra={"batch_id": item.lease.batch_id})
            self._done(item.lease, error)
        else:
            self._counters.applied(report)
            if report.num_nonfinite_slots:
                self._warn_of_nonfinite(item.lease.batch_id, report.num_nonfinite_slots)
            self._done(item.lease, None)

    def _warn_of_nonfinite(self, batch_id: int, num_slots: int) -> None:
        with self._changed:
            warned, self._warned_of_nonfinite = self._warned_of_nonfinite, True
        if not warned:
            get_default_logger().warning(
                "the gradients of %d slots of batch %d had NaN or Inf and were not applied (further ones are "
                "counted in nonfinite_slots only)",
                num_slots,
                batch_id,
                extra={"batch_id": batch_id},
            )

    def _done(self, lease: BatchLease, failure: PersiaError | None) -> None:
        first = False
        lease.release()
        with self._changed:
            self._unacknowledged.discard(lease)
            if failure is not None:
                self._counters.add(batches_failed=1)
                first = self._failure is None
                self._failure = self._failure or failure
            self._changed.notify_all()
        if first and failure is not None:
            self._on_failure(failure)
