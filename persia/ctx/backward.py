"""Stages 4 and 5 in the training loop: the backward pass, the hand-over of gradients, the dense step."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from persia.errors import InvalidArgumentError
from persia.logger import get_default_logger
from persia.observability.phases import BACKWARD, DENSE_STEP, HAND_IN, NO_BATCH
from persia.pipeline.batch import PersiaTrainingBatch, leaf_gradients
from persia.pipeline.gradients import GradientSender

__all__ = ["BackwardPass", "GradientHook"]

GradientHook = Callable[[str, torch.Tensor], "torch.Tensor | None"]


class BackwardPass:
    """Sends the gradients of embeddings, and steps the dense optimizer.

    Args:
        sender: gets the gradients of every batch that the loss reached.
        scaler: of the loss; None: it is not scaled.
        scale_factor: divides the scale after embedding gradients that were not finite.
        num_ranks: with several, the scale must be the same on all of them, and follows the dense gradients
            alone, which DDP has summed.
        before_dense_step, on_embedding_gradient: as for `TrainCtx`.
    """

    def __init__(
        self,
        sender: GradientSender,
        scaler: torch.amp.GradScaler | None,
        scale_factor: float,
        num_ranks: int,
        before_dense_step: Callable[[], object] | None,
        on_embedding_gradient: GradientHook | None,
    ) -> None:
        self.scaler = scaler
        self.accumulating = False
        self._sender = sender
        self._scale_factor = scale_factor
        self.num_ranks = num_ranks
        self._before_dense_step = before_dense_step
        self._on_embedding_gradient = on_embedding_gradient
        self._all_finite = True  # the embedding gradients since the last dense step
        self._forwarded: list[weakref.ref[PersiaTrainingBatch]] = []
        self._warned_slots: set[str] = set()

    def forwarded(self, batch: PersiaTrainingBatch) -> None:
        """The loss may depend on `batch`."""
        self._forwarded = [ref for ref in self._forwarded if ref() is not None]
        self._forwarded.append(weakref.ref(batch))

    def run(
        self, loss: torch.Tensor, current: PersiaTrainingBatch | None, optimizer: torch.optim.Optimizer
    ) -> torch.Tensor:
        """Returns the scaled loss. `current`: the batch forwarded last, which must have its gradients now."""
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
                self._step(optimizer)
            self._all_finite = True
        return scaled_loss

    def _send_gradients(self, current: PersiaTrainingBatch | None, scale: float) -> bool:
        """Hands in the gradients of every batch the loss reached; returns whether all of them are finite."""
        finite, left = True, []
        for reference in self._forwarded:
            batch = reference()
            if batch is None or batch.lease is None:
                continue
            reached = any(leaf.grad is not None for _, leaf in batch.leaves)
            if not reached and batch is not current:
                left.append(reference)  # its own backward may follow
                continue
            finite = self._are_finite(batch) and finite
            left_scale = self._run_hook(batch, scale)
            gradients = leaf_gradients(batch.leaves)
            self._warn_of_skipped_slots(batch.batch_id, {name for name, array in gradients if array is None})
            self._sender.submit(batch.lease, gradients, scale=left_scale)
        self._forwarded = left
        return finite

    def _are_finite(self, batch: PersiaTrainingBatch) -> bool:
        # Only loss scaling needs to know; the servers skip and count slots that are not finite in any case.
        if self.scaler is None:
            return True
        gradients = [leaf.grad for _, leaf in batch.leaves if leaf.grad is not None]
        # One answer for all slots: on a GPU, each one read would be a wait of its own.
        return not gradients or bool(torch.stack([torch.isfinite(g).all() for g in gradients]).all())

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

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._before_dense_step is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            self._before_dense_step()
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            if self._all_finite or self.num_ranks > 1:
                self.scaler.update()
            else:
                self.scaler.update(self.scaler.get_scale() / self._scale_factor)
        optimizer.zero_grad()

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


def _checked_gradient(name: str, gradient: object, leaf: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor) and gradient.shape == leaf.shape:
        return gradient
    what = list(gradient.shape) if isinstance(gradient, torch.Tensor) else type(gradient).__name__
    raise InvalidArgumentError(
        f"on_embedding_gradient returned {what} for slot {name}: return a tensor {list(leaf.shape)}, or None"
    )
