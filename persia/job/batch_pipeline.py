"""The stages of `persia.pipeline`, connected to each other and to the job for one context."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from persia import env
from persia.embedding.data import PersiaBatch
from persia.errors import FailedPreconditionError, PersiaError, UnavailableError
from persia.job.embedded import LoaderThread, read_slots
from persia.job.runtime import JobRuntime
from persia.logger import get_default_logger
from persia.messaging.payloads import TakenReply, TakenRequest
from persia.observability.sources import NnWorkerSource
from persia.pipeline.backend import ClusterBackend
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.counters import Counters, Staleness
from persia.pipeline.dense_ids import DenseIdReader
from persia.pipeline.device_batch import lane_of
from persia.pipeline.exact import ExactCalls
from persia.pipeline.gradients import GradientSender
from persia.pipeline.lookup import (
    BatchLease,
    LeaseReaper,
    LookupService,
    deferred_stages,
    first_slots,
    slots_in_step,
)
from persia.pipeline.position import DataPosition, stripe_of
from persia.pipeline.prefetch import Prefetcher
from persia.pipeline.receive import LOADER_REMEDY, StreamReceiver
from persia.pipeline.source import BatchSource, PendingBatch, pending_from
from persia.pipeline.staleness import (
    Consistency,
    LookupStage,
    Mode,
    StalenessGate,
    lookup_stages,
    mode_names,
    served_slots,
)
from persia.waiting import Attempts

_CLOSE_DEADLINE_S = 10.0  # a prefetcher's threads end as soon as the call they are in returns
_STEP_POLL_S = 0.01  # while another rank dumps
# Ranks begin their streams in one order, which makes the names of keys unique.
_streams = itertools.count()


class BatchPipeline:
    """The batches of one context: received, looked up, and either updated or given up before it ends.

    Contexts inside one another share a `JobRuntime`, but each has its own pipeline. It evaluates until
    `train` is called.
    """

    def __init__(
        self, runtime: JobRuntime, rank: int, world_size: int, device: torch.device | None, *, nested: bool
    ) -> None:
        self.runtime = runtime
        self.backend = runtime.backend
        self.rank, self.world_size, self.device = rank, world_size, device
        self.nested = nested  # another context receives the loaders' stream
        self.counters = Counters()
        self.reaper = LeaseReaper(self.backend, self.counters)
        self.consistency = Consistency.HYBRID
        # Around the iteration of a stream: ranks may get unequal numbers of batches and end together.
        self.around_stream: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.asked_for_exact = False
        self.exact: ExactCalls | None = None  # of an exact context of a cluster
        self.gradients: GradientSender | None = None  # None: an evaluation
        self._prefetchers: list[Prefetcher] = []
        self.num_looked_up = 0  # batches that the script has looked up itself, without those that failed
        self._stream: StreamReceiver | None = None
        self._last_words: _LastWords | None = None
        self._step: Callable[[], int] = lambda: 0
        self.trained = DataPosition()  # when this run began
        self.check_rows: Callable[[], None] = lambda: None  # raises RowsLostError
        self.dense_ids: DenseIdReader | None = None  # of slots in the dense model of the context

    @property
    def training(self) -> bool:
        """Whether batches that ask for gradients get them here."""
        return self.gradients is not None

    @property
    def data_resumes(self) -> bool:
        """Whether batches are received from data loaders that call `DataCtx.resume`."""
        return self._stream is not None and self._stream.inbox.resumes

    def train(
        self,
        consistency: Consistency,
        around_stream: Callable[[], AbstractContextManager[object]],
        step: Callable[[], int],
        **sizes: int,
    ) -> GradientSender:
        """From here on batches get gradients. `step`: of the loop. `sizes`: those of the `GradientSender`."""
        self._step = step
        self.consistency, self.around_stream = consistency, around_stream
        if consistency is Consistency.EXACT:
            if self.runtime.checkpoints.is_loading:
                raise FailedPreconditionError(
                    "consistency='exact' while another context loads rows: call its wait_for_load_embedding()"
                )
            slots = self.runtime.slots or read_slots(None)
            self.exact = ExactCalls.begin(self.backend, slots, self.world_size, self.device)
            self.asked_for_exact = True
            self.consistency = consistency if self.exact is not None else Consistency.SYNCHRONOUS
        # A failure that only a background thread sees wakes the loop, which may wait for a batch.
        self.gradients = GradientSender(
            self.backend, self.counters, on_failure=self.fail, exact=self.exact, **sizes
        )
        return self.gradients

    def receive(
        self, buffer_size: int, loader: Callable[[], object] | None, *, ordered: bool
    ) -> StreamReceiver:
        """Begins to receive the loaders' stream, once a context; `loader` runs in an embedded job."""
        if self._stream is not None:
            raise FailedPreconditionError(
                "this context receives the loaders' stream already: use one DataLoader for it"
            )
        connection, job = self.runtime.connection, self.runtime.embedded
        if connection is None or self.nested:
            raise FailedPreconditionError(
                "this context has no connection of its own to the data loaders: stream in the TrainCtx"
            )
        # Before the receiver: loaders wait for all ranks, and repeat a batch that nothing answers yet.
        self.runtime.advertise(self.rank, self.world_size)
        receiver = self._stream = StreamReceiver(
            connection.session,
            connection.directory,
            rank=self.rank,
            world_size=self.world_size,
            buffer_size=buffer_size,
            ordered=ordered,
            trained=self.trained,
            remedy=LOADER_REMEDY if job is None else job.loader_remedy,
            failure=lambda: connection.failure,
            on_received=self.count_received,
            on_superseded=self._give_up_superseded,
            on_taken=self._on_taken,
        )
        if self.world_size > 1 and dist.is_initialized():
            self._last_words = _LastWords(_get_default_store())
        # With a broker, loaders are processes of their own, and a thread here would send everything twice.
        if loader is not None and job is not None and not job.has_nats:
            receiver.before_close = LoaderThread(loader, job, receiver.inbox).close
        return receiver

    def prefetch(
        self,
        make_source: Callable[[], BatchSource],
        *,
        forward_buffer_size: int,
        num_workers: int,
        embedding_staleness: int | None,
        reproducible: bool,
    ) -> Prefetcher:
        """Begins to look batches up ahead of the loop. This pipeline closes the prefetcher when it ends.

        RowsLostError: rows were lost before; `fail` raises what is lost from here on.
        """
        self.check_rows()  # first: after an error a script may load a checkpoint, and begin again
        stages = self._stages(embedding_staleness)
        loose = [stage.mode for stage in stages if stage.mode.bound != 1]
        if reproducible and loose and self.exact is None:
            get_default_logger().warning(
                "reproducible=True with slots of %s fixes the order of batches only: their lookups and "
                "updates race",
                " and ".join(
                    f"consistency={m.consistency.value!r} (embedding_staleness={m.bound})" for m in loose
                ),
            )
        first = stages[0].mode
        prefetcher = Prefetcher(
            make_source(),
            self._lookup_service(stages, self.device, ahead=True),
            StalenessGate(first.bound, self.counters, on_demand=first.synchronous),
            [(stage, StalenessGate(stage.mode.bound, None)) for stage in deferred_stages(stages)],
            forward_buffer_size=forward_buffer_size,
            num_workers=num_workers,
            late=self.training and first.consistency is Consistency.HYBRID and not deferred_stages(stages),
        )
        # For `close`, `fail` and the metrics: a loop may be left with `break`, and its iterator kept.
        self._prefetchers.append(prefetcher)
        try:
            self.check_rows()
        except PersiaError as failure:  # since the check above
            prefetcher.fail(failure)
        return prefetcher

    def end_prefetch(self, prefetcher: Prefetcher, deadline_s: float = _CLOSE_DEADLINE_S) -> None:
        """Gives up the batches that the loop did not take."""
        prefetcher.close(deadline_s)
        if prefetcher in self._prefetchers:  # else the context has ended before the loop over it
            self._prefetchers.remove(prefetcher)

    def look_up(self, batch: PersiaBatch, device: torch.device | None) -> PersiaTrainingBatch:
        """Looks one batch up, now. RowsLostError: rows are lost."""
        self.check_rows()
        service = self._lookup_service(self._stages(None), device, ahead=False)
        self.count_received()  # what fails before is not counted
        looked_up = service.look_up(pending_from(batch, 0), lambda: None)
        self.num_looked_up += 1  # a failed one is counted as failed
        looked_up.is_of_loop = False
        return looked_up

    def count_received(self) -> None:
        self.counters.add(batches_received=1)

    def wait_for_gradients(self) -> None:
        """Returns once every gradient handed in so far is applied."""
        if self.gradients is not None:
            self.gradients.wait(env.get_deadline_s())

    def start_after(self, trained: DataPosition) -> None:
        """Data loaders leave these batches out. Does nothing once the stream has begun."""
        if self._stream is None:
            self.trained = trained

    def position(self) -> DataPosition:
        """The batches that all ranks have trained, at the step of this one, which is rank 0.

        Other ranks cannot be a step ahead: they average the dense gradients of each step with this one.
        UnavailableError, DeadlineExceededError: another rank does not answer, and has not left in order.
        """
        if self._stream is None:
            return self.trained
        bounds = [self._bounds()]
        for rank in range(1, self.world_size):
            assert self.runtime.connection is not None, "it has a stream"
            session, request = self.runtime.connection.session, TakenRequest(self._step()).encode()
            try:
                answer = session.request(session.subjects.taken(rank), request, env.get_deadline_s())
            except UnavailableError as failure:
                if self._last_words is None:
                    raise
                answer = self._last_words.of(rank, failure)
            bounds.append(TakenReply.decode(answer).bounds)
        num_loaders = max((len(of_rank) for of_rank in bounds if of_rank is not None), default=1)
        return self._stream.inbox.trained.joined(
            stripe_of([of_rank or (0,) * num_loaders for of_rank in bounds])
        )

    def _bounds(self) -> tuple[int, ...] | None:
        assert self._stream is not None, "asked for a position of it"
        # The bounds first, see Prefetcher.next.
        stream = self._stream
        return stream.inbox.bounds(held for ahead in list(self._prefetchers) for held in ahead.held(stream))

    def _on_taken(self, payload: bytes) -> bytes:
        """Answers `position` of rank 0, which waits between two steps."""
        step, stream = TakenRequest.decode(payload).step, self._stream
        assert stream is not None, "it answers"
        # A rank whose data has ended does not get to the step.
        for _ in Attempts(env.get_deadline_s(), pause_s=_STEP_POLL_S):
            if self._step() >= step or stream.inbox.is_over:
                break
        self.wait_for_gradients()
        return TakenReply(self._bounds()).encode()

    def staleness(self) -> Staleness:
        """The staleness that the servers measured, by consistency mode."""
        return self.counters.staleness(partial(mode_names, self.consistency, self.backend.slot_modes))

    def show(self) -> None:
        """Shows metrics and status of this rank, which has servers; before the runtime advertises it.

        A nested context shows nothing: the connection has one port, which is the outer context's.
        """
        backend, connection = self.backend, self.runtime.connection
        if self.nested or connection is None or not isinstance(backend, ClusterBackend):
            return
        source = NnWorkerSource(
            backend.client,
            self.rank,
            self.world_size,
            counters=lambda: dataclasses.asdict(self.counters.snapshot()),
            in_flight=lambda: self.counters.staleness().in_flight,
            queues=lambda: {"looked_up": sum(ahead.num_ahead for ahead in list(self._prefetchers))},
            packets=self._packet_counts,
            staleness=self._staleness_by_mode,
        )
        connection.observe(source)

    def close(self, deadline_s: float) -> None:
        """Waits until every batch is updated or given up; raises the first failure of a gradient."""
        with ExitStack() as last:
            # In reverse: prefetchers first, as they start lookups; then gradients, which release leases; then
            # the reaper takes what is left. Each has its turn also where the one before it has failed.
            if self.exact is not None:
                last.callback(self.exact.end)
            last.callback(self.reaper.close, deadline_s)
            bounds = None if self._stream is None else self._bounds()  # while it knows what the loop holds
            if self.gradients is not None:
                last.callback(self._drain, self.gradients, bounds, deadline_s)
            while self._prefetchers:
                self._prefetchers.pop().close(min(deadline_s, _CLOSE_DEADLINE_S))

    def _drain(self, gradients: GradientSender, bounds: tuple[int, ...] | None, deadline_s: float) -> None:
        words, self._last_words = self._last_words, None  # the store of the ranks ends with it
        gradients.drain(deadline_s)
        if words is not None and self.rank > 0:
            words.leave(self.rank, TakenReply(bounds).encode())

    def _stages(self, embedding_staleness: int | None) -> list[LookupStage]:
        if self.asked_for_exact and self.exact is None:
            embedding_staleness = None  # a bound of exact batches; this context trains one at a time
        job = Mode.of(self.consistency, embedding_staleness)
        return lookup_stages(job, self.backend.slot_modes) if self.training else [LookupStage(job)]

    def _lookup_service(
        self, stages: list[LookupStage], device: torch.device | None, *, ahead: bool
    ) -> LookupService:
        first, in_step = first_slots(stages, ahead=ahead), slots_in_step(stages)
        return LookupService(
            *(self.backend, self.reaper, self.counters, device, self.training, first, in_step),
            lane_of(device),
            served_slots(self.backend.slot_modes),
            self.dense_ids,
            self.exact,
            ahead,
        )

    def _give_up_superseded(self, pending: PendingBatch) -> None:
        # Its first registration is the one being trained; this one was never counted as received.
        self.count_received()
        assert pending.reference is not None, "registered by a loader"
        self.reaper.reap(BatchLease(pending.batch_id, pending.reference))

    def fail(self, failure: PersiaError) -> None:
        """The loop raises `failure`, on whatever thread this is called."""
        # A copy: a gradient thread calls this while the loop may begin or end a prefetch.
        for prefetcher in list(self._prefetchers):
            prefetcher.fail(failure)

    def _packet_counts(self) -> Mapping[str, Any]:
        packets = self.runtime.packets
        if packets is None or packets.stream.log is None:
            return {}
        return dataclasses.asdict(packets.stream.current_counts())

    def _staleness_by_mode(self) -> dict[str, tuple[int, float]]:
        """(largest, mean) by mode, also by those of which no batch was trained yet."""
        names = mode_names(self.consistency, self.backend.slot_modes, ~0)
        measured = {mode: (m.max, m.mean) for mode, m in self.staleness().by_mode.items()}
        return dict.fromkeys(names, (0, 0.0)) | measured


class _LastWords:
    """What ranks have trained that have left, for rank 0, which dumps after the loop: in the store of DDP."""

    def __init__(self, store: Store) -> None:
        self._store, self._key = store, f"persia/taken/{next(_streams)}"

    def leave(self, rank: int, reply: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0, which has the store, has left before
            self._store.set(f"{self._key}/{rank}", reply.decode())

    def of(self, rank: int, failure: UnavailableError) -> bytes:
        """Raises `failure` if the rank has not left in order."""
        key = f"{self._key}/{rank}"
        # Its last updates may still be under way.
        for _ in Attempts(env.get_deadline_s(), pause_s=_STEP_POLL_S):
            if self._store.check([key]):
                return bytes(self._store.get(key))
        raise failure
