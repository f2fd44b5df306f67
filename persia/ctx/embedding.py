"""Contexts that look embeddings up: evaluation and inference here, training in `persia.ctx.train`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from persia import env
from persia._native import TierOptions
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import LocalPeer, Peer, find_servers
from persia.checkpoint.server_job import ServerShare, dump_percent
from persia.checkpoint.service import CheckpointService
from persia.config import GlobalConfig, SlotsConfig
from persia.ctx.base import BaseCtx, PreprocessMode, Terminated
from persia.current import current_context, own_context
from persia.data.host import LoaderHost
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.data import PersiaBatch
from persia.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, PersiaError
from persia.job.connection import ClusterBackend, JobConnection
from persia.job.embedded import (
    EmbeddedJob,
    GlobalSource,
    SlotsSource,
    read_global,
    read_slots,
    start_embedded_job,
)
from persia.logger import get_default_logger
from persia.messaging.subjects import NN_WORKER
from persia.observability.phases import FORWARD, TO_DEVICE
from persia.observability.sources import NnWorkerSource
from persia.packets.changes import IncrementalSettings, ServerChanges
from persia.pipeline.backend import EmbeddingBackend, slot_signs
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.counters import Counters, CounterValues, Staleness
from persia.pipeline.lease import BatchLease, LeaseReaper
from persia.pipeline.lookup import LookupService, first_slots, slots_in_step
from persia.pipeline.prefetch import Prefetcher
from persia.pipeline.receive import LOADER_REMEDY, StreamReceiver
from persia.pipeline.source import PendingBatch, pending_from
from persia.pipeline.staleness import mode_names
from persia.storage import dense
from persia.storage.location import Location
from persia.storage.schema import RowSchema
from persia.tiers.server_tier import ServerTier

__all__ = ["EmbeddingCtx", "eval_ctx"]

_ROWS_AT_A_TIME = 65_536  # bounds a message of set_embedding

# How long contexts that end because of an error try to leave nothing behind.
FAILED_EXIT_DEADLINE_S = 10.0
# The same, for each part of the end, when somebody stops the script: the servers are probably ending as well.
STOPPED_EXIT_DEADLINE_S = 1.0


class EmbeddingCtx(BaseCtx, LoaderHost):
    """Looks embeddings up for evaluation or inference, which changes nothing on the servers.

    Args:
        preprocess_mode: EVAL, or INFERENCE to get no labels.
        model: called by `forward` with (dense tensors, embedding tensors).
        embedding_config: kept for scripts of the published system; only training configures servers.
        slots: the job's slots, as a file, its contents, or a `persia.config.SlotsConfig`; None: those of
            PERSIA_EMBEDDING_CONFIG. An embedded job is made of them; servers must have the same.
        global_config: settings of an embedded job, in the same forms; None: those of PERSIA_GLOBAL_CONFIG, or
            the defaults.
        backend: where embeddings come from; None: the current context's if there is one, else the job's
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
        self._counters = Counters()
        self._prefetchers: list[Prefetcher] = []
        self._stream_opened = False
        self._exit_deadline_s = FAILED_EXIT_DEADLINE_S
        self._resources = contextlib.ExitStack()  # closed in reverse order when the context ends
        self._cluster: JobConnection | None = None
        self._embedded_job: EmbeddedJob | None = None
        self._pool: ServerTier | None = None  # of an embedded job whose rows are not in memory alone
        self._announced = False
        self._find_peers: Callable[[], list[Peer]] | None = None  # of checkpoints that are not shared
        self._global_config = global_config
        self._check_arguments()
        self._slots = None if slots is None else read_slots(slots)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._resources.close)
            self._backend = backend or self._shared_backend() or self._connect()
            self._releaser = LeaseReaper(self._backend, self._counters)
            self._resources.callback(lambda: self._releaser.close(self._exit_deadline_s))
            self._checkpoints = self._shared_checkpoints() or self._make_checkpoints()
            self._start()
            # Last, so that it is closed first: it still uses everything else.
            self._resources.callback(self._close_prefetchers)
            on_error.pop_all()

    # What data loaders need of their context.

    @property
    def backend(self) -> EmbeddingBackend:
        return self._backend

    @property
    def releaser(self) -> LeaseReaper:
        return self._releaser

    @property
    def lookup_counters(self) -> Counters:
        return self._counters

    @property
    def training(self) -> bool:
        return self.preprocess_mode is PreprocessMode.TRAIN

    @property
    def embedded_job(self) -> EmbeddedJob | None:
        return self._embedded_job

    def open_stream(self, buffer_size: int, *, ordered: bool) -> StreamReceiver:
        if self._stream_opened:
            raise FailedPreconditionError(
                "this context receives the loaders' stream already: use one DataLoader for it"
            )
        cluster = self._require_cluster()
        self._stream_opened = True
        self._announce()
        return StreamReceiver(
            cluster.session,
            cluster.directory,
            rank=self.rank,
            world_size=self.world_size,
            buffer_size=buffer_size,
            ordered=ordered,
            remedy=LOADER_REMEDY if self._embedded_job is None else self._embedded_job.loader_remedy,
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
        return self._counters.staleness(partial(mode_names, self.consistency, self.backend.slot_modes))

    def prepare_features(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
        """(dense tensors, embeddings in the order of the batch's features, labels or None for INFERENCE)."""
        self.current_batch = batch
        batch.look_up_synchronous()  # before anything is consumed: a script may try again
        with TO_DEVICE.of(batch.traced_id, batch.result.reference.reference):
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
        with FORWARD.of(batch.traced_id):
            return self._forward_model(self.model)(dense, embeddings), labels

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """Looks one batch up. It cannot be sent or looked up again."""
        self._counters.add(batches_received=1)
        stages = self.lookup_stages(None)
        service = LookupService(
            self.backend,
            self.releaser,
            self._counters,
            self._device_or(device_id),
            self.training,
            first_slots(stages, ahead=False),
            slots_in_step(stages),
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

    def set_embedding(self, slot: str, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Writes pretrained rows: `rows` float32 [n, dim] for `ids` uint64 [n] of the slot named `slot`.

        Slots of one feature group share rows. Optimizer states begin anew; rows beyond the servers' capacity
        evict others. The servers must be configured: call it inside a TrainCtx. Raises InvalidArgumentError
        for another shape, or values that are not finite.
        """
        self._slots = self._slots or read_slots(None)
        if self._slots is None:
            raise FailedPreconditionError(
                "set_embedding needs the job's slots: pass slots=... to the context, or set "
                "PERSIA_EMBEDDING_CONFIG"
            )
        signs = slot_signs(self._slots, slot, ids)
        dim = self._slots.slots_config[slot].dim
        if not isinstance(rows, np.ndarray) or rows.shape != (len(ids), dim):
            what = list(rows.shape) if isinstance(rows, np.ndarray) else type(rows).__name__
            raise InvalidArgumentError(f"rows of slot {slot} are {what}: pass float32 [{len(ids)}, {dim}]")
        values = np.ascontiguousarray(rows, np.float32)
        for begin in range(0, len(signs), _ROWS_AT_A_TIME):
            part = slice(begin, begin + _ROWS_AT_A_TIME)
            self.backend.set_embeddings(signs[part], values[part])

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
        *,
        step: int | None = None,
        keep_last: int | None = None,
        in_place: bool = False,
    ) -> None:
        """Writes the dense model and all embeddings to `dst_dir`: a directory, or a URL that fsspec knows.

        What was there stays readable until the new checkpoint is complete, and then goes. `blocking=False`
        returns once every server has taken a snapshot, and `wait_for_dump_embedding` raises what fails later.
        `keep_last=N` makes `dst_dir` a directory of checkpoints, named by `step`, of which N are kept.
        `in_place=True` is for servers with pools (docs/tiers.md): rows stay there, and `dst_dir` gets the
        dense model and what ties it to them. Servers go back to these rows; only they can load it.
        A model that TorchScript cannot compile (InvalidArgumentError) costs nothing but its TorchScript.
        """
        states = {dense_filename: self._require_model()}
        jit_name = jit_dense_filename if with_jit_model else None
        self._dump(
            dst_dir, states, jit_name, blocking=blocking, step=step, keep_last=keep_last, in_place=in_place
        )

    def load_checkpoint(
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
        *,
        strict: bool = True,
    ) -> None:
        """Loads the dense model and all embeddings from `src_dir`, or from the newest checkpoint in it.

        Everything is checked before anything is replaced; NotFoundError, CorruptionError name the file.
        `blocking=False` returns once it is checked, and the dense model replaced; servers replace their rows
        meanwhile, and `wait_for_load_embedding` raises what fails then.
        `strict=False` accepts that slots were added or removed since.
        """
        states = {dense_filename: self._require_model()}
        self._load(src_dir, states, map_location, blocking=blocking, strict=strict)

    def dump_embedding(
        self,
        dst_dir: str | os.PathLike[str],
        blocking: bool = True,
        *,
        step: int | None = None,
        keep_last: int | None = None,
        with_state: bool = True,
        in_place: bool = False,
    ) -> None:
        """As `dump_checkpoint`, embeddings only; a dense model that is in `dst_dir` stays.

        `with_state=False` leaves the optimizer's state out: smaller, and enough for whoever serves the rows.
        """
        self._dump(
            dst_dir,
            {},
            None,
            blocking=blocking,
            step=step,
            keep_last=keep_last,
            with_state=with_state,
            in_place=in_place,
        )

    def load_embedding(
        self,
        src_dir: str | os.PathLike[str],
        blocking: bool = True,
        *,
        strict: bool = True,
        with_state: bool = True,
    ) -> None:
        """Replaces all embeddings by those of `src_dir`. NotFoundError: it has none.

        `with_state=False` begins with the optimizer's state of new rows: for rows that were dumped without,
        or trained with another kind of optimizer.
        """
        source = Source(src_dir)
        if not source.has_embeddings:
            raise NotFoundError(f"{source.location} has no embeddings: check the path")
        self._load_embeddings(source, blocking=blocking, strict=strict, with_state=with_state)

    def wait_for_dump_embedding(self) -> None:
        """Until the last dump is complete; raises what has failed behind training's back."""
        self._checkpoints.wait_for_dump()

    def wait_for_load_embedding(self) -> None:
        """Until the last load is complete; raises what has failed meanwhile."""
        self._checkpoints.wait_for_load()

    def dump_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        dst_dir: str | os.PathLike[str],
        file_name: str,
        is_jit: bool = False,
    ) -> None:
        """Writes a model's or an optimizer's state, or a model as TorchScript, to `dst_dir/file_name`."""
        if not is_jit:
            content = dense.state_bytes(torch_instance)
        elif isinstance(torch_instance, torch.nn.Module):
            content = dense.torchscript_bytes(torch_instance, file_name)
        else:
            raise InvalidArgumentError("is_jit is for models: an optimizer has no TorchScript")
        (Location.of(dst_dir) / file_name).replace(content)

    def load_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
    ) -> None:
        """Reads what `dump_torch_state_dict` wrote; `src_dir` is the path of the file, as published."""
        file = Location.of(src_dir)
        content = Source(file.parent).dense(file.name)
        dense.load_state(torch_instance, content, str(file), map_location)

    def __enter__(self) -> Self:
        outer: EmbeddingCtx | None = current_context(EmbeddingCtx)
        if outer is not None and outer.backend is self.backend:
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
        self.wait_for_gradients()
        files = {name: dense.state_bytes(state) for name, state in states.items()}
        failure: PersiaError | None = None
        if jit_name is not None:
            try:
                files[jit_name] = dense.torchscript_bytes(self._require_model(), jit_name)
            except InvalidArgumentError as error:
                failure = error
        self._checkpoints.dump(
            DumpRequest(
                dst_dir,
                dense=files,
                step=step,
                keep_last=keep_last,
                optimizer=self._described_optimizer(),
                with_state=with_state,
                in_place=in_place,
                blocking=blocking,
            )
        )
        if failure is not None:
            raise failure

    def _load(
        self,
        src_dir: str | os.PathLike[str],
        states: Mapping[str, dense.TorchState],
        map_location: Any,
        *,
        blocking: bool,
        strict: bool,
    ) -> Source:
        source = Source(src_dir)
        contents = {name: source.dense(name) for name in states}
        with dense.undone_on_error(list(states.values())):
            for name, state in states.items():
                what = str(source.location / name)
                dense.load_state(state, contents[name], what, map_location or self.device)
            if source.has_embeddings:
                self._load_embeddings(source, blocking=blocking, strict=strict)
            else:
                get_default_logger().warning(
                    "%s has no embeddings: only the dense part is loaded", source.location
                )
        return source

    def _load_embeddings(
        self, source: Source, *, blocking: bool, strict: bool, with_state: bool = True
    ) -> None:
        self.wait_for_gradients()
        self._checkpoints.load(source, strict=strict, blocking=blocking, fresh_state=not with_state)

    def _described_optimizer(self) -> dict[str, Any] | None:
        """For people who read the manifest; only training knows it."""
        return None

    def _require_model(self) -> torch.nn.Module:
        if self.model is None:
            raise FailedPreconditionError("model not found, please init context with model")
        return self.model

    def _shared_checkpoints(self) -> Checkpoints | None:
        outer: EmbeddingCtx | None = current_context(EmbeddingCtx)
        return outer._checkpoints if outer is not None and outer.backend is self._backend else None

    def _make_checkpoints(self) -> Checkpoints:
        self._find_peers = find_peers = self._checkpoint_peers()
        checkpoints = Checkpoints(find_peers, deadline_s=env.get_deadline_s())
        finishes = FAILED_EXIT_DEADLINE_S  # less: the context ends because of an error
        self._resources.callback(lambda: checkpoints.close(finish=self._exit_deadline_s > finishes))
        return checkpoints

    def _checkpoint_peers(self) -> Callable[[], list[Peer]]:
        """All stores of the job: its servers', or the one of this process."""
        store = self._backend.local_store
        if store is None:
            return lambda: find_servers(self._require_cluster().session, env.get_deadline_s())
        job = self._embedded_job
        config = GlobalConfig() if job is None else job.config
        share = ServerShare(
            store=store,
            index=0,
            replicas=1,
            schema=None if self._slots is None else RowSchema.of(self._slots),
            num_threads=env.get_num_threads() or 2,
            dump_percent=dump_percent(config),
            tier=self._pool,
        )
        changes = ServerChanges(store, None if job is None else IncrementalSettings.of(job.config))
        local: list[Peer] = [LocalPeer(CheckpointService(share, changes))]
        return lambda: local

    def _forward_model(self, model: torch.nn.Module) -> Callable[..., Any]:
        # The DDP wrapper announces every forward to the other ranks, which are not evaluating.
        return dense.unwrap(model)

    def _close_prefetchers(self) -> None:
        while self._prefetchers:
            self._prefetchers.pop().close(min(self._exit_deadline_s, FAILED_EXIT_DEADLINE_S))
        self.current_batch = None

    def _fail(self, failure: PersiaError) -> None:
        """Called on a background thread when training cannot go on: wakes the loop."""
        for prefetcher in list(self._prefetchers):
            prefetcher.fail(failure)

    def _shared_backend(self) -> EmbeddingBackend | None:
        # Training on another thread is another job; an evaluation there is of the one that trains.
        find = own_context if self.training else current_context
        outer: EmbeddingCtx | None = find(EmbeddingCtx)
        if outer is None:
            return None
        self._slots = self._slots or outer._slots
        return outer.backend

    def _connect(self) -> EmbeddingBackend:
        if env.get_nats_url() is None or env.embedded():
            return self._embed()
        self._cluster = JobConnection.connect(f"nn-worker-{self.rank}")
        self._resources.callback(self._cluster.close)
        backend = ClusterBackend(
            self._cluster, schema="" if self._slots is None else self._slots.schema_hash()
        )
        self._resources.callback(backend.close)
        self._cluster.observe(
            NnWorkerSource(
                backend.client,
                self.rank,
                self.world_size,
                counters=lambda: dataclasses.asdict(self.counters),
                in_flight=lambda: self.staleness.in_flight,
                queues=self._queue_depths,
                packets=self._packet_counts,
                staleness=partial(self._staleness_by_mode, backend),
            )
        )
        return backend

    def _embed(self) -> EmbeddingBackend:
        self._slots = self._slots or read_slots(None)
        config = read_global(self._global_config)
        job = start_embedded_job(self._slots, config, self.world_size, partial(self._open_tier, config))
        self._resources.callback(job.close)
        if self._pool is not None and job.backend.local_store is not None:
            self._pool.attach(job.backend.local_store)
        self._embedded_job = job
        self._cluster = job.connect(f"nn-worker-{self.rank}")
        self._resources.callback(self._cluster.close)
        return job.backend

    def _open_tier(self, config: GlobalConfig, slots: SlotsConfig) -> TierOptions | None:
        storage = config.embedding_parameter_server_config.storage
        if not storage.has_pool:
            return None
        threads = config.common_config.checkpointing_config.num_workers
        schema = RowSchema.of(slots)
        self._pool = ServerTier(storage, index=0, replicas=1, schema=schema, num_threads=threads)
        self._resources.callback(self._pool.close)
        return self._pool.tier_options

    def _packet_counts(self) -> Mapping[str, float]:
        """Of changes that this context writes for followers; only training does."""
        return {}

    def _staleness_by_mode(self, backend: EmbeddingBackend) -> dict[str, tuple[int, float]]:
        """(largest, mean) that the batches trained have had."""
        names = mode_names(self.consistency, backend.slot_modes, ~0)
        measured = {mode: (m.max, m.mean) for mode, m in self.staleness.by_mode.items()}
        return dict.fromkeys(names, (0, 0.0)) | measured

    def _queue_depths(self) -> dict[str, int]:
        prefetchers = list(self._prefetchers)
        return {"looked_up": sum(prefetcher.num_ahead for prefetcher in prefetchers)}

    def _check_arguments(self) -> None:
        """Raises before anything is started."""

    def _start(self) -> None:
        """For contexts that need more, once the backend is there."""

    def _announce(self, address: str = "") -> None:
        """Tells loaders and the other ranks that this NN worker is there; once."""
        if not self._announced and self._cluster is not None:
            self._cluster.announce(NN_WORKER, self.rank, self.world_size, address=address)
            self._announced = True

    def _require_cluster(self) -> JobConnection:
        if self._cluster is None:
            raise FailedPreconditionError(
                "this context has no connection of its own to the data loaders: stream in the TrainCtx"
            )
        return self._cluster

    def _release_superseded(self, pending: PendingBatch) -> None:
        # Its first registration is the one being trained; this one was never counted as received.
        self._counters.add(batches_received=1)
        assert pending.reference is not None, "registered by a loader"
        self._releaser.reap(BatchLease(pending.batch_id, pending.reference))

    def _device_or(self, device_id: int | None) -> torch.device | None:
        if device_id is None:
            return self.device
        return None if device_id < 0 else torch.device("cuda", device_id)


def eval_ctx(*args: Any, **kwargs: Any) -> EmbeddingCtx:
    """`EmbeddingCtx(PreprocessMode.EVAL, ...)`; inside another context it shares that one's connection."""
    return EmbeddingCtx(PreprocessMode.EVAL, *args, **kwargs)


def _exit_deadline_s(error: BaseException | None) -> float:
    if error is None:
        return env.get_deadline_s()
    is_stopped = isinstance(error, (Terminated, KeyboardInterrupt))
    return STOPPED_EXIT_DEADLINE_S if is_stopped else FAILED_EXIT_DEADLINE_S
