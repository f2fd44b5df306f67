"""The rank's buffer of submitted batches: bounded per loader, ordered or not, and honest about its end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from persia.errors import DeadlineExceededError, StreamClosedError, UnavailableError
from persia.messaging.payloads import EndOfStream, SubmittedBatch
from persia.pipeline.queues import QueueClosed
from persia.pipeline.receive import Inbox, Offer


def submitted(batch_id: int, num_loaders: int = 1, reference: int | None = None) -> SubmittedBatch:
    return SubmittedBatch(
        batch_id=batch_id,
        worker_incarnation=9,
        reference=batch_id + 100 if reference is None else reference,
        worker_index=0,
        loader_index=batch_id % num_loaders,
        loader_replicas=num_loaders,
        requires_grad=True,
        dense=b"",
    )


def offer(inbox: Inbox, batch_id: int, num_loaders: int = 1, **kwargs: Any) -> Offer:
    return inbox.offer(submitted(batch_id, num_loaders, **kwargs), hold_s=0.0)


def take_all(inbox: Inbox) -> list[int]:
    taken = []
    while (batch := inbox.take(1.0)) is not None:
        taken.append(batch.batch_id)
    return taken


def test_ordered_takes_by_batch_id_unordered_by_arrival() -> None:
    for ordered, expected in ((True, [0, 1, 2, 3]), (False, [1, 3, 0, 2])):
        inbox = Inbox(0, 1, 4, ordered=ordered)
        for batch_id in (1, 3, 0, 2):
            assert offer(inbox, batch_id, 2) is Offer.QUEUED
        for loader in (0, 1):
            inbox.end(EndOfStream(loader, 2, 2))
        assert take_all(inbox) == expected


def test_ordered_waits_for_the_slow_loader_although_the_fast_one_filled_its_share() -> None:
    inbox = Inbox(0, 1, 2, ordered=True)
    assert [offer(inbox, batch_id, 2) for batch_id in (1, 3, 5)] == [Offer.QUEUED, Offer.QUEUED, Offer.FULL]
    with pytest.raises(DeadlineExceededError):
        inbox.take(0.01)
    assert offer(inbox, 0, 2) is Offer.QUEUED
    assert [inbox.take(1.0).batch_id for _ in range(2)] == [0, 1]  # type: ignore[union-attr]


def test_offer_waits_for_room() -> None:
    inbox = Inbox(0, 1, 1, ordered=False)
    offer(inbox, 0)
    outcome: list[Offer] = []
    waiting = threading.Thread(target=lambda: outcome.append(inbox.offer(submitted(1), hold_s=30.0)))
    waiting.start()
    assert inbox.take(30).batch_id == 0  # type: ignore[union-attr]
    waiting.join(120)
    assert outcome == [Offer.QUEUED]


def test_repetition_is_dropped_and_a_new_registration_reported() -> None:
    inbox = Inbox(0, 1, 4, ordered=False)
    offer(inbox, 0)
    assert offer(inbox, 0) is Offer.REPEATED
    assert offer(inbox, 0, reference=7) is Offer.SUPERSEDED
    inbox.end(EndOfStream(0, 1, 1))
    assert take_all(inbox) == [0]


def test_repetition_while_the_first_waits_for_room_is_queued_once() -> None:
    inbox = Inbox(0, 1, 1, ordered=False)
    offer(inbox, 0)
    outcomes: list[Offer] = []
    waiting = [
        threading.Thread(target=lambda: outcomes.append(inbox.offer(submitted(1), hold_s=30.0)))
        for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    inbox.take(30)
    inbox.take(30)
    for thread in waiting:
        thread.join(120)
    assert sorted(outcome.value for outcome in outcomes) == ["queued", "repeated"]


def test_failed_loader_is_raised_after_the_batches_before() -> None:
    inbox = Inbox(0, 1, 4, ordered=False)
    offer(inbox, 0)
    inbox.end(EndOfStream(0, 1, 1, error="ValueError: bad row 17"))
    assert inbox.take(1.0).batch_id == 0  # type: ignore[union-attr]
    with pytest.raises(
        UnavailableError, match="data loader 0 ended with an error after 1 batches: ValueError: bad row 17"
    ):
        inbox.take(1.0)


def test_failed_loader_is_not_hidden_by_those_that_go_on() -> None:
    inbox = Inbox(0, 1, 4, ordered=False)
    offer(inbox, 0, 2)
    inbox.end(EndOfStream(1, 2, 0, error="ValueError: bad row 17"))
    offer(inbox, 2, 2)
    assert inbox.take(1.0).batch_id == 0  # type: ignore[union-attr]
    with pytest.raises(UnavailableError, match="data loader 1 ended with an error"):
        inbox.take(1.0)
    assert [batch.batch_id for batch in inbox.close()] == [2]


def test_close_wakes_take_returns_the_rest_and_refuses_more() -> None:
    inbox = Inbox(0, 1, 4, ordered=False)
    offer(inbox, 0)
    offer(inbox, 1)
    assert [batch.batch_id for batch in inbox.close()] == [0, 1]
    with pytest.raises(QueueClosed):
        inbox.take(1.0)
    with pytest.raises(StreamClosedError, match="stopped taking batches"):
        offer(inbox, 2)


def test_stale_loaders_are_those_that_owe_something() -> None:
    inbox = Inbox(0, 1, 4, ordered=False)
    offer(inbox, 0, 3)
    inbox.end(EndOfStream(1, 3, 0))
    assert inbox.stale_loaders(0.0) == [0, 2]
    # Never seen, also where the machine has not been up for so long.
    assert inbox.stale_loaders(time.monotonic() + 1000.0) == [2]
    inbox.mark_alive(2)
    assert inbox.stale_loaders(1000.0) == []
    assert (inbox.has_seen(0), inbox.num_loaders) == (True, 3)
