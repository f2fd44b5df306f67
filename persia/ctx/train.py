"""The training context: one rank of the job, from configured servers to the last acknowledged gradient."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from persia import env
from persia.ctx import dense_checkpoint
from persia.ctx.base import PreprocessMode
from persia.ctx.embedding import EmbeddingCtx
from persia.ctx.uneven import join_uneven
from persia.data.training_batch import PersiaTrainingBatch
from persia.distributed import DistributedBaseOption, get_default_distributed_option
from persia.embedding import EmbeddingConfig
from persia.embedding.gradient import GradientReturner
from persia.embedding.lookup import leaf_gradients
from persia.embedding.optim import Optimizer
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from persia.logger import get_default_logger, set_role
from persia.messaging.subjects import NN_WORKER

__all__ = ["TrainCtx"]


class TrainCtx(EmbeddingCtx):
    """`with TrainCtx(...) as ctx:`, then `ctx.forward(batch)` and `ctx.backward(loss)` for every batch.

    On entering, the servers get the embedding optimizer and `embedding_config`. On leaving, every gradient
    handed in has been applied, or a typed error says how many were not.

    Args:
        embedding_optimizer: applied by the servers.
        dense_optimizer: steps the model's own parameters in `backward`.
        grad_scalar_update_factor: divides the loss scale after embedding gradients that were not finite.
        backward_buffer_size: batches whose gradients may wait to be sent.
        backward_workers_size: gradients sent at a time.
        grad_update_buffer_size: batches whose gradients may wait or be under way, together.
        lookup_emb_directly: must be True; lookups go straight to the embedding workers.
        mixed_precision: scale the loss for half precision (CUDA only); autocasting is the model's business.
        distributed_option: how several ranks train together; None: DDP over nccl (CUDA) or gloo (CPU).
        args, kwargs: as for `EmbeddingCtx`: model, embedding_config, threadpool_worker_size, device_id.
    """

    def __init__(
        self,
        embedding_optimizer: Optimizer,
        dense_optimizer: torch.optim.Optimizer,
        grad_scalar_update_factor: float = 4,
        backward_buffer_size: int = 10,
        backward_workers_size: int = 8,
        grad_update_buffer_size: int = 60,
        lookup_emb_directly: bool = True,
        mixed_precision: bool = True,
        distributed_option: DistributedBaseOption | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _check_optimizers(embedding_optimizer, dense_optimizer)
        if grad_scalar_update_factor <= 0:
            raise InvalidArgumentError(
                f"grad_scalar_update_factor is {grad_scalar_update_factor}: it must be greater than 0"
            )
        if not lookup_emb_directly:
            raise InvalidArgumentError("lookup_emb_directly=False is not available: leave it True")
        self.embedding_optimizer = embedding_optimizer
        self.dense_optimizer = dense_optimizer
        self.grad_scalar_update_factor = grad_scalar_update_factor
        self.mixed_precision = mixed_precision
        self._gradient_sizes = {
            "num_workers": _at_least_one("backward_workers_size", backward_workers_size),
            "queue_capacity": _at_least_one("backward_buffer_size", backward_buffer_size),
            "max_unacknowledged": _at_least_one("grad_update_buffer_size", grad_update_buffer_size),
        }
        self._distributed_option = distributed_option
        self._forwarded: list[weakref.ref[PersiaTrainingBatch]] = []
        self._warned_slots: set[str] = set()
        super().__init__(PreprocessMode.TRAIN, *args, **kwargs)

    def _check_arguments(self) -> None:
        if self.model is None:
            raise InvalidArgumentError("model not found, please init context with model")
        if self.mixed_precision and self.device_id is None:
            raise InvalidArgumentError("Mixed precision training only support on cuda device.")

    def _start(self) -> None:
        set_role(NN_WORKER, self.rank)
        self._scaler = torch.amp.GradScaler("cuda") if self.mixed_precision else None
        if self.world_size > 1:
            self._distribute_model()
        else:
            self._announce()
        self._returner = GradientReturner(
            self.backend, self.lookup_counters, on_failure=self._fail, **self._gradient_sizes
        )
        self._resources.callback(lambda: self._returner.drain(self._exit_deadline_s))

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.backend.configure(self.embedding_optimizer.train_config(self.embedding_config))
        except BaseException as failure:
            self.__exit__(type(failure), failure, failure.__traceback__)
            raise
        return self

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Replaces the embedding config of all servers while training goes on."""
        self.embedding_config = embedding_config
        self.backend.configure(self.embedding_optimizer.train_config(embedding_config), replace=True)

    def register_embedding_optimizer(self, embedding_optimizer: Optimizer) -> None:
        """Replaces the embedding optimizer of all servers while training goes on."""
        self.embedding_optimizer = embedding_optimizer
        self.backend.configure(embedding_optimizer.train_config(self.embedding_config), replace=True)

    def prepare_features(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
        prepared = super().prepare_features(batch)
        self._forwarded = [ref for ref in self._forwarded if ref() is not None]
        self._forwarded.append(weakref.ref(batch))
        return prepared

    def backward(self, loss: torch.Tensor, embedding_gradient_check_frequency: int = 20) -> torch.Tensor:
        """Computes gradients, hands the embeddings' in, and steps the dense optimizer; returns the scaled
        loss.

        The loss may depend on several forwarded batches, as long as the script holds on to them. Waits while
        the gradient buffers are full, and raises the first error that gradient return has met. Embedding
        gradients are checked for NaN and Inf at every batch, whatever `embedding_gradient_check_frequency`
        says.
        """
        self._returner.check()
        self._check_not_given_up()
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        scaled_loss = loss if self._scaler is None else self._scaler.scale(loss)
        scaled_loss.backward()  # type: ignore[no-untyped-call]
        finite = self._return_gradients(scale)
        self._step(finite)
        return scaled_loss

    def wait_for_gradients(self) -> None:
        self._returner.wait(env.get_deadline_s())

    def dump_checkpoint(  # type: ignore[override]  # the published names differ between the contexts
        self,
        dst_dir: str | os.PathLike[str],
        dense_model_filename: str = "dense.pt",
        jit_dense_model_filename: str = "jit_dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Writes the dense model and its optimizer into `dst_dir`, replacing what is there.

        All ranks hold the same, and rank 0 writes it: on the others this does nothing.
        """
        if self.rank != 0:
            return
        self.dump_torch_state_dict(self.dense_optimizer, dst_dir, opt_filename)
        super().dump_checkpoint(
            dst_dir, dense_model_filename, jit_dense_model_filename, blocking, with_jit_model
        )

    def load_checkpoint(  # type: ignore[override]  # the published names differ between the contexts
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
    ) -> None:
        """Loads the dense model and its optimizer from `src_dir`; NotFoundError when one is not there."""
        super().load_checkpoint(src_dir, map_location, dense_model_filename, blocking)
        path = dense_checkpoint.local_path(src_dir) / opt_filename
        dense_checkpoint.load_state_dict(self.dense_optimizer, path, map_location or self.device)

    def uneven_inputs(self) -> AbstractContextManager[object]:
        """A rank that has ended takes part in the others' collectives until all have ended."""
        if isinstance(self.model, DistributedDataParallel):
            scaler = [] if self._scaler is None else [self._scaler]
            return join_uneven(self.model, [self.dense_optimizer, *scaler])
        return contextlib.nullcontext()

    def _forward_model(self, model: torch.nn.Module) -> Callable[..., Any]:
        return model

    def _distribute_model(self) -> None:
        """Joins the process group; rank 0's host is discovered unless something else names it."""
        assert self.model is not None, "checked before"
        option = self._distributed_option or get_default_distributed_option(self.device_id)
        self._announce(f"{env.get_advertise_host()}:{option.master_port}")
        master_addr = option.master_addr
        if master_addr is None and not option.init_with_env_file() and self._cluster is not None:
            ranks = self._cluster.directory.wait_for(NN_WORKER, env.get_deadline_s(), self.world_size)
            master_addr = ranks[0].address.rpartition(":")[0]
        was_initialized = dist.is_initialized()
        self.model, _ = option.convert2distributed_model(
            self.model, self.world_size, self.rank, self.device_id, master_addr, self.dense_optimizer
        )
        if not was_initialized:
            self._resources.callback(dist.destroy_process_group)

    def _check_not_given_up(self) -> None:
        batch = self.current_batch
        if batch is not None and batch.lease is not None and batch.lease.claimed:
            raise FailedPreconditionError(
                f"batch {batch.batch_id} had its backward already, or was given up because the next one was "
                "asked for first: call backward once for every batch, or raise embedding_staleness"
            )

    def _return_gradients(self, scale: float) -> bool:
        """Hands in the gradients of every batch the loss reached; returns whether all of them are finite."""
        finite, left = True, []
        for reference in self._forwarded:
            batch = reference()
            if batch is None or batch.lease is None:
                continue
            reached = any(leaf.grad is not None for _, leaf in batch.leaves)
            if not reached and batch is not self.current_batch:
                left.append(reference)  # its own backward may come
            else:
                finite = self._are_finite(batch) and finite
                gradients = leaf_gradients(batch.leaves)
                self._warn_of_skipped_slots([name for name, gradient in gradients if gradient is None])
                self._returner.submit(batch.lease, gradients, scale=scale)
        self._forwarded = left
        return finite

    def _are_finite(self, batch: PersiaTrainingBatch) -> bool:
        # Only loss scaling needs to know; the servers skip and count slots that are not finite in any case.
        if self._scaler is None:
            return True
        return all(leaf.grad is None or bool(torch.isfinite(leaf.grad).all()) for _, leaf in batch.leaves)

    def _step(self, embedding_gradients_finite: bool) -> None:
        if self._scaler is None:
            self.dense_optimizer.step()
        else:
            self._scaler.step(self.dense_optimizer)
            # With several ranks the scale must stay equal on all: it follows the dense gradients, which DDP
            # has summed.
            if embedding_gradients_finite or self.world_size > 1:
                self._scaler.update()
            else:
                self._scaler.update(self._scaler.get_scale() / self.grad_scalar_update_factor)
        self.dense_optimizer.zero_grad()

    def _warn_of_skipped_slots(self, names: list[str]) -> None:
        new = set(names) - self._warned_slots
        if new:
            self._warned_slots |= new
            get_default_logger().warning(
                "the loss does not depend on %s: these slots are not updated (counted in skipped_slots)",
                sorted(new),
            )


def _check_optimizers(embedding_optimizer: object, dense_optimizer: object) -> None:
    if not isinstance(embedding_optimizer, Optimizer):
        raise InvalidTypeError(
            f"embedding_optimizer is {type(embedding_optimizer).__name__}: use one of persia.embedding.optim"
        )
    if not isinstance(dense_optimizer, torch.optim.Optimizer):
        raise InvalidTypeError(f"dense_optimizer is {type(dense_optimizer).__name__}: use one of torch.optim")


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise InvalidArgumentError(f"{name} is {value}: it must be at least 1")
    return value
