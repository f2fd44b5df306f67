"""Contexts that look embeddings up: evaluation and inference here, training in `persia.ctx.train`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from persia import env
from persia.ctx import dense_checkpoint
from persia.ctx.base import BaseCtx, PreprocessMode, Terminated, cnt_ctx
from persia.data.cluster import Cluster, ClusterBackend
from persia.data.host import LoaderHost
from persia.data.prefetch import LookupService, Prefetcher
from persia.data.source import batch_reference, pending_from
from persia.data.stream import StreamReceiver
from persia.data.training_batch import PersiaTrainingBatch
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.backend import EmbeddingBackend
from persia.embedding.counters import Counters, CounterValues, Staleness
from persia.embedding.data import PersiaBatch
from persia.embedding.lease import BatchLease, Releaser
from persia.errors import FailedPreconditionError, InvalidArgumentError, PersiaError
from persia.logger import get_default_logger
from persia.messaging.payloads import BatchAnnouncement
from persia.messaging.subjects import NN_WORKER

__all__ = ["EmbeddingCtx", "eval_ctx"]

# How long contexts that end because of an error try to leave nothing behind.
FAILED_EXIT_DEADLINE_S = 10.0
# The same, for each part of the end, when somebody stops the script: the servers are probably ending as well.
STOPPED_EXIT_DEADLINE_S = 1.0


class EmbeddingCtx(BaseCtx, LoaderHost):
    """Looks embeddings up for evaluation or inference. Changes nothing on the servers.

    Args:
        preprocess_mode: EVAL, or INFERENCE to get no labels.
        model: called by `forward` with (dense tensors, embedding tensors).
        embedding_config: kept for scripts of the published system; only training configures servers.
        backend: where embeddings come from; None: the current context's if there is one, else the job's
            servers.
    """

    def __init__(
        self,
        preprocess_mode: PreprocessMode,
        model: torch.nn.Module | None = None,
        embedding_config: EmbeddingConfig | None = None,
        *args: Any,
        backend: EmbeddingBackend | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.preprocess_mode = preprocess_mode
        self.model = model
        self.embedding_config = embedding_config or get_default_embedding_config()
        self.current_batch: PersiaTrainingBatch | None = None
        self.rank, self.world_size = env.get_rank() or 0, env.get_world_size() or 1
        self._counters = Counters()
        self._prefetchers: list[Prefetcher] = []
        self._stream_opened = False
        self._exit_deadline_s = FAILED_EXIT_DEADLINE_S
        self._resources = contextlib.ExitStack()  # closed in reverse order when the context ends
        self._cluster: Cluster | None = None
        self._announced = False
        self._check_arguments()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._resources.close)
            self._backend = backend or self._shared_backend() or self._connect()
            self._releaser = Releaser(self._backend, self._counters)
            self._resources.callback(lambda: self._releaser.close(self._exit_deadline_s))
            self._start()
            # Last, so that it is closed first: it still uses everything else.
            self._resources.callback(self._close_prefetchers)
            on_error.pop_all()

    # What data loaders need of their context.

    @property
    def backend(self) -> EmbeddingBackend:
        return self._backend

    @property
    def releaser(self) -> Releaser:
        return self._releaser

    @property
    def lookup_counters(self) -> Counters:
        return self._counters

    @property
    def training(self) -> bool:
        return self.preprocess_mode is PreprocessMode.TRAIN

    def open_stream(self, buffer_size: int, *, ordered: bool) -> StreamReceiver:
        if self._stream_opened:
            raise FailedPreconditionError(
                "this context receives the loaders' stream already: use one DataLoader for it"
            )
        cluster = self._require_cluster()
        self._stream_opened = True
        self._announce()
        return StreamReceiver(
            cluster,
            rank=self.rank,
            world_size=self.world_size,
            buffer_size=buffer_size,
            ordered=ordered,
            on_received=lambda: self._counters.add(batches_received=1),
            on_superseded=self._release_superseded,
        )

    def attach(self, prefetcher: Prefetcher) -> None:
        self._prefetchers.append(prefetcher)

    def detach(self, prefetcher: Prefetcher) -> None:
        if prefetcher in self._prefetchers:  # else the context has ended before the loop over it
            self._prefetchers.remove(prefetcher)

    def uneven_inputs(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    # What scripts use.

    @property
    def counters(self) -> CounterValues:
        """What became of this context's batches so far."""
        return self._counters.snapshot()

    @property
    def staleness(self) -> Staleness:
        """How stale the embeddings of the batches trained so far were, as the servers measured it."""
        return self._counters.staleness()

    def prepare_features(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
        """(dense tensors, embeddings in the order of the batch's features, labels or None for INFERENCE)."""
        self.current_batch = batch
        dense = batch.consume_all_non_id_type_feature_tensors()
        embeddings = batch.consume_all_id_type_feature_embedding_tensors()
        labels = (
            None if self.preprocess_mode is PreprocessMode.INFERENCE else batch.consume_all_label_tensors()
        )
        return dense, embeddings, labels

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """(the model's output, labels)."""
        if self.model is None:
            raise FailedPreconditionError("model not found, please init context with model")
        dense, embeddings, labels = self.prepare_features(batch)
        return self._forward_model(self.model)(dense, embeddings), labels

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """Looks one batch up. It cannot be sent or looked up again."""
        self._counters.add(batches_received=1)
        service = LookupService(
            self.backend, self.releaser, self._counters, self._device_or(device_id), self.training
        )
        return service.look_up(pending_from(persia_batch, 0), lambda: None)

    def get_embedding_from_bytes(self, data: bytes, device_id: int | None = None) -> PersiaTrainingBatch:
        """Looks up a batch that `PersiaBatch.to_bytes` wrote."""
        return self.get_embedding_from_data(PersiaBatch.from_bytes(data), device_id)

    def get_embedding_size(self) -> list[int]:
        """Rows per embedding parameter server."""
        return self.backend.sizes()

    def clear_embeddings(self) -> None:
        """Removes all rows from all servers."""
        self.backend.clear()

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Refused here: evaluation must not change what is being trained."""
        raise FailedPreconditionError("only a TrainCtx configures embedding parameter servers")

    def wait_servers_ready(self) -> None:
        """Returns once every embedding parameter server answers."""
        self.backend.sizes()

    def wait_for_gradients(self) -> None:
        """Returns once every gradient handed in so far is applied.

        A context entered inside this one begins with it: an evaluation sees all the training before it.
        """

    def dump_checkpoint(
        self,
        dst_dir: str | os.PathLike[str],
        dense_filename: str = "dense.pt",
        jit_dense_filename: str = "jit_dense.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Writes the dense model into `dst_dir`, replacing what is there; `blocking` is for embeddings.

        The TorchScript model comes last: one that cannot be scripted (InvalidArgumentError) costs nothing
        else.
        """
        directory = dense_checkpoint.local_path(dst_dir)
        if self.model is None:
            raise FailedPreconditionError("model not found, please init context with model")
        dense_checkpoint.dump_state_dict(self.model, directory / dense_filename)
        _warn_that_embeddings_are_missing()
        if with_jit_model:
            dense_checkpoint.dump_torchscript(self.model, directory / jit_dense_filename)

    def load_checkpoint(
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
    ) -> None:
        """Loads the dense model from `src_dir`; NotFoundError when it is not there."""
        if self.model is None:
            raise FailedPreconditionError("model not found, please init context with model")
        directory = dense_checkpoint.local_path(src_dir)
        dense_checkpoint.load_state_dict(self.model, directory / dense_filename, map_location or self.device)

    def dump_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        dst_dir: str | os.PathLike[str],
        file_name: str,
        is_jit: bool = False,
    ) -> None:
        """Writes a model's or an optimizer's state, or a model as TorchScript, to `dst_dir/file_name`."""
        path = dense_checkpoint.local_path(dst_dir) / file_name
        if not is_jit:
            dense_checkpoint.dump_state_dict(torch_instance, path)
        elif isinstance(torch_instance, torch.nn.Module):
            dense_checkpoint.dump_torchscript(torch_instance, path)
        else:
            raise InvalidArgumentError("is_jit is for models: an optimizer has no TorchScript")

    def load_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
    ) -> None:
        """Reads what `dump_torch_state_dict` wrote; `src_dir` is the path of the file, as published."""
        dense_checkpoint.load_state_dict(torch_instance, dense_checkpoint.local_path(src_dir), map_location)

    def __enter__(self) -> Self:
        outer = cnt_ctx()
        if isinstance(outer, EmbeddingCtx):
            outer.wait_for_gradients()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_deadline_s = _exit_deadline_s(error)
        try:
            self._resources.close()
        except PersiaError as failure:
            if error is None:
                raise
            if failure is not error:  # the script's own error is the one to show
                get_default_logger().error("while leaving after %s: %s", type(error).__name__, failure)
        finally:
            super().__exit__(kind, error, trace)

    # Parts that training does differently, and private ones.

    def _forward_model(self, model: torch.nn.Module) -> Callable[..., Any]:
        # The DDP wrapper announces every forward to the other ranks, which are not evaluating.
        return dense_checkpoint.unwrap(model)

    def _close_prefetchers(self) -> None:
        while self._prefetchers:
            self._prefetchers.pop().close(min(self._exit_deadline_s, FAILED_EXIT_DEADLINE_S))
        self.current_batch = None

    def _fail(self, failure: PersiaError) -> None:
        """Called on a background thread when training cannot go on: wakes the loop."""
        for prefetcher in list(self._prefetchers):
            prefetcher.fail(failure)

    def _shared_backend(self) -> EmbeddingBackend | None:
        outer = cnt_ctx()
        return outer.backend if isinstance(outer, EmbeddingCtx) else None

    def _connect(self) -> EmbeddingBackend:
        self._cluster = Cluster.connect(f"nn-worker-{self.rank}")
        self._resources.callback(self._cluster.close)
        backend = ClusterBackend(self._cluster)
        self._resources.callback(backend.close)
        return backend

    def _check_arguments(self) -> None:
        """Raises before anything is started."""

    def _start(self) -> None:
        """For contexts that need more, once the backend is there."""

    def _announce(self, address: str = "") -> None:
        """Tells loaders and the other ranks that this NN worker is there; once."""
        if not self._announced and self._cluster is not None:
            self._cluster.announce(NN_WORKER, self.rank, self.world_size, address=address)
            self._announced = True

    def _require_cluster(self) -> Cluster:
        if self._cluster is None:
            raise FailedPreconditionError(
                "this context has no connection of its own to the data loaders: stream in the TrainCtx"
            )
        return self._cluster

    def _release_superseded(self, announcement: BatchAnnouncement) -> None:
        # Its first registration is the one being trained; this one was never counted as received.
        self._counters.add(batches_received=1)
        self._releaser.abandon(BatchLease(announcement.batch_id, batch_reference(announcement), lambda: None))

    def _device_or(self, device_id: int | None) -> torch.device | None:
        return self.device if device_id is None else torch.device("cuda", device_id)


def eval_ctx(*args: Any, **kwargs: Any) -> EmbeddingCtx:
    """`EmbeddingCtx(PreprocessMode.EVAL, ...)`; inside another context it shares that one's connection."""
    return EmbeddingCtx(PreprocessMode.EVAL, *args, **kwargs)


_warned = False


def _exit_deadline_s(error: BaseException | None) -> float:
    if error is None:
        return env.get_deadline_s()
    is_stopped = isinstance(error, (Terminated, KeyboardInterrupt))
    return STOPPED_EXIT_DEADLINE_S if is_stopped else FAILED_EXIT_DEADLINE_S


def _warn_that_embeddings_are_missing() -> None:
    global _warned
    if not _warned:
        _warned = True
        get_default_logger().warning(
            "checkpoints hold the dense part only: embeddings are not part of it in this version"
        )
