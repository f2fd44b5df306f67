"""Gradient return: bounded, drained, and never silent about a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from persia._native import BatchReference
from persia.errors import DeadlineExceededError, NotFoundError, PersiaError, UnavailableError
from persia.pipeline.counters import Counters
from persia.pipeline.gradients import GradientSender
from persia.pipeline.lookup import BatchLease


def make(backend: Any, counters: Counters, **sizes: Any) -> GradientSender:
    defaults = {"num_workers": 2, "queue_capacity": 4, "max_unacknowledged": 8}
    return GradientSender(backend, counters, **{**defaults, **sizes})


def lease(number: int, on_settled: Callable[[], None] = lambda: None) -> BatchLease:
    return BatchLease(number, BatchReference(0, 1, number), on_settled)


def test_everything_submitted_is_applied_before_drain_returns(fake_backend: Any) -> None:
    counters = Counters()
    returner = make(fake_backend, counters)
    for number in range(50):
        returner.submit(lease(number), [], scale=1.0)
    returner.drain(30)
    assert sorted(fake_backend.returned) == list(range(50))
    values = counters.snapshot()
    assert (values.gradients_submitted, values.batches_trained) == (50, 50)
    assert (values.rows_updated, values.rows_missing, values.skipped_slots) == (150, 50, 50)
    assert (counters.staleness().max, counters.staleness().mean) == (2, 2.0)


def test_one_worker_keeps_the_order(fake_backend: Any) -> None:
    returner = make(fake_backend, Counters(), num_workers=1)
    for number in range(20):
        returner.submit(lease(number), [], scale=1.0)
    returner.drain(30)
    assert fake_backend.returned == list(range(20))


def test_submit_waits_while_too_many_are_unacknowledged(fake_backend: Any) -> None:
    go_on = threading.Event()
    fake_backend.on_return = lambda number: go_on.wait(120)
    returner = make(fake_backend, Counters(), max_unacknowledged=2)
    returner.submit(lease(0), [], scale=1.0)
    returner.submit(lease(1), [], scale=1.0)
    third = threading.Thread(target=returner.submit, args=(lease(2), []), kwargs={"scale": 1.0})
    third.start()
    third.join(0.2)
    assert third.is_alive()
    go_on.set()
    third.join(120)
    returner.drain(30)
    assert sorted(fake_backend.returned) == [0, 1, 2]


def test_first_failure_names_the_batch_and_is_raised_by_submit_and_drain(fake_backend: Any, log: Any) -> None:
    def fail(number: int) -> None:
        raise NotFoundError(f"reference {number} has expired")

    fake_backend.on_return = fail
    told: list[PersiaError] = []
    failed = threading.Event()
    settled: list[int] = []

    def on_failure(failure: PersiaError) -> None:
        told.append(failure)
        failed.set()

    counters = Counters()
    returner = make(fake_backend, counters, num_workers=1, on_failure=on_failure)
    returner.submit(lease(7, lambda: settled.append(7)), [], scale=1.0)
    assert failed.wait(120)
    with pytest.raises(NotFoundError, match="gradient of batch 7: reference 7 has expired"):
        returner.submit(lease(8, lambda: settled.append(8)), [], scale=1.0)
    with pytest.raises(NotFoundError, match="batch 7"):
        returner.drain(30)
    assert settled == [7, 8]
    assert [str(failure) for failure in told] == ["the gradient of batch 7: reference 7 has expired"]
    assert counters.snapshot().batches_failed == 2
    assert [(record.batch_id, record.getMessage()) for record in log.records] == [(7, str(told[0]))]


def test_gradients_that_are_not_finite_are_named_once(fake_backend: Any, log: Any) -> None:
    fake_backend.num_nonfinite_slots = 2
    returner = make(fake_backend, Counters(), num_workers=1)
    for number in (5, 6):
        returner.submit(lease(number), [], scale=1.0)
    returner.drain(30)
    (record,) = log.records
    assert record.batch_id == 5
    assert record.getMessage().startswith("the gradients of 2 slots of batch 5 had NaN or Inf")


def test_bug_in_the_backend_is_an_internal_error(fake_backend: Any) -> None:
    def fail(number: int) -> None:
        raise KeyError("oops")

    fake_backend.on_return = fail
    returner = make(fake_backend, Counters())
    returner.submit(lease(1), [], scale=1.0)
    with pytest.raises(PersiaError, match="batch 1: KeyError: 'oops'"):
        returner.drain(30)


def test_drain_says_what_it_could_not_return(fake_backend: Any) -> None:
    go_on = threading.Event()
    fake_backend.on_return = lambda number: go_on.wait(120)
    returner = make(fake_backend, Counters(), num_workers=1)
    for number in (3, 4, 5):
        returner.submit(lease(number), [], scale=1.0)
    with pytest.raises(DeadlineExceededError, match=r"gradients of 3 batches .* \(batches 3, 4, 5\)"):
        returner.drain(0.05)
    go_on.set()


def test_other_gradients_go_on_after_a_failure(fake_backend: Any) -> None:
    def fail(number: int) -> None:
        if number == 0:
            raise UnavailableError("embedding worker 0 is gone")

    fake_backend.on_return = fail
    go_on = threading.Barrier(2)
    original = fake_backend.on_return

    def wait_then_fail(number: int) -> None:
        if number == 0:
            go_on.wait(120)
        original(number)

    fake_backend.on_return = wait_then_fail
    returner = make(fake_backend, Counters(), num_workers=1)
    returner.submit(lease(0), [], scale=1.0)
    returner.submit(lease(1), [], scale=1.0)
    go_on.wait(120)
    with pytest.raises(UnavailableError):
        returner.drain(30)
    assert fake_backend.returned == [1]


def test_batch_that_was_given_up_is_not_returned(fake_backend: Any) -> None:
    returner = make(fake_backend, Counters())
    given_up = lease(3)
    assert given_up.acquire()
    returner.submit(given_up, [], scale=1.0)
    returner.drain(30)
    assert fake_backend.returned == []


@pytest.mark.parametrize("step", ["_wait_for_room", "put_reserved"])
def test_interrupted_submit_leaves_the_batch_to_be_released(
    fake_backend: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    returner = make(fake_backend, Counters())
    monkeypatch.setattr(returner._queue, step, interrupt)
    interrupted = lease(3)
    with pytest.raises(KeyboardInterrupt):
        returner.submit(interrupted, [], scale=1.0)
    assert not interrupted.acquired
    returner.drain(30)
