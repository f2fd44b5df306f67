"""Contexts that look embeddings up: evaluation and inference here, training in `persia.ctx.train`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from persia import env
from persia.ctx.base import BaseCtx, PreprocessMode, check_exists, has_failed, is_stopped
from persia.ctx.checkpoints import CheckpointMethods
from persia.ctx.inputs import Inputs, arranged_inputs, as_arguments, input_names, is_of
from persia.current import current_context, own_context
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.data import PersiaBatch
from persia.errors import FailedPreconditionError, InvalidArgumentError, PersiaError
from persia.job.batch_pipeline import BatchPipeline
from persia.job.embedded import GlobalSource, SlotsSource, read_slots
from persia.job.runtime import JobRuntime
from persia.logger import get_default_logger
from persia.observability.phases import FORWARD, TO_DEVICE
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.counters import CounterValues, Staleness
from persia.storage import dense
from persia.storage.dense_slots import DenseSlots

# How long contexts that end because of an error try to leave nothing behind.
_FAILED_EXIT_DEADLINE_S = 10.0
# The same, for each part of the end, when the script is stopped: the servers are probably ending as well.
_STOPPED_EXIT_DEADLINE_S = 1.0
# Nearly always the first layer was made for other inputs, which torch cannot name.
_REMEDIES = {
    "mat1 and mat2 shapes cannot be multiplied": (
        "if its first layer reads them, its in_features must be the sum of their last dimensions"
    ),
    "mat1 and mat2 must have the same dtype": (
        "a layer of float32 needs float32: send dense features so, or convert them in `forward`"
    ),
}


def _shape_of(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


class EmbeddingCtx(CheckpointMethods, BaseCtx):
    """Looks embeddings up for evaluation or inference, which changes nothing on the servers.

    Args:
        preprocess_mode: EVAL, or INFERENCE to get no labels.
        model: called by `forward` with (dense tensors, embedding tensors).
        embedding_config: kept for scripts of the published system; only training configures servers.
        slots: the job's slots, as a file, its contents, or a `persia.config.SlotsConfig`; None: those of
            PERSIA_EMBEDDING_CONFIG. An embedded job is made of them; servers must have the same.
        global_config: settings of an embedded job, in the same forms; None: those of PERSIA_GLOBAL_CONFIG, or
            the defaults.
        backend: where embeddings are looked up; None: the current context's if there is one, else the job's
            servers; without PERSIA_NATS_URL, an embedding worker and a store in this process.
    """

    def __init__(
        self,
        preprocess_mode: PreprocessMode,
        model: torch.nn.Module | None = None,
        embedding_config: EmbeddingConfig | None = None,
        *args: Any,
        slots: SlotsSource | None = None,
        global_config: GlobalSource | None = None,
        backend: EmbeddingBackend | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.preprocess_mode = preprocess_mode
        self.model = model
        self.embedding_config = embedding_config or get_default_embedding_config()
        self.current_batch: PersiaTrainingBatch | None = None
        self.rank, self.world_size = env.get_rank() or 0, env.get_world_size() or 1
        given = None if slots is None else read_slots(slots)
        # Training on another thread is another job; an evaluation there belongs to the one that trains.
        find = own_context if preprocess_mode is PreprocessMode.TRAIN and backend is None else current_context
        shared = find(JobRuntime)
        # A backend of its own is another job: its dumps and loads must not reach the servers of the outer
        # one.
        if shared is not None and backend not in (None, shared.backend):
            shared = None
        # Closed in reverse order when the context ends: its batches, what follows them, the runtime.
        self._resources = contextlib.ExitStack()
        self._exit_deadline_s = _FAILED_EXIT_DEADLINE_S
        self._ends_in_order = False
        self.owns_runtime = shared is None
        self.runtime = (
            shared
            or (backend and JobRuntime(backend, given))
            or JobRuntime.open(given, global_config, self.rank, self.world_size)
        )
        self._slots = given or self.runtime.slots
        # The process group of ranks ends behind dumps and packets: a dead rank may block its end.
        self._after_runtime = self._resources.enter_context(contextlib.ExitStack())
        if self.owns_runtime:
            self._resources.callback(
                lambda: self.runtime.close(self._exit_deadline_s, in_order=self._ends_in_order)
            )
        # What must follow the last gradient and precede the end of the runtime, such as the last packet.
        self._after_batches = self._resources.enter_context(contextlib.ExitStack())
        self._pipeline = BatchPipeline(
            self.runtime, self.rank, self.world_size, self.device, nested=not self.owns_runtime
        )
        self._resources.callback(lambda: self._pipeline.close(self._exit_deadline_s))
        # `DataLoader` and contexts entered inside this one find them.
        self._members = (self.runtime, self._pipeline)
        with self._closed_on_error():
            self._dense_slots, outer = self._find_dense_slots(), self.runtime.dense_slots
            if self._dense_slots is None and outer is not None and (model is None or outer.is_part_of(model)):
                self._dense_slots = outer
            if self._dense_slots is not None:
                self._pipeline.dense_ids = self._dense_slots.reader
            self.runtime.dense_slots = self.runtime.dense_slots or self._dense_slots
            self._pipeline.show()

    @property
    def counters(self) -> CounterValues:
        """What became of this context's batches so far."""
        return self._pipeline.counters.snapshot()

    @property
    def staleness(self) -> Staleness:
        """How stale the embeddings of the batches trained so far were, as the servers measured it."""
        return self._pipeline.staleness()

    def prepare_features(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
        """(dense tensors, embeddings, labels or None for INFERENCE).

        Features are in the order of the batch that was trained first, and in the batch's own if none was.
        """
        self.current_batch = batch
        batch.look_up_synchronous()  # before anything is consumed: a script may try again
        with TO_DEVICE.of(batch.traced_id, batch.result.reference.reference):
            dense_tensors = batch.consume_all_non_id_type_feature_tensors()
            embeddings = batch.consume_all_id_type_feature_embedding_tensors()
        self._check_complete(batch)
        if batch.dense_ids:
            embeddings = self._require_dense_slots().fill(batch.names, batch.dense_ids, embeddings)
        if not batch.leaves:
            reached = batch.reached  # not the batch: it is released when the script drops it
            for embedding in embeddings:
                if embedding.requires_grad:
                    embedding.register_hook(lambda _: reached.set())  # type: ignore[no-untyped-call]
        dense_tensors, embeddings = self._arranged(batch, dense_tensors, embeddings)
        wants_labels = self.preprocess_mode is not PreprocessMode.INFERENCE
        return dense_tensors, embeddings, batch.consume_all_label_tensors() if wants_labels else None

    def _check_complete(self, batch: PersiaTrainingBatch) -> None:
        """FailedPreconditionError: a slot's rows are in a dense model that the context does not have.

        Without it the slot would be empty, which `torch.cat` leaves out, or what the servers have of it.
        """
        dense_slots = () if self._slots is None else self._slots.dense_slots
        looked_up = {name for name, _ in batch.leaves if name not in dense_slots}
        known = looked_up | batch.dense_ids.keys()
        missing = [name for name in batch.names if name not in known]
        if missing:
            raise FailedPreconditionError(
                f"the rows of {', '.join(missing)} are in the dense model, and the context has none with "
                "them: make it with model= and the model that was trained, or served"
            )

    def _require_dense_slots(self) -> DenseSlots:
        if self._dense_slots is None:
            raise FailedPreconditionError(
                "the rows of slots in the dense model are the model's: make the context with model="
            )
        return self._dense_slots

    def _arranged(
        self, batch: PersiaTrainingBatch, dense_tensors: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inputs in the order of training. An evaluation of another model has features of its own."""
        signature = self.runtime.signature
        if signature is None or not is_of(signature, batch):
            return dense_tensors, embeddings
        return arranged_inputs(signature, batch, dense_tensors, embeddings)

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """(the model's output, labels).

        The model is called with two lists, or with two dicts by name where its `forward` is annotated with
        dicts: `forward(self, dense: Dict[str, torch.Tensor], embeddings: Dict[str, torch.Tensor])`.
        """
        model = self._require_model()
        dense_tensors, embeddings, labels = self.prepare_features(batch)
        inputs = as_arguments(model, self.runtime.signature, batch, (dense_tensors, embeddings))
        try:
            with FORWARD.of(batch.traced_id):
                return self._run_model(model, *inputs), labels
        except RuntimeError as failure:
            remedy = next((_REMEDIES[text] for text in _REMEDIES if text in str(failure)), None)
            if remedy is None:
                raise
            ids, others = input_names(self.runtime.signature, batch)
            # Not strict: `prepare_features` may be the script's own, with other inputs.
            pairs = zip((*others, *ids), (*dense_tensors, *embeddings), strict=False)
            inputs_text = ", ".join(f"{name} {_shape_of(tensor)}" for name, tensor in pairs)
            raise InvalidArgumentError(
                f"{failure}: the inputs of the model are {inputs_text}; {remedy}"
            ) from failure

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """Looks one batch up, for the context's device if `device_id` is None, for the CPU if it is negative.

        The batch cannot be sent or looked up again. InvalidArgumentError: there is no such device.
        """
        device = self.device
        if device_id is not None and device_id < 0:
            device = None
        elif device_id is not None:
            check_exists(device_id)
            device = torch.device("cuda", device_id)
        return self._pipeline.look_up(persia_batch, device)

    def get_embedding_from_bytes(self, data: bytes, device_id: int | None = None) -> PersiaTrainingBatch:
        """Looks up a batch that `PersiaBatch.to_bytes` wrote."""
        return self.get_embedding_from_data(PersiaBatch.from_bytes(data), device_id)

    def get_embedding_size(self) -> list[int]:
        """Rows per embedding parameter server."""
        return self.runtime.backend.sizes()

    def clear_embeddings(self) -> None:
        """Removes all rows from all servers. Slots in the dense model keep theirs."""
        self._wait_for_exact_batches()
        self.runtime.backend.clear()

    def set_embedding(self, slot: str, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Writes pretrained rows: `rows` float32 [n, dim] for `ids` uint64 [n] of the slot named `slot`.

        Slots of one feature group share rows. Optimizer states begin anew; rows beyond the servers' capacity
        evict others. The servers must be configured: call it inside a TrainCtx. Raises InvalidArgumentError
        for another shape, or values that are not finite. Rows of a slot in the dense model are set on this
        rank alone: call it on all ranks.
        """
        self._slots = self._slots or read_slots(None)
        if self._slots is None:
            raise FailedPreconditionError(
                "set_embedding needs the job's slots: pass slots=... to the context, or set "
                "PERSIA_EMBEDDING_CONFIG"
            )
        if slot in self._slots.dense_slots:
            self._require_dense_slots().set_rows(self._slots, slot, ids, rows)
        else:
            self._wait_for_exact_batches()
            self.runtime.backend.set_slot_rows(self._slots, slot, ids, rows)

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Refused here: evaluation must not change what is being trained."""
        raise FailedPreconditionError("only a TrainCtx configures embedding parameter servers")

    def wait_servers_ready(self) -> None:
        """Returns once every embedding parameter server answers."""
        self.runtime.backend.sizes()

    def wait_for_gradients(self) -> None:
        """Returns once every gradient handed in so far is applied.

        A context entered inside this one begins with it: an evaluation sees all the training before it.
        """
        self._pipeline.wait_for_gradients()

    def __enter__(self) -> Self:
        outer = current_context(BatchPipeline)
        if outer is not None and outer.runtime is self.runtime:
            with self._closed_on_error():
                outer.wait_for_gradients()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_deadline_s, self._ends_in_order = _exit_deadline_s(error), error is None
        if self.owns_runtime and has_failed(error):
            self.runtime.fail(error)
        # It has a lease: the end of the batches would wait for an object that nothing will use again.
        self.current_batch = None
        try:
            self._resources.close()
        except PersiaError as failure:
            if error is None:
                raise
            # An error that a gradient thread has met may be what the script was given by `backward` already.
            if failure is not error:  # the script's own error is the one to show
                get_default_logger().error("while leaving after %s: %s", type(error).__name__, failure)
        finally:
            super().__exit__(kind, error, trace)

    def _run_model(self, model: torch.nn.Module, *inputs: Inputs) -> Any:
        # The DDP wrapper announces every forward to the other ranks, which are not evaluating.
        return dense.unwrap(model)(*inputs)

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Around what a constructor does once there is something to close."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._resources.close)
            yield
            on_error.pop_all()


def eval_ctx(*args: Any, **kwargs: Any) -> EmbeddingCtx:
    """`EmbeddingCtx(PreprocessMode.EVAL, ...)`; inside another context it shares that one's connection."""
    return EmbeddingCtx(PreprocessMode.EVAL, *args, **kwargs)


def _exit_deadline_s(error: BaseException | None) -> float:
    if error is None:
        return env.get_deadline_s()
    return _STOPPED_EXIT_DEADLINE_S if is_stopped(error) else _FAILED_EXIT_DEADLINE_S
