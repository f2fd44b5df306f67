"""Prefetching: order, bounds, skipped batches, failures and closing."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from persia._native import BatchReference
from persia.embedding.dense_codec import encode_dense
from persia.errors import CorruptionError, DeadlineExceededError, UnavailableError
from persia.pipeline.lookup import LookupService
from persia.pipeline.prefetch import Prefetcher
from persia.pipeline.queues import BoundedQueue, QueueClosed
from persia.pipeline.source import PendingBatch
from persia.pipeline.staleness import Consistency, LookAhead, LookupStage, Mode, StalenessGate

DENSE = encode_dense([("x", np.zeros((1, 1), np.float32))], [], None, 1)


def pending(number: int, *, requires_grad: bool = True) -> PendingBatch:
    return PendingBatch(number, requires_grad, BatchReference(0, 1, number), b"", DENSE)


class ListSource:
    """Gives `batches`, then raises `failure` or ends."""

    def __init__(
        self, batches: list[PendingBatch], failure: Exception | None = None, endless: bool = False
    ) -> None:
        self._batches = batches
        self._failure = failure
        self._queue: BoundedQueue[PendingBatch] = BoundedQueue(len(batches) + 1)
        for batch in batches:
            self._queue.put(batch)
        if not endless:
            self._queue.close()

    def take(self) -> PendingBatch | None:
        try:
            return self._queue.get()
        except QueueClosed:
            if self._failure is not None:
                raise self._failure from None
            return None

    def yielded(self, batch_id: int) -> None:
        pass

    def stop(self) -> list[PendingBatch]:
        return self._queue.drain()

    def close(self) -> None:
        pass


def start(
    host: Any,
    source: ListSource,
    *,
    staleness: int | None = None,
    num_workers: int = 4,
    forward_buffer_size: int = 5,
    later: Sequence[LookupStage] = (),
    late: bool = False,
) -> Prefetcher:
    counters = host.counters
    prefetcher = Prefetcher(
        source,
        LookupService(host.backend, host.reaper, counters, None, host.training),
        StalenessGate(staleness, counters),
        [(stage, StalenessGate(stage.mode.bound, None)) for stage in later],
        forward_buffer_size=forward_buffer_size,
        num_workers=num_workers,
        late=late,
    )
    host.prefetchers.append(prefetcher)
    return prefetcher


def batches(prefetcher: Prefetcher) -> Iterator[Any]:
    while (batch := prefetcher.next(30)) is not None:
        yield batch


def test_order_is_the_sources_whatever_lookups_take(fake_host: Any, fake_backend: Any) -> None:
    rng = random.Random(1)
    fake_backend.on_lookup = lambda number: time.sleep(rng.random() / 200)
    prefetcher = start(fake_host, ListSource([pending(i) for i in range(40)]))
    assert [batch.batch_id for batch in batches(prefetcher)] == list(range(40))


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_bounds_batches_between_lookup_and_settlement(
    fake_host: Any, fake_backend: Any, staleness: int
) -> None:
    most: list[int] = []
    fake_backend.on_lookup = lambda number: most.append(fake_host.counters.staleness().in_flight)
    prefetcher = start(fake_host, ListSource([pending(i) for i in range(30)]), staleness=staleness)
    seen = 0
    for batch in batches(prefetcher):
        assert batch.lease.acquire()
        batch.lease.release()
        seen += 1
    assert seen == 30
    assert max(most) <= staleness
    assert fake_host.counters.staleness().in_flight == 0


@pytest.mark.parametrize("requires_grad", [True, False])
def test_as_many_are_looked_up_ahead_as_the_bound_says(
    fake_host: Any, fake_backend: Any, monkeypatch: pytest.MonkeyPatch, requires_grad: bool
) -> None:
    bounds = iter([*[1] * 9, 4])
    monkeypatch.setattr(LookAhead, "took", lambda self, lookup_s, step_s: next(bounds))
    begun = [threading.Event() for _ in range(20)]
    fake_backend.on_lookup = lambda number: begun[number].set()
    source = ListSource([pending(i, requires_grad=requires_grad) for i in range(20)], endless=True)
    prefetcher = start(fake_host, source, forward_buffer_size=6, late=True)
    held = [prefetcher.next(30)]
    assert begun[6].wait(30)  # nothing is measured before the second batch
    held += [prefetcher.next(30) for _ in range(9)]
    assert begun[10].wait(30)
    assert not begun[11].is_set()
    held.append(prefetcher.next(30))
    assert begun[14].wait(30)
    assert not begun[16].is_set()
    assert [batch.batch_id for batch in held if batch is not None] == list(range(11))


def test_batches_without_gradient_take_no_permit(fake_host: Any) -> None:
    prefetcher = start(
        fake_host, ListSource([pending(i, requires_grad=False) for i in range(9)]), staleness=1
    )
    assert all(batch.lease is None for batch in batches(prefetcher))
    assert fake_host.counters.snapshot().batches_evaluated == 9


def test_evaluation_takes_no_leases(evaluating_host: Any) -> None:
    prefetcher = start(evaluating_host, ListSource([pending(i) for i in range(3)]), staleness=1)
    assert all(batch.lease is None for batch in batches(prefetcher))


def test_skipping_batches_while_holding_them_does_not_deadlock(
    fake_host: Any, fake_backend: Any, log: Any
) -> None:
    prefetcher = start(fake_host, ListSource([pending(i) for i in range(10)]), staleness=2)
    held = list(batches(prefetcher))
    assert len(held) == 10
    del held
    gc.collect()
    fake_host.close()
    assert sorted(fake_backend.released) == list(range(10))
    assert fake_host.counters.snapshot().batches_released == 10
    # Other tests may have left requests whose refusals are logged now.
    (record,) = (record for record in log.records if hasattr(record, "batch_id"))
    assert record.batch_id == 0
    assert record.getMessage().startswith("batch 0 had no backward")


def test_failure_of_the_source_comes_after_the_batches_before_it(fake_host: Any) -> None:
    prefetcher = start(
        fake_host, ListSource([pending(0), pending(1)], failure=UnavailableError("data loader 1 died"))
    )
    assert prefetcher.next(30).batch_id == 0  # type: ignore[union-attr]
    assert prefetcher.next(30).batch_id == 1  # type: ignore[union-attr]
    with pytest.raises(UnavailableError, match="data loader 1"):
        prefetcher.next(30)


def test_failed_lookup_names_its_batch_and_frees_its_permit(
    fake_host: Any, fake_backend: Any, log: Any
) -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise UnavailableError("embedding worker 0 at 127.0.0.1:1 is gone")

    fake_backend.on_lookup = fail
    prefetcher = start(fake_host, ListSource([pending(i) for i in range(3)]), staleness=3)
    first = prefetcher.next(30)
    with pytest.raises(UnavailableError, match="the lookup of batch 1: embedding worker 0"):
        prefetcher.next(30)
    last = prefetcher.next(30)
    assert first is not None
    assert last is not None
    assert fake_host.counters.staleness().in_flight == 2
    assert fake_host.counters.snapshot().batches_failed == 1
    (record,) = log.records
    assert record.batch_id == 1
    assert record.getMessage().startswith("the lookup of batch 1: ")


def test_failed_later_lookup_gives_its_batch_up_at_once(fake_host: Any, fake_backend: Any) -> None:
    """Not when the garbage collector comes by: until then the next batch would wait for the permit."""
    lookups: list[int] = []

    def fail(number: int) -> None:
        lookups.append(number)
        if lookups.count(0) == 2 and number == 0:
            raise UnavailableError("embedding worker 0 at 127.0.0.1:1 is gone")

    fake_backend.on_lookup = fail
    later = [LookupStage(Mode.of(Consistency.HYBRID, 1), 2)]
    prefetcher = start(fake_host, ListSource([pending(i) for i in range(2)]), num_workers=1, later=later)
    gc.disable()
    try:
        with pytest.raises(UnavailableError, match="embedding_staleness=1 of batch 0: embedding worker 0"):
            prefetcher.next(30)
        second = prefetcher.next(5)
        assert second is not None
        assert second.batch_id == 1
        assert fake_backend.released == [0]
    finally:
        gc.enable()
    counts = fake_host.counters.snapshot()
    assert (counts.batches_released, counts.batches_failed) == (1, 0)


def test_undecodable_dense_part_names_its_batch(fake_host: Any) -> None:
    bad = PendingBatch(4, True, BatchReference(0, 1, 4), b"", DENSE[:-8])
    with pytest.raises(CorruptionError, match="batch 4: dense section is cut short"):
        start(fake_host, ListSource([bad])).next(30)


def test_time_out_says_so(fake_host: Any) -> None:
    prefetcher = start(fake_host, ListSource([], endless=True))
    with pytest.raises(DeadlineExceededError, match="timeout_ms"):
        prefetcher.next(0.01)


def test_failure_of_training_wakes_the_loop(fake_host: Any) -> None:
    prefetcher = start(fake_host, ListSource([], endless=True))
    threading.Timer(0.05, prefetcher.fail, args=[UnavailableError("gradient of batch 3")]).start()
    with pytest.raises(UnavailableError, match="batch 3"):
        prefetcher.next(30)


def test_close_gives_up_everything_that_was_not_taken(fake_host: Any, fake_backend: Any) -> None:
    prefetcher = start(fake_host, ListSource([pending(i) for i in range(20)], endless=True), staleness=6)
    taken = prefetcher.next(30)
    assert taken is not None
    assert taken.lease is not None
    assert taken.lease.acquire()
    prefetcher.close(30)
    fake_host.close()
    assert sorted(fake_backend.released) == list(range(1, 20))


def test_close_ends_a_lookup_under_way_and_releases_it(fake_host: Any, fake_backend: Any) -> None:
    go_on, started = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        started.set()
        go_on.wait(120)

    fake_backend.on_lookup = hold
    prefetcher = start(fake_host, ListSource([pending(0)], endless=True))
    assert started.wait(120)
    threading.Timer(0.05, go_on.set).start()
    prefetcher.close(30)
    gc.collect()
    fake_host.close()
    assert fake_backend.released == [0]


def test_close_gives_up_lookups_that_the_loop_stopped_waiting_for(fake_host: Any, fake_backend: Any) -> None:
    go_on = threading.Event()
    fake_backend.on_lookup = lambda number: go_on.wait(120)
    prefetcher = start(fake_host, ListSource([pending(i) for i in range(3)], endless=True), num_workers=1)
    for _ in range(2):  # the first is being looked up, the second has not begun
        with pytest.raises(DeadlineExceededError, match="the lookup of batch"):
            prefetcher.next(2.0)  # a busy machine may take a while to begin the lookup
    threading.Timer(0.05, go_on.set).start()
    prefetcher.close(30)
    gc.collect()
    fake_host.close()
    assert sorted(fake_backend.released) == [0, 1, 2]
