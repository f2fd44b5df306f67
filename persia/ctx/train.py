"""The training context: one rank of the job, from configured servers to the last acknowledged gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from persia.checkpoint.training_dump import TrainingDumps
from persia.ctx.base import PreprocessMode, checked_device, is_stopped
from persia.ctx.checkpoints import TrainingCheckpointMethods
from persia.ctx.embedding import EmbeddingCtx
from persia.ctx.inputs import Inputs, TrainedInputs, arranged_inputs
from persia.ctx.precision import MixedPrecision, Precision
from persia.ctx.ranks import join_process_group, join_uneven, meet
from persia.ctx.recovery import PeriodicCheckpoints, Recovery
from persia.distributed import DistributedBaseOption, get_default_distributed_option
from persia.embedding import EmbeddingConfig
from persia.embedding.checks import at_least, type_name
from persia.embedding.optim import Optimizer
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from persia.job.batch_pipeline import BatchPipeline
from persia.job.embedded import GlobalSource, SlotsSource
from persia.job.lost_rows import OnLostRows, RowsGuard
from persia.logger import get_default_logger, set_role
from persia.messaging.subjects import NN_WORKER
from persia.packets.writer import PacketWriter
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.gradients import BackwardPass, GradientHook
from persia.pipeline.staleness import Consistency
from persia.storage import dense


class TrainCtx(TrainingCheckpointMethods, EmbeddingCtx):
    """`with TrainCtx(...) as ctx:`, then `ctx.forward(batch)` and `ctx.backward(loss)` for every batch.

    On entering, the servers get the embedding optimizer and `embedding_config`. On leaving, the context waits
    until all gradients are applied, or raises an error that says how many were not. It also raises an error
    for a loop that called `forward` and never `backward`.

    Args:
        embedding_optimizer: updates the embedding rows, on the servers.
        dense_optimizer: steps the model's own parameters in `backward`.
        grad_scalar_update_factor: divides the loss scale after embedding gradients that were not finite.
            Ignored with several ranks: their common scale follows the dense gradients alone.
        backward_buffer_size: limit on batches with gradients that wait to be sent.
        backward_workers_size: number of threads that send gradients.
        grad_update_buffer_size: limit on batches with gradients that wait or are being sent.
        lookup_emb_directly: must be True: ranks send lookups to the embedding workers themselves.
        mixed_precision: True (CUDA only): scales the loss; the model does the autocasting.
            "fp16": scales the loss, and `forward` autocasts. "bf16": `forward` autocasts. None: True on
            CUDA, False on the CPU.
        distributed_option: how several ranks train together; None: DDP over nccl (CUDA) or gloo (CPU).
        model, embedding_config, threadpool_worker_size, device_id, slots, global_config, backend: as for
            `EmbeddingCtx`.
        consistency: "hybrid": lookups run ahead of updates by `embedding_staleness` batches; "synchronous":
            each step sees the updates of all ranks' steps before it; "exact", for one rank: lookups run
            ahead, and each step sees every update before it; "asynchronous": without a bound. Slots may have
            a mode of their own in the embedding config.
        before_dense_step: called with nothing when the dense gradients are complete, averaged over ranks
            and unscaled: the place to clip them.
        on_embedding_gradient: called for every slot of a batch with its name and gradient, unscaled float32
            [num_rows, dim]; what it returns is applied, or the gradient itself, changed in place, when it
            returns None.
        on_lost_rows: when a parameter server restarts without the rows that it held. "raise": the loop raises
            RowsLostError, and dumps are refused, until a checkpoint is loaded; "recover", for contexts with a
            `recovery`: also, the context ends the process with exit code 75, whatever the script catches, and
            the job continues after its newest checkpoint when it is started again; "continue": an error is
            logged, and lost rows begin anew.
        max_nonfinite_steps: a step whose dense gradients have NaN or Inf, on any rank, leaves the dense model
            as it is and is counted (`ctx.counters.nonfinite_steps`); so many in a row raise
            FailedPreconditionError. A scaled loss (fp16) has torch's own rule instead.
        recovery: takes periodic checkpoints, and loads the newest one when the job is started again.
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
        mixed_precision: MixedPrecision = None,
        distributed_option: DistributedBaseOption | None = None,
        model: torch.nn.Module | None = None,
        embedding_config: EmbeddingConfig | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        slots: SlotsSource | None = None,
        global_config: GlobalSource | None = None,
        backend: EmbeddingBackend | None = None,
        consistency: Consistency | str = Consistency.HYBRID,
        before_dense_step: Callable[[], object] | None = None,
        on_embedding_gradient: GradientHook | None = None,
        max_nonfinite_steps: int = 10,
        on_lost_rows: OnLostRows | str = OnLostRows.RAISE,
        recovery: Recovery | None = None,
    ) -> None:
        # Everything is checked before anything is started.
        _check_optimizers(embedding_optimizer, dense_optimizer)
        _check_settings(model, grad_scalar_update_factor, lookup_emb_directly, max_nonfinite_steps)
        sizes = _sender_sizes(backward_workers_size, backward_buffer_size, grad_update_buffer_size)
        self._consistency = Consistency.of(consistency)
        self._on_lost_rows = _lost_rows_rule(on_lost_rows, recovery)
        self._precision = Precision.of(mixed_precision, checked_device(device_id))
        self.embedding_optimizer, self.dense_optimizer = embedding_optimizer, dense_optimizer
        super().__init__(
            PreprocessMode.TRAIN,
            model,
            embedding_config,
            threadpool_worker_size,
            device_id,
            slots=slots,
            global_config=global_config,
            backend=backend,
        )
        self._in_backward = False
        self._inputs = TrainedInputs(self.world_size)
        self.step = 0  # batches that this rank has trained, and those before the checkpoint that it loaded
        self._dump_requests = TrainingDumps(self.dump_checkpoint)
        self.recovery = recovery
        self._periodic = None if recovery is None else PeriodicCheckpoints(self, recovery)
        self._packets: PacketWriter | None = None  # written by the context that owns the runtime
        set_role(NN_WORKER, self.rank)
        with self._closed_on_error():
            self._join_ranks(distributed_option)
            # After the process group: the sender's threads would outlive one that cannot be joined.
            sender = self._pipeline.train(self._consistency, self._uneven_inputs, lambda: self.step, **sizes)
            # Only float16 needs it: bfloat16 has the exponents of float32, and nothing underflows.
            scaler = torch.amp.GradScaler(self._device_type) if self._precision.scaled else None
            rules = scaler, grad_scalar_update_factor, self.world_size, max_nonfinite_steps
            self._backward = BackwardPass(sender, *rules, before_dense_step, on_embedding_gradient)

    def _join_ranks(self, option: DistributedBaseOption | None) -> None:
        """Tells loaders and ranks of this one, and starts what rank 0 does for all."""
        if self.world_size > 1:
            self.model, self.dense_optimizer = join_process_group(
                option or get_default_distributed_option(self.device_id),
                self.runtime,
                (self.rank, self.world_size, self.device_id),
                self._require_model(),
                self.dense_optimizer,
                self._after_runtime,
            )
        else:
            self.runtime.advertise(self.rank, self.world_size)
        if self.rank == 0 and self.owns_runtime:
            # One writer for the job: rank 0 coordinates dumps too, and packets pause for these.
            self._packets = self.runtime.start_packets(lambda: self.step, self.world_size)
            self._after_batches.callback(self._offer_dense)  # for the last packet

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.runtime.backend.configure(self.embedding_optimizer.train_config(self.embedding_config))
            self._follow(self.embedding_optimizer)
            connection = self.runtime.connection
            if self.owns_runtime and connection is not None and self.runtime.backend.local_store is None:
                fail = self._pipeline.fail
                self._rows_guard = RowsGuard(connection.directory, self._on_lost_rows, fail)
                self._pipeline.check_rows = self._rows_guard.raise_known
                self._resources.callback(self._rows_guard.close)
            self._resources.callback(self.dense_optimizer.register_step_pre_hook(self._check_step).remove)
            if self.rank == 0 and self.owns_runtime and connection is not None:
                # From here on there is something to dump, on servers that know their optimizer.
                session = connection.session
                answers = session.respond(session.subjects.training_dump, self._dump_requests.handle)
                self._resources.callback(answers.close)
            if self._periodic is not None:
                self._periodic.begin()
        except BaseException as failure:
            self.__exit__(type(failure), failure, failure.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mistake = None
        if error is None and not self._backward.has_run:
            mistake = _untrained(self._pipeline, self._backward.has_forwarded_of_loop)
        if mistake is not None:
            kind, error = type(mistake), mistake
        try:
            super().__exit__(kind, error, trace)
        finally:
            if self._rows_guard is not None and self.recovery is not None and not is_stopped(error):
                self._rows_guard.roll_back(self.recovery.directory)
        if mistake is not None:
            raise mistake

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Replaces the embedding config of all servers during training."""
        self.embedding_config = embedding_config
        config = self.embedding_optimizer.train_config(embedding_config)
        self.runtime.backend.configure(config, replace=True)
        # The published way to give the initial values: inside the context, before the first batch.
        if self._dense_slots is not None and self._dense_slots.is_initial and self.step == 0:
            self._begin_rows(self._dense_slots)

    def register_embedding_optimizer(self, embedding_optimizer: Optimizer) -> None:
        """Replaces the embedding optimizer of all servers during training."""
        config = embedding_optimizer.train_config(self.embedding_config)
        # Without `replace` servers refuse another config than the one that they have.
        self.runtime.backend.configure(config, replace=True)
        self.embedding_optimizer.unsubscribe(self.register_embedding_optimizer)
        self.embedding_optimizer = embedding_optimizer
        self._follow(embedding_optimizer)

    def _follow(self, optimizer: Optimizer) -> None:
        # Every rank steps its schedule, and not at the same moment: the first one's rate is the servers'.
        if self.rank == 0:
            optimizer.subscribe(self.register_embedding_optimizer)
            self._resources.callback(optimizer.unsubscribe, self.register_embedding_optimizer)

    def prepare_features(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
        if self._periodic is not None:
            self._periodic.before_batch()
        prepared = super().prepare_features(batch)
        self._backward.forwarded(batch)
        return prepared

    def _arranged(
        self, batch: PersiaTrainingBatch, dense_tensors: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inputs in the order of the first batch. InvalidArgumentError: other features than its."""
        self.runtime.signature = self._inputs.signature(self.runtime.signature, batch, embeddings)
        return arranged_inputs(self.runtime.signature, batch, dense_tensors, embeddings)

    def _check_step(self, *_step: object) -> None:
        """Refuses a step of the script's own after `loss.backward()`: nothing would send the embeddings'
        gradients to the servers."""
        batch = self.current_batch
        if self._in_backward or batch is None or batch.lease is None or batch.lease.acquired:
            return
        if any(leaf.grad is not None for _, leaf in batch.leaves):
            raise FailedPreconditionError(
                f"the embeddings of batch {batch.batch_id} got gradients by loss.backward(), which trains "
                "the dense model alone: call ctx.backward(loss), which applies them and steps both optimizers"
            )

    def backward(self, loss: torch.Tensor, embedding_gradient_check_frequency: int = 20) -> torch.Tensor:
        """Computes gradients, hands in the embeddings', steps the dense optimizer. Returns the scaled loss.

        The loss may depend on several forwarded batches, as long as the script holds on to them. Waits while
        the gradient buffers are full, and raises the first error that gradient return has met. Embedding
        gradients are checked for NaN and Inf at every batch, whatever `embedding_gradient_check_frequency`
        says.
        """
        batch = self.current_batch
        # Batches without gradients between others are frozen on purpose. Where there are no others, the
        # loader was meant to make them for training.
        if batch is not None and batch.lease is None and not self._backward.has_forwarded:
            raise FailedPreconditionError(
                f"batch {batch.batch_id} was made with requires_grad=False, so its embeddings get no "
                "gradients: make it with PersiaBatch(..., requires_grad=True); to evaluate it leave backward "
                "out, and to train the dense model alone call loss.backward() and step its optimizer"
            )
        self._in_backward = True
        try:
            scaled_loss = self._backward.run(loss, batch, self.dense_optimizer)
        finally:
            self._in_backward = False
        self.step += 1
        # The state is copied on this thread, between two steps: another thread would copy half of a step.
        if self._packets is not None and self._packets.wants_dense:
            self._offer_dense()
        if self._must_end_steps_together:
            # Returns when the updates of this step are applied, those of the other ranks too.
            self.wait_for_gradients()
            meet(self.world_size)
        # Between two optimizer steps, where all ranks hold the same dense model. Inside `accumulate` there
        # are gradients that no checkpoint would have.
        if not self._backward.accumulating:
            if self._periodic is not None:
                self._periodic.stepped(data_resumes=self._pipeline.data_resumes)
            if self._dump_requests.is_wanted:
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
        model, backward = self.model, self._backward
        with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            # Blocks may be nested: the inner one must not end the accumulation of the outer one.
            was, backward.accumulating = backward.accumulating, True
            try:
                yield
            finally:
                backward.accumulating = was

    def _offer_dense(self) -> None:
        if self._packets is not None and self.step > 0:
            state = dense.copied_state(self._require_model())
            self._packets.offer_dense(self.step, state, self.runtime.signature)

    @property
    def _device_type(self) -> str:
        return "cpu" if self.device is None else self.device.type

    def _run_model(self, model: torch.nn.Module, *inputs: Inputs) -> Any:
        return self._precision.wrap(model, self._device_type)(*inputs)

    def _uneven_inputs(self) -> AbstractContextManager[object]:
        """A rank that runs out of data keeps joining collectives until every rank is done."""
        if not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        scaler = [] if self._backward.scaler is None else [self._backward.scaler]
        step_barrier = self._must_end_steps_together
        return join_uneven(self.model, [self.dense_optimizer, *scaler], step_barrier=step_barrier)

    @property
    def _must_end_steps_together(self) -> bool:
        modes = self._pipeline.consistency.value, *self.runtime.backend.slot_modes
        return Consistency.SYNCHRONOUS.value in modes


def _untrained(pipeline: BatchPipeline, has_forwarded: bool) -> FailedPreconditionError | None:
    """The error of a context that has forwarded batches of its loops, and trained none.

    Batches that the script looks up itself do not count: it may only look at them, as handlers of requests in
    the published system do. Nor do those that have failed, which was told. A loop without a forward is only
    warned of: a job that has ended and is started again leaves it at the first batch.
    """
    counts = pipeline.counters.snapshot()
    num_batches = counts.batches_received - pipeline.num_looked_up - counts.batches_failed
    if num_batches <= 0:
        return None
    remedy = (
        f"none of the {num_batches} batches that this context received was trained: call ctx.backward(loss) "
        "for each; evaluate in eval_ctx(), or with requires_grad=False"
    )
    if has_forwarded:
        return FailedPreconditionError(remedy)
    if not counts.batches_evaluated:
        get_default_logger().warning(remedy)
    return None


def _check_optimizers(embedding_optimizer: object, dense_optimizer: object) -> None:
    if not isinstance(embedding_optimizer, Optimizer):
        raise InvalidTypeError(
            f"embedding_optimizer is {type_name(embedding_optimizer)}: use one of persia.embedding.optim, "
            "such as Adagrad(lr=0.1)"
        )
    if not isinstance(dense_optimizer, torch.optim.Optimizer):
        raise InvalidTypeError(f"dense_optimizer is {type_name(dense_optimizer)}: use one of torch.optim")


def _lost_rows_rule(value: OnLostRows | str, recovery: Recovery | None) -> OnLostRows:
    rule = OnLostRows.of(value)
    if rule is OnLostRows.RECOVER and recovery is None:
        raise InvalidArgumentError(
            'on_lost_rows="recover" needs a checkpoint to return to: pass recovery=Recovery(directory), too'
        )
    return rule


def _sender_sizes(num_workers: int, queue_capacity: int, max_unacknowledged: int) -> dict[str, int]:
    return {
        "num_workers": at_least(1, "backward_workers_size", num_workers),
        "queue_capacity": at_least(1, "backward_buffer_size", queue_capacity),
        "max_unacknowledged": at_least(1, "grad_update_buffer_size", max_unacknowledged),
    }


def _check_settings(
    model: object, grad_scalar_update_factor: float, lookup_emb_directly: bool, max_nonfinite_steps: int
) -> None:
    at_least(1, "max_nonfinite_steps", max_nonfinite_steps)
    if model is None:
        raise InvalidArgumentError("model not found, please init context with model")
    if grad_scalar_update_factor <= 0:
        raise InvalidArgumentError(
            f"grad_scalar_update_factor is {grad_scalar_update_factor}: it must be greater than 0"
        )
    if not lookup_emb_directly:
        raise InvalidArgumentError("lookup_emb_directly=False is not available: leave it True")
