"""The training context: one rank of the job, from configured servers to the last acknowledged gradient."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from persia import env
from persia.checkpoint.checkpoints import Source, described
from persia.checkpoint.training_dump import TrainingDumps
from persia.ctx.base import PreprocessMode
from persia.ctx.embedding import FAILED_EXIT_DEADLINE_S, EmbeddingCtx
from persia.ctx.precision import MixedPrecision, Precision
from persia.ctx.rank_zero import done_by_rank_0
from persia.ctx.uneven import join_uneven
from persia.data.training_batch import PersiaTrainingBatch
from persia.distributed import DistributedBaseOption, get_default_distributed_option
from persia.embedding import EmbeddingConfig
from persia.embedding.consistency import Consistency
from persia.embedding.gradient import GradientReturner
from persia.embedding.lookup import leaf_gradients
from persia.embedding.optim import Optimizer
from persia.errors import InvalidArgumentError, InvalidTypeError
from persia.logger import get_default_logger, set_role
from persia.messaging.subjects import NN_WORKER
from persia.observability.phases import BACKWARD, DENSE_STEP, HAND_IN, NO_BATCH
from persia.packets.writer import PacketWriter
from persia.storage import dense

__all__ = ["TrainCtx"]

GradientHook = Callable[[str, torch.Tensor], "torch.Tensor | None"]


class TrainCtx(EmbeddingCtx):
    """`with TrainCtx(...) as ctx:`, then `ctx.forward(batch)` and `ctx.backward(loss)` for every batch.

    On entering, the servers get the embedding optimizer and `embedding_config`. On leaving, every gradient
    handed in has been applied, or a typed error says how many were not.

    Args:
        embedding_optimizer: applied by the servers.
        dense_optimizer: steps the model's own parameters in `backward`.
        grad_scalar_update_factor: divides the loss scale after embedding gradients that were not finite. Not
            used with several ranks, whose scale must be the same: it follows the dense gradients alone.
        backward_buffer_size: batches whose gradients may wait to be sent.
        backward_workers_size: gradients sent at a time.
        grad_update_buffer_size: batches whose gradients may wait or be under way, together.
        lookup_emb_directly: must be True; lookups go straight to the embedding workers.
        mixed_precision: True (CUDA only): the loss is scaled for half precision, autocasting is the model's
            business; "fp16": scaled, and `forward` autocasts; "bf16": `forward` autocasts.
        distributed_option: how several ranks train together; None: DDP over nccl (CUDA) or gloo (CPU).
        args, kwargs: as for `EmbeddingCtx`: model, embedding_config, threadpool_worker_size, device_id,
            slots, global_config.
        consistency: "hybrid": lookups run ahead of updates by `embedding_staleness` batches; "synchronous":
            each step sees the updates of all ranks' steps before it; "asynchronous": without a bound. Slots
            may have a mode of their own in the embedding config.
        before_dense_step: called with nothing when the dense gradients are complete, averaged over ranks
            and unscaled: the place to clip them.
        on_embedding_gradient: called for every slot of a batch with its name and gradient, unscaled float32
            [num_rows, dim]; what it returns is applied, or the gradient itself, changed in place, when it
            returns None.
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
        mixed_precision: MixedPrecision = True,
        distributed_option: DistributedBaseOption | None = None,
        *args: Any,
        consistency: Consistency | str = Consistency.HYBRID,
        before_dense_step: Callable[[], object] | None = None,
        on_embedding_gradient: GradientHook | None = None,
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
        self._consistency = Consistency.of(consistency)
        self._before_dense_step = before_dense_step
        self._on_embedding_gradient = on_embedding_gradient
        self._accumulating = False
        self._all_finite = True  # the embedding gradients since the last dense step
        self._forwarded: list[weakref.ref[PersiaTrainingBatch]] = []
        self._warned_slots: set[str] = set()
        self.step = 0  # batches that this rank has trained, and those before the checkpoint that it loaded
        self._dump_requests = TrainingDumps(self.dump_checkpoint)
        super().__init__(PreprocessMode.TRAIN, *args, **kwargs)

    def _check_arguments(self) -> None:
        if self.model is None:
            raise InvalidArgumentError("model not found, please init context with model")
        self._precision = Precision.of(self.mixed_precision, self.device_id)

    def _start(self) -> None:
        set_role(NN_WORKER, self.rank)
        device_type = "cpu" if self.device is None else self.device.type
        self._scaler = torch.amp.GradScaler(device_type) if self._precision.scaled else None
        if self.world_size > 1:
            self._distribute_model()
        else:
            self._announce()
        # Before the returner, so that it ends after it: with every gradient applied.
        self._packets = self._start_packets()
        self._returner = GradientReturner(
            self.backend, self.lookup_counters, on_failure=self._fail, **self._gradient_sizes
        )
        self._resources.callback(lambda: self._returner.drain(self._exit_deadline_s))

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.backend.configure(self.embedding_optimizer.train_config(self.embedding_config))
            self._follow(self.embedding_optimizer)
            self._answer_dump_requests()
        except BaseException as failure:
            self.__exit__(type(failure), failure, failure.__traceback__)
            raise
        return self

    def _answer_dump_requests(self) -> None:
        """From here on there is something to dump, on servers that know their optimizer."""
        if self.rank == 0 and self._cluster is not None:
            session = self._cluster.session
            answers = session.respond(session.subjects.training_dump, self._dump_requests.handle)
            self._resources.callback(answers.close)

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Replaces the embedding config of all servers while training goes on."""
        self.embedding_config = embedding_config
        self.backend.configure(self.embedding_optimizer.train_config(embedding_config), replace=True)

    def register_embedding_optimizer(self, embedding_optimizer: Optimizer) -> None:
        """Replaces the embedding optimizer of all servers while training goes on."""
        self.backend.configure(embedding_optimizer.train_config(self.embedding_config), replace=True)
        self.embedding_optimizer.remove_user(self)
        self.embedding_optimizer = embedding_optimizer
        self._follow(embedding_optimizer)

    def _follow(self, optimizer: Optimizer) -> None:
        # Every rank steps its schedule, and not at the same moment: the first one's rate is the servers'.
        if self.rank == 0:
            optimizer.add_user(self)
            self._resources.callback(optimizer.remove_user, self)

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
        with BACKWARD.of(self._batch_id):
            scaled_loss.backward()  # type: ignore[no-untyped-call]
        with HAND_IN.of(self._batch_id):
            self._all_finite = self._return_gradients(scale) and self._all_finite
        if not self._accumulating:
            with DENSE_STEP.of(self._batch_id):
                self._step(self._all_finite)
            self._all_finite = True
        self.step += 1
        if self._packets is not None and self._packets.wants_dense:
            self._packets.offer_dense(self.step, dense.copied_state(self._require_model()))
        if self._must_end_steps_together:
            self._end_step_together()
        if self._dump_requests.is_wanted and not self._accumulating:
            self.wait_for_dump_embedding()  # an error of the script's own dump is the script's
            self._dump_requests.serve()
        return scaled_loss

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, `backward` adds dense gradients up, without a step and without waiting for other ranks.

        ```python
        for position, batch in enumerate(loader, start=1):
            with ctx.accumulate() if position % 4 else nullcontext():
                output, labels = ctx.forward(batch)
                ctx.backward(loss_fn(output, labels[0]) / 4)
        ```

        Embedding gradients are applied batch by batch all the same. Ranks must agree on where they
        accumulate.
        """
        model = self.model
        with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            was, self._accumulating = self._accumulating, True
            try:
                yield
            finally:
                self._accumulating = was

    @property
    def consistency(self) -> Consistency:
        return self._consistency

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
        *,
        step: int | None = None,
        keep_last: int | None = None,
        in_place: bool = False,
    ) -> None:
        """As `EmbeddingCtx.dump_checkpoint`, with the dense optimizer; `step` is this context's by default.

        All ranks hold the same dense part, and rank 0 writes: on the others this does nothing.
        """
        states: dict[str, dense.TorchState] = {
            dense_model_filename: self._require_model(),
            opt_filename: self.dense_optimizer,
        }
        jit_name = jit_dense_model_filename if with_jit_model else None
        self._dump(
            dst_dir, states, jit_name, blocking=blocking, step=step, keep_last=keep_last, in_place=in_place
        )

    def load_checkpoint(  # type: ignore[override]  # the published names differ between the contexts
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        *,
        strict: bool = True,
    ) -> None:
        """As `EmbeddingCtx.load_checkpoint`, with the dense optimizer and `step`. All ranks must call it.

        Hyper-parameters of the embedding optimizer stay those of this context.
        """
        states: dict[str, dense.TorchState] = {
            dense_model_filename: self._require_model(),
            opt_filename: self.dense_optimizer,
        }
        source = self._load(src_dir, states, map_location, blocking=blocking, strict=strict)
        self.step = source.manifest.step or 0

    def wait_for_load_embedding(self) -> None:
        """Until rank 0 has loaded everything; raises what has failed. All ranks must call it."""
        if self.world_size > 1:
            done_by_rank_0(self.rank, super().wait_for_load_embedding, self.device)
        else:
            super().wait_for_load_embedding()

    def _start_packets(self) -> PacketWriter | None:
        """Packets of changes for inference servers, if the servers' configuration asks for them."""
        if self.rank != 0 or self._find_peers is None:
            return None
        if self._cluster is None and self._backend.local_store is None:
            return None
        packets = PacketWriter(
            self._find_peers,
            deadline_s=env.get_deadline_s(),
            step=lambda: self.step,
            num_trainers=self.world_size,
        )
        self._checkpoints.feed = packets
        self._resources.callback(self._close_packets, packets)
        packets.start()
        return packets

    def _close_packets(self, packets: PacketWriter) -> None:
        in_order = self._exit_deadline_s > FAILED_EXIT_DEADLINE_S
        try:
            if in_order:
                self._checkpoints.close(finish=True)  # a dump and a packet exclude one another
        finally:
            if self.step > 0:
                packets.offer_dense(self.step, dense.copied_state(self._require_model()))
            packets.close(None if in_order else self._exit_deadline_s)

    def _packet_counts(self) -> Mapping[str, float]:
        packets = getattr(self, "_packets", None)  # metrics are shown before everything has started
        return {} if packets is None or packets.log is None else dataclasses.asdict(packets.counts())

    def uneven_inputs(self) -> AbstractContextManager[object]:
        """A rank that has ended takes part in the others' collectives until all have ended."""
        if isinstance(self.model, DistributedDataParallel):
            scaler = [] if self._scaler is None else [self._scaler]
            return join_uneven(
                self.model,
                [self.dense_optimizer, *scaler],
                step_barrier=self._must_end_steps_together,
            )
        return contextlib.nullcontext()

    def _dump(
        self,
        dst_dir: str | os.PathLike[str],
        states: Mapping[str, dense.TorchState],
        jit_name: str | None,
        *,
        blocking: bool,
        step: int | None,
        keep_last: int | None,
        with_state: bool = True,
        in_place: bool = False,
    ) -> None:
        if self.rank == 0:
            super()._dump(
                dst_dir,
                states,
                jit_name,
                blocking=blocking,
                step=self.step if step is None else step,
                keep_last=keep_last,
                with_state=with_state,
                in_place=in_place,
            )

    def _load_embeddings(
        self, source: Source, *, blocking: bool, strict: bool, with_state: bool = True
    ) -> None:
        self.wait_for_gradients()
        config = self.embedding_optimizer.train_config(self.embedding_config)
        alone = self.world_size == 1
        load = functools.partial(
            self._checkpoints.load,
            source,
            train_config=config.encode(),
            strict=strict,
            fresh_state=not with_state,
            blocking=blocking and alone,
        )
        if alone:
            load()
        else:
            done_by_rank_0(self.rank, load, self.device)
        if blocking:
            self.wait_for_load_embedding()

    def _described_optimizer(self) -> dict[str, Any]:
        return described(self.embedding_optimizer)

    def _forward_model(self, model: torch.nn.Module) -> Callable[..., Any]:
        return self._precision.wrap(model, "cpu" if self.device is None else self.device.type)

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
        self.model, optimizer = option.convert2distributed_model(
            self.model, self.world_size, self.rank, self.device_id, master_addr, self.dense_optimizer
        )
        self.dense_optimizer = optimizer or self.dense_optimizer
        if not was_initialized:
            self._resources.callback(dist.destroy_process_group)

    @property
    def _batch_id(self) -> int:
        return NO_BATCH if self.current_batch is None else self.current_batch.traced_id

    def _check_not_given_up(self) -> None:
        if self.current_batch is not None:
            self.current_batch.check_not_given_up()

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
                left_scale = self._run_hook(batch, scale)
                gradients = leaf_gradients(batch.leaves)
                skipped = [name for name, gradient in gradients if gradient is None]
                self._warn_of_skipped_slots(batch.batch_id, skipped)
                self._returner.submit(batch.lease, gradients, scale=left_scale)
        self._forwarded = left
        return finite

    def _are_finite(self, batch: PersiaTrainingBatch) -> bool:
        # Only loss scaling needs to know; the servers skip and count slots that are not finite in any case.
        if self._scaler is None:
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

    def _step(self, embedding_gradients_finite: bool) -> None:
        if self._before_dense_step is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self.dense_optimizer)
            self._before_dense_step()
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

    @property
    def _must_end_steps_together(self) -> bool:
        synchronous = Consistency.SYNCHRONOUS
        return self._consistency is synchronous or synchronous.value in self.backend.slot_modes

    def _end_step_together(self) -> None:
        """Returns when the updates of this step are applied, those of the other ranks too."""
        self.wait_for_gradients()
        if self.world_size > 1:
            dist.barrier()

    def _warn_of_skipped_slots(self, batch_id: int, names: list[str]) -> None:
        new = set(names) - self._warned_slots
        if new:
            self._warned_slots |= new
            get_default_logger().warning(
                "the loss of batch %d does not depend on %s: these slots are not updated (counted in "
                "skipped_slots)",
                batch_id,
                sorted(new),
                extra={"batch_id": batch_id},
            )


def _check_optimizers(embedding_optimizer: object, dense_optimizer: object) -> None:
    if not isinstance(embedding_optimizer, Optimizer):
        raise InvalidTypeError(
            f"embedding_optimizer is {type(embedding_optimizer).__name__}: use one of persia.embedding.optim"
        )
    if not isinstance(dense_optimizer, torch.optim.Optimizer):
        raise InvalidTypeError(f"dense_optimizer is {type(dense_optimizer).__name__}: use one of torch.optim")


def _checked_gradient(name: str, gradient: object, leaf: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor) and gradient.shape == leaf.shape:
        return gradient
    what = list(gradient.shape) if isinstance(gradient, torch.Tensor) else type(gradient).__name__
    raise InvalidArgumentError(
        f"on_embedding_gradient returned {what} for slot {name}: return a tensor {list(leaf.shape)}, or None"
    )


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise InvalidArgumentError(f"{name} is {value}: it must be at least 1")
    return value
