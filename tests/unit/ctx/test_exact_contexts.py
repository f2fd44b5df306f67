"""consistency="exact" through contexts, over an embedding worker and a parameter server behind sockets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia import _native
from persia.config import parse_embedding_config
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from persia.messaging.discovery import ServiceInfo
from persia.messaging.interface import Registration
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.pipeline.backend import ClusterBackend
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.gradients import GradientSender
from persia.pipeline.lookup import BatchLease
from persia.waiting import Attempts

from .conftest import DIM

SLOTS = parse_embedding_config(
    {"feature_index_prefix_bit": 8, "slots_config": {"a": {"dim": DIM}, "b": {"dim": DIM}}}
)


class Directory:
    """Discovery of one worker, which always answers."""

    def __init__(self, incarnation: int, address: str) -> None:
        self.worker = ServiceInfo(
            role=EMBEDDING_WORKER,
            index=0,
            replicas=1,
            incarnation=incarnation,
            address=address,
            slot_modes=("",),
            schema=SLOTS.schema_hash(),
            pid=1,
            status_address="",
            has_rows=False,
        )

    def watch(self, *_: Any) -> Registration:
        return Registration(lambda: None)

    def wait_for(self, *_: Any, **__: Any) -> list[ServiceInfo]:
        return [self.worker]

    def probe(self, *_: Any) -> ServiceInfo | None:
        return self.worker


@pytest.fixture
def cluster() -> Iterator[ClusterBackend]:
    server = _native.ParameterServer(replica_index=0, replica_size=1, capacity=10_000, num_internal_shards=1)
    worker = _native.EmbeddingWorker(slots=SLOTS.native_slots(), feature_index_prefix_bit=8, num_servers=1)
    worker.set_server(0, f"127.0.0.1:{server.start('127.0.0.1', 0)}")
    address = f"127.0.0.1:{worker.start('127.0.0.1', 0)}"
    directory: Any = Directory(worker.incarnation, address)
    backend = ClusterBackend(directory)
    yield backend
    backend.close()
    worker.stop()
    server.stop()


@pytest.fixture
def exact_ctx(
    make_ctx: Callable[..., TrainCtx], cluster: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., TrainCtx]:
    monkeypatch.setenv("PERSIA_EXACT_ROW_BYTES", "0")  # held rows are those of batches in flight

    def make(**options: Any) -> TrainCtx:
        given = {"backend": cluster, "slots": SLOTS, "consistency": "exact", **options}
        return make_ctx(**given)

    return make


def held(backend: ClusterBackend) -> float:
    return {name: value for name, _, _, value in backend.client.exact_metrics()}["persia_nn_held_rows"]


def test_rows_stay_from_loop_to_loop_until_they_are_set(
    make_ctx: Callable[..., TrainCtx], cluster: ClusterBackend, new_batch: Any
) -> None:
    with make_ctx(backend=cluster, slots=SLOTS, consistency="exact") as ctx:
        train(ctx, new_batch(0))
        ctx.wait_for_gradients()
        assert held(cluster) > 0
        cluster.set_slot_rows(SLOTS, "a", np.arange(3, dtype=np.uint64), np.ones((3, DIM), np.float32))
        assert held(cluster) == 0
        train(ctx, new_batch(0))
    assert held(cluster) == 0, "the end of the context frees them"


def train(ctx: TrainCtx, batch: Any) -> None:
    ctx.backward(ctx.forward(ctx.get_embedding_from_data(batch))[0].sum())


@pytest.fixture
def checkpoint(make_ctx: Callable[..., TrainCtx], new_batch: Any, tmp_path: Path) -> Path:
    with make_ctx() as ctx:  # embedded: it can dump
        train(ctx, new_batch(0))
        ctx.dump_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("nested", [False, True])
def test_a_load_is_refused_while_batches_are_in_flight(
    exact_ctx: Any, checkpoint: Path, new_batch: Any, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    loads: list[dict[str, Any]] = []
    with exact_ctx() as ctx:
        monkeypatch.setattr(ctx.runtime.checkpoints, "load", lambda source, **options: loads.append(options))
        train(ctx, new_batch(0))
        ahead = ctx.get_embedding_from_data(new_batch(1))
        with eval_ctx() if nested else contextlib.nullcontext(ctx) as loading:
            for blocking in (True, False):
                with pytest.raises(
                    FailedPreconditionError, match="a checkpoint was loaded while consistency='exact' holds"
                ):
                    loading.load_embedding(checkpoint, blocking=blocking)
        assert loads == []
        del ahead  # given up by the reaper, for which a load waits
        ctx.load_checkpoint(checkpoint, blocking=False)
        with eval_ctx() as loading:
            loading.load_embedding(checkpoint, blocking=False)
        # Batches that are looked up during the load would have rows of before it.
        assert [options["blocking"] for options in loads] == [True, True]


def test_a_load_follows_a_loop_that_was_left(
    exact_ctx: Any, checkpoint: Path, make_dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Any] = []
    with exact_ctx() as ctx:
        monkeypatch.setattr(ctx.runtime.checkpoints, "load", lambda source, **options: loads.append(source))
        for number, batch in enumerate(DataLoader(make_dataset(40), embedding_staleness=8)):
            ctx.backward(ctx.forward(batch)[0].sum())
            if number == 3:
                for _ in Attempts(60.0):  # until a batch is looked up ahead
                    if ctx.staleness.in_flight:
                        break
                with pytest.raises(FailedPreconditionError, match="do it before the loop or after it"):
                    ctx.load_checkpoint(checkpoint)
                break
        ctx.load_checkpoint(checkpoint)
        assert len(loads) == 1


def test_rows_are_set_and_cleared_right_after_a_loop(
    exact_ctx: Any, make_dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_send, send = threading.Event(), ClusterBackend.return_gradients

    def return_later(*arguments: Any, **options: Any) -> Any:
        assert may_send.wait(60)
        return send(*arguments, **options)

    monkeypatch.setattr(ClusterBackend, "return_gradients", return_later)
    with exact_ctx() as ctx:
        for batch in DataLoader(make_dataset(40), embedding_staleness=8):
            ctx.backward(ctx.forward(batch)[0].sum())
            break
        del batch
        timer = threading.Timer(0.2, may_send.set)  # while the first call waits, or before it
        timer.start()
        ctx.set_embedding("a", np.arange(2, dtype=np.uint64), np.ones((2, DIM), np.float32))
        ctx.clear_embeddings()
        timer.join()
        assert ctx.get_embedding_size() == [0]


class Interrupted(BaseException):
    """What the handler of a signal raises."""


def interrupt(*_: Any) -> None:
    raise Interrupted


def sender_of(ctx: TrainCtx) -> GradientSender:
    assert ctx._pipeline.gradients is not None
    return ctx._pipeline.gradients


def lease_of(batch: PersiaTrainingBatch) -> BatchLease:
    assert batch.lease is not None
    return batch.lease


def test_an_update_that_a_signal_interrupts_is_an_error(
    exact_ctx: Any, new_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        with exact_ctx() as ctx:
            batch = ctx.get_embedding_from_data(new_batch(0))
            loss = ctx.forward(batch)[0].sum()
            monkeypatch.setattr(sender_of(ctx)._queue, "put_reserved", interrupt)
            with pytest.raises(Interrupted):
                ctx.backward(loss)
            # Else it would be released as untrained, and the servers would silently lack its update.
            assert lease_of(batch).acquired

    with pytest.raises(FailedPreconditionError, match="batch 0 was not sent after Interrupted.*new context"):
        run()
    with exact_ctx() as ctx:
        train(ctx, new_batch(1))


def test_a_signal_while_the_queue_is_full_changes_no_row(
    exact_ctx: Any, new_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exact_ctx() as ctx:
        train(ctx, new_batch(0))
        batch = ctx.get_embedding_from_data(new_batch(0))
        loss = ctx.forward(batch)[0].sum()
        reference = batch.result.reference
        before = ctx._pipeline.exact.pool(reference).slots[0].rows.copy()
        with monkeypatch.context() as patched:
            patched.setattr(sender_of(ctx)._queue, "_wait_for_room", interrupt)
            with pytest.raises(Interrupted):
                ctx.backward(loss)
        assert not lease_of(batch).acquired
        np.testing.assert_array_equal(ctx._pipeline.exact.pool(reference).slots[0].rows, before)
        ctx.backward(ctx.forward(ctx.get_embedding_from_data(new_batch(0)))[0].sum())


def test_an_update_that_is_refused_leaves_no_row_held(
    exact_ctx: Any, cluster: ClusterBackend, new_batch: Any
) -> None:
    with exact_ctx() as ctx:
        train(ctx, new_batch(0))
        ctx.wait_for_gradients()
        batch = ctx.get_embedding_from_data(new_batch(1))
        wrong = [("a", np.ones((7, DIM), np.float32))]
        with pytest.raises(InvalidArgumentError, match="the gradient of batch 0"):
            sender_of(ctx).submit(lease_of(batch), wrong, scale=1.0)
        assert held(cluster) == 0
        train(ctx, new_batch(2))


def refuse(*_: Any, **__: Any) -> None:
    raise UnavailableError("no worker")


@pytest.mark.parametrize("nested", [False, True])
def test_after_a_lost_update_a_new_context_trains(
    exact_ctx: Any, cluster: ClusterBackend, new_batch: Any, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """`nested`: the contexts share a runtime."""

    def run() -> None:
        with exact_ctx() as ctx:
            batch = ctx.get_embedding_from_data(new_batch(0))
            ahead = ctx.get_embedding_from_data(new_batch(1))
            with monkeypatch.context() as patched:
                patched.setattr(ClusterBackend, "_call_holder", refuse)
                ctx.backward(ctx.forward(batch)[0].sum())
                with pytest.raises(UnavailableError):
                    ctx.wait_for_gradients()
            with pytest.raises(FailedPreconditionError, match="an update was lost: no worker: begin a new"):
                ctx.forward(ahead)
            with pytest.raises(UnavailableError, match="the gradient of batch 0"):
                sender_of(ctx).submit(lease_of(ahead), [("a", None), ("b", None)], scale=1.0)
            assert held(cluster) == 0

    with eval_ctx(backend=cluster, slots=SLOTS) if nested else contextlib.nullcontext():
        with pytest.raises(UnavailableError, match="the gradient of batch 0"):
            run()
        with exact_ctx() as ctx:
            train(ctx, new_batch(0))


def test_an_exact_context_does_not_begin_under_batches_of_another(
    exact_ctx: Any, cluster: ClusterBackend, new_batch: Any
) -> None:
    with exact_ctx(consistency="hybrid") as outer:
        train(outer, new_batch(0))
        outer.wait_for_gradients()
        ahead = outer.get_embedding_from_data(new_batch(1))
        with pytest.raises(FailedPreconditionError, match="1 batches of another context are in flight"):
            exact_ctx()
        del ahead
        outer._pipeline.reaper.wait(60)
        with exact_ctx() as ctx:
            assert cluster.num_exact == 1
            train(ctx, new_batch(2))
        assert cluster.num_exact == 0


def test_an_exact_context_begins_after_another_one_lost_an_update(
    exact_ctx: Any, cluster: ClusterBackend, new_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        with exact_ctx(consistency="hybrid") as ctx:
            ahead = ctx.get_embedding_from_data(new_batch(1))
            with monkeypatch.context() as patched:
                patched.setattr(ClusterBackend, "_call_holder", refuse)
                train(ctx, new_batch(0))
                with pytest.raises(UnavailableError):
                    ctx.wait_for_gradients()
            with pytest.raises(UnavailableError, match="no worker"), exact_ctx(consistency="hybrid"):
                pass  # it does not begin, and leaves no thread
            sender_of(ctx).submit(lease_of(ahead), [("a", None), ("b", None)], scale=1.0)

    with eval_ctx(backend=cluster, slots=SLOTS):
        with pytest.raises(UnavailableError, match="no worker"):
            run()
        with exact_ctx() as ctx:
            train(ctx, new_batch(2))


def test_an_exact_context_does_not_begin_while_rows_are_loaded_in_the_background(
    make_ctx: Callable[..., TrainCtx], checkpoint: Path, new_batch: Any
) -> None:
    may_load = threading.Event()
    with make_ctx() as outer:
        outer.runtime.checkpoints._thread.submit(lambda: may_load.wait(60))
        outer.load_embedding(checkpoint, blocking=False)
        with pytest.raises(FailedPreconditionError, match="another context loads rows: call its wait"):
            make_ctx(consistency="exact")
        may_load.set()
        outer.wait_for_load_embedding()
        with make_ctx(consistency="exact") as ctx:
            train(ctx, new_batch(0))


def test_a_batch_of_another_device_is_refused_if_it_is_trained(
    exact_ctx: Any, cluster: ClusterBackend, new_batch: Any
) -> None:
    with exact_ctx() as ctx:
        train(ctx, new_batch(0))
        ctx.wait_for_gradients()
        # As of get_embedding_from_data(batch, device_id=0), on a machine with a GPU.
        with pytest.raises(InvalidArgumentError, match="the device meta: .* leave device_id out"):
            ctx._pipeline.look_up(new_batch(1), torch.device("meta"))
        ctx._pipeline.look_up(new_batch(1, requires_grad=False), torch.device("meta"))
        assert held(cluster) == 0


def test_a_batch_of_a_dead_worker_is_let_go(
    exact_ctx: Any, cluster: ClusterBackend, new_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exact_ctx() as ctx:
        train(ctx, new_batch(0))
        ctx.wait_for_gradients()
        batch = ctx.get_embedding_from_data(new_batch(1))
        assert held(cluster) > 0

        def refuse(*_: Any) -> None:
            raise UnavailableError("dead")

        with monkeypatch.context() as patched:
            patched.setattr(ClusterBackend, "_call_worker", refuse)
            patched.setattr(cluster, "is_gone", lambda *_: True)
            del batch
            ctx._pipeline.reaper.wait(60)
        assert held(cluster) == 0
