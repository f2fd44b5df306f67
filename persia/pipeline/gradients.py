"""Stages 4 and 5: the backward pass, and the return of gradients to the embedding workers.

In: a loss, and the batches that were forwarded. Out: a step of the dense optimizer, and one call of
`EmbeddingBackend.return_gradients` a batch, whose acknowledgement releases the batch's lease.
`backward` queues a batch's gradients and returns; worker threads send them. Everything is bounded, so a
slow server slows training down instead of filling memory. The first failure is kept and raised by the next
`submit` or `drain`.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn

import torch

from persia._native import TracedBatch
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PersiaError,
)
from persia.logger import get_default_logger
from persia.observability.phases import BACKWARD, DENSE_STEP, HAND_IN, NO_BATCH
from persia.pipeline.backend import NEW_CONTEXT, EmbeddingBackend
from persia.pipeline.batch import BatchGradients, PersiaTrainingBatch
from persia.pipeline.counters import Counters
from persia.pipeline.device_batch import OutgoingGradients
from persia.pipeline.exact import ExactCalls
from persia.pipeline.lookup import BatchLease, with_batch_id
from persia.pipeline.queues import BoundedQueue, Deadline, QueueClosed

# Since torch 2.6.
_total_norm: Callable[[list[torch.Tensor]], torch.Tensor] | None = getattr(
    torch.nn.utils, "get_total_norm", None
)

GradientHook = Callable[[str, torch.Tensor], "torch.Tensor | None"]


class BackwardPass:
    """Sends the gradients of embeddings, and steps the dense optimizer.

    Args:
        sender: gets the gradients of every batch that the loss reached.
        scaler: of the loss; None: it is not scaled.
        scale_factor: divides the scale after embedding gradients that were not finite.
        num_ranks: with several, the scale must be the same on all of them, and follows the dense gradients
            alone, which DDP has summed.
        max_nonfinite_steps, before_dense_step, on_embedding_gradient: as for `TrainCtx`.
    """

    def __init__(
        self,
        sender: GradientSender,
        scaler: torch.amp.GradScaler | None,
        scale_factor: float,
        num_ranks: int,
        max_nonfinite_steps: int,
        before_dense_step: Callable[[], object] | None,
        on_embedding_gradient: GradientHook | None,
    ) -> None:
        self.scaler = scaler
        self.accumulating = False
        # A backward was begun; batches that were made for training were forwarded, of a loop or any.
        self.has_run = self.has_forwarded_of_loop = self.has_forwarded = False
        self._sender = sender
        self._scale_factor = scale_factor
        self.num_ranks = num_ranks
        self._before_dense_step = before_dense_step
        self._on_embedding_gradient = on_embedding_gradient
        self._max_nonfinite_steps = max_nonfinite_steps
        self._nonfinite_in_a_row = 0
        self._all_finite = True  # the embedding gradients since the last dense step
        # Weak: a batch that the script drops without `backward` must be reaped, which its finalizer asks for.
        self._forwarded: list[weakref.ref[PersiaTrainingBatch]] = []
        self._warned_slots: set[str] = set()

    def forwarded(self, batch: PersiaTrainingBatch) -> None:
        """The loss may depend on `batch`."""
        if batch.lease is not None:
            self.has_forwarded = True
            self.has_forwarded_of_loop = self.has_forwarded_of_loop or batch.is_of_loop
        self._forwarded = [ref for ref in self._forwarded if ref() is not None]
        self._forwarded.append(weakref.ref(batch))  # read by `_send_gradients`, at the next backward

    def run(
        self, loss: torch.Tensor, current: PersiaTrainingBatch | None, optimizer: torch.optim.Optimizer
    ) -> torch.Tensor:
        """Returns the scaled loss. `current`: the batch forwarded last, which must have its gradients now."""
        self.has_run = True
        self._sender.check()
        if current is not None:
            current.check_not_given_up()
        batch_id = NO_BATCH if current is None else current.traced_id
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        scaled_loss = loss if self.scaler is None else self.scaler.scale(loss)
        with BACKWARD.of(batch_id):
            scaled_loss.backward()  # type: ignore[no-untyped-call]
        with HAND_IN.of(batch_id):
            self._all_finite = self._send_gradients(current, scale) and self._all_finite
        if not self.accumulating:
            with DENSE_STEP.of(batch_id):
                self._step(optimizer, "none" if current is None else str(current.batch_id))
            self._all_finite = True
        return scaled_loss

    def _send_gradients(self, current: PersiaTrainingBatch | None, scale: float) -> bool:
        """Hands in the gradients of every batch the loss reached; returns whether all of them are finite."""
        finite, left = True, []
        for reference in self._forwarded:
            batch = reference()
            # No lease: looked up without gradients, for example by an evaluation in between.
            if batch is None or batch.lease is None:
                continue
            reached = batch.reached.is_set() or any(leaf.grad is not None for _, leaf in batch.leaves)
            if not reached and batch is not current:
                left.append(reference)  # its own backward may follow
                continue
            are_finite = self._begin_to_check(batch)
            if self._on_embedding_gradient is not None:
                # Known before the hook: one that clips could turn infinity into a number, and hide an
                # overflow from the loss scale.
                finite = are_finite() and finite
            left_scale = self._run_hook(batch, scale)
            gradients = batch.gradients(left_scale)
            self._warn_of_skipped_slots(
                batch.batch_id, {name for name, leaf in batch.leaves if leaf.grad is None}
            )
            self._sender.submit(batch.lease, gradients, scale=left_scale)
            if self._on_embedding_gradient is None:  # it waits for the device, for which the sender need not
                finite = are_finite() and finite
        self._forwarded = left
        return finite

    def _begin_to_check(self, batch: PersiaTrainingBatch) -> Callable[[], bool]:
        # Only loss scaling needs to know; the servers skip and count slots that are not finite in any case.
        if self.scaler is None:
            return lambda: True
        return _begin_to_check([leaf.grad for _, leaf in batch.leaves if leaf.grad is not None])

    @torch.no_grad()
    def _run_hook(self, batch: PersiaTrainingBatch, scale: float) -> float:
        """Returns the scale that gradients still have."""
        if self._on_embedding_gradient is None:
            return scale
        for name, leaf in batch.leaves:
            if leaf.grad is not None:
                gradient = leaf.grad if scale == 1.0 else leaf.grad / scale
                changed = self._on_embedding_gradient(name, gradient)
                leaf.grad = _checked_gradient(name, gradient if changed is None else changed, leaf)
        return 1.0

    def _step(self, optimizer: torch.optim.Optimizer, batch_id: str) -> None:
        # Before the hook: clipping NaN makes every gradient NaN, and clipping infinity may hide it.
        is_skipped = self.scaler is None and not _are_dense_gradients_finite(optimizer)
        if self._before_dense_step is not None and not is_skipped:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            self._before_dense_step()
        if is_skipped:
            self._skip_step(batch_id)
        elif self.scaler is None:
            optimizer.step()
            self._nonfinite_in_a_row = 0
        else:
            # torch skips such steps too; the first ones are how it finds the scale.
            self.scaler.step(optimizer)
            # torch lowers the scale only for dense gradients that are not finite. Embedding gradients are not
            # among the parameters of `optimizer`, so their overflow lowers it here.
            if self._all_finite or self.num_ranks > 1:
                self.scaler.update()
            else:
                self.scaler.update(self.scaler.get_scale() / self._scale_factor)
        optimizer.zero_grad()
        if is_skipped and self._nonfinite_in_a_row >= self._max_nonfinite_steps:
            raise FailedPreconditionError(
                f"the dense gradients of {self._nonfinite_in_a_row} steps in a row, up to batch {batch_id}, "
                "have NaN or Inf, and none was applied: look at the inputs and labels of these batches, or "
                f"lower the learning rate (max_nonfinite_steps={self._max_nonfinite_steps})"
            )

    def _skip_step(self, batch_id: str) -> None:
        self._nonfinite_in_a_row += 1
        self._sender.counters.add(nonfinite_steps=1)
        if self._nonfinite_in_a_row == 1:
            get_default_logger().warning(
                "the dense gradients of batch %s have NaN or Inf: the dense model is left as it is (counted "
                "in nonfinite_steps)",
                batch_id,
            )

    def _warn_of_skipped_slots(self, batch_id: int, names: set[str]) -> None:
        new = names - self._warned_slots
        if new:
            self._warned_slots |= new
            get_default_logger().warning(
                "the loss of batch %d does not depend on %s: these slots are not updated (counted in "
                "skipped_slots)",
                batch_id,
                sorted(new),
                extra={"batch_id": batch_id},
            )


@dataclasses.dataclass(frozen=True)
class _Gradients:
    lease: BatchLease
    gradients: BatchGradients
    scale: float


class GradientSender:
    """At most `queue_capacity` batches wait for a thread, and `max_unacknowledged` wait or are being sent."""

    def __init__(
        self,
        backend: EmbeddingBackend,
        counters: Counters,
        *,
        num_workers: int,
        queue_capacity: int,
        max_unacknowledged: int,
        on_failure: Callable[[PersiaError], None] = lambda failure: None,
        exact: ExactCalls | None = None,
    ) -> None:
        """`exact`: updates the rows of this rank before the gradients are queued."""
        self._backend = backend
        self._exact = exact
        self.counters = counters
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

    def submit(self, lease: BatchLease, gradients: BatchGradients, *, scale: float) -> None:
        """Acquires the batch's lease and queues its gradients, unless it was given up before.

        Waits while the buffers are full; raises the first failure there was.
        """
        if not lease.acquire():
            return
        try:
            failure = self._reserve(lease)
        except BaseException:  # a signal's handler raised, while this waited for room
            self._forget(lease)
            lease.give_back()
            raise
        if failure is None:
            self._hand_over(_Gradients(lease, gradients, scale))
        else:
            self._refuse(lease, failure, num_submitted=1)

    def _reserve(self, lease: BatchLease) -> PersiaError | None:
        """Waits for room in both buffers, and takes it: nothing waits between an exact update and its queue.

        Returns the first failure there was, and takes no room then.
        """
        with self._changed:
            # Ends: every batch under way is acknowledged or fails by the backend's deadline.
            self._changed.wait_for(
                lambda: self._failure or len(self._unacknowledged) < self._max_unacknowledged
            )
            if self._failure is not None:
                return self._failure
            self._unacknowledged.add(lease)
        try:
            self._queue.reserve(lease)
        except QueueClosed:
            # Of a drain that ends with an error, it is the one to show.
            return self._failure or FailedPreconditionError(
                f"backward of batch {lease.batch_id}: the context has ended"
            )
        return None

    def _hand_over(self, item: _Gradients) -> None:
        try:
            self.counters.add(gradients_submitted=1)
            if self._exact is not None:
                self._apply(self._exact, item)
            self._queue.put_reserved(item.lease, item)  # taken up by _run, on a gradient thread
        except PersiaError as failure:  # of `_apply`, which has changed nothing
            self._refuse(item.lease, failure)
        except BaseException as failure:  # a signal's handler raised, or the queue was closed
            self._forget(item.lease)
            if self._exact is None and not isinstance(failure, QueueClosed):
                item.lease.give_back()
                raise
            # The rank may have applied it, so a release would leave the servers without this update.
            lost = f"the gradient of batch {item.lease.batch_id} was not sent after {failure!r}"
            if self._exact is not None:
                self._exact.fail(item.lease.reference, lost)
            self._done(item.lease, FailedPreconditionError(f"{lost}: {NEW_CONTEXT}"))
            if not isinstance(failure, QueueClosed):
                raise
            self.check()

    def _apply(self, exact: ExactCalls, item: _Gradients) -> None:
        """On the thread of the loop: the next batch is pooled from the rows after this update."""
        assert not isinstance(item.gradients, OutgoingGradients), "exact contexts have no device"
        try:
            exact.apply(item.lease.reference, item.gradients, item.scale)
        except PersiaError as failure:
            raise with_batch_id(failure, "the gradient", item.lease.batch_id) from failure

    def _refuse(self, lease: BatchLease, failure: PersiaError, *, num_submitted: int = 0) -> NoReturn:
        """Of a batch whose update is applied nowhere."""
        lease.release()
        self._forget(lease)
        self.counters.add(gradients_submitted=num_submitted, batches_failed=1)
        if self._exact is not None:  # its rows would stay held, which no other exact context can begin with
            self._exact.drop(lease.reference)
        self._backend.forget(lease.reference)
        raise failure

    def _forget(self, lease: BatchLease) -> None:
        self._queue.cancel(lease)
        with self._changed:
            self._unacknowledged.discard(lease)
            self._changed.notify_all()

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
            # What is queued would only fail later, batch by batch. Threads in a call stay behind as daemons.
            for item in self._queue.drain():
                self._backend.forget(item.lease.reference)
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
        for item in self._queue:
            self._send(item)

    def _send(self, item: _Gradients) -> None:
        try:
            gradients = item.gradients
            if isinstance(gradients, OutgoingGradients):
                gradients = gradients.fetch()
            with TracedBatch(item.lease.batch_id):
                report = self._backend.return_gradients(item.lease.reference, gradients, scale=item.scale)
        except Exception as failure:
            error = with_batch_id(failure, "the gradient", item.lease.batch_id)
            # Raised, too, but later, and only the first one.
            get_default_logger().error("%s", error, extra={"batch_id": item.lease.batch_id})
            self._done(item.lease, error)
        else:
            self.counters.applied(report)
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
        if failure is not None:  # perhaps before its call; it may wait for a lock, so not below
            self._backend.forget(lease.reference)
        with self._changed:
            self._unacknowledged.discard(lease)
            if failure is not None:
                self.counters.add(batches_failed=1)
                first = self._failure is None
                self._failure = self._failure or failure
            self._changed.notify_all()
        # Outside the lock: it wakes the loop, which may call `submit` or `check` at once.
        if first and failure is not None:
            self._on_failure(failure)


def _are_dense_gradients_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Of all ranks: DDP has averaged them, and NaN or infinity of one is in the average."""
    return _are_finite(
        [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
    )


def _are_finite(gradients: list[torch.Tensor]) -> bool:
    return _begin_to_check(gradients)()


def _begin_to_check(gradients: list[torch.Tensor]) -> Callable[[], bool]:
    """What is returned waits for the device, and says whether all gradients are finite."""
    if not gradients:
        return lambda: True
    # A norm or sum reads each gradient once and writes nothing; NaN and infinity stay in it.
    if _total_norm is not None and all(g.is_cuda and g.dtype == torch.float32 for g in gradients):
        finite = torch.isfinite(_total_norm(gradients))  # a few kernels for all gradients
    else:
        sums = [gradient.sum(dtype=torch.float32).to(gradients[0].device) for gradient in gradients]
        finite = torch.isfinite(torch.stack(sums)).all()  # one wait for the device, not one a parameter
    # Either may overflow.
    return lambda: bool(finite) or all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _checked_gradient(name: str, gradient: object, leaf: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor) and gradient.shape == leaf.shape:
        return gradient
    what = list(gradient.shape) if isinstance(gradient, torch.Tensor) else type(gradient).__name__
    raise InvalidArgumentError(
        f"on_embedding_gradient returned {what} for slot {name}: return a tensor {list(leaf.shape)}, or None"
    )
