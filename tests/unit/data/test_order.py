"""The total order of batches, and the end of the stream, for any number of loaders and ranks."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from persia.messaging.payloads import EndOfStream, SubmittedBatch
from persia.pipeline.receive import Inbox, Offer
from persia.pipeline.send import LoaderShare


def batch_ids(lengths: list[int], rank: int, world_size: int) -> list[list[int]]:
    """By loader, the batch_ids that the definition gives to `rank`."""
    num_loaders = len(lengths)
    ids = [[s * num_loaders + i for s in range(length)] for i, length in enumerate(lengths)]
    return [[batch_id for batch_id in of_loader if batch_id % world_size == rank] for of_loader in ids]


def make_inbox(rank: int, world_size: int) -> Inbox:
    return Inbox(rank, world_size, 100, ordered=True)


def offer(inbox: Inbox, batch_id: int, num_loaders: int = 1, loader: int | None = None) -> Offer:
    batch = SubmittedBatch(
        batch_id=batch_id,
        worker_incarnation=9,
        reference=batch_id,
        worker_index=0,
        loader_index=batch_id % num_loaders if loader is None else loader,
        loader_replicas=num_loaders,
        requires_grad=True,
        dense=b"",
    )
    return inbox.offer(batch, hold_s=0.0)


def take(inbox: Inbox) -> int | None:
    batch = inbox.take(0.0)
    return None if batch is None else batch.batch_id


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 40))
def test_shares_partition_every_loaders_batches(num_loaders: int, world_size: int, num_batches: int) -> None:
    for loader in range(num_loaders):
        shares = [LoaderShare.of(loader, num_loaders, rank, world_size) for rank in range(world_size)]
        ids = sorted(share.batch_id(k) for share in shares for k in range(share.count(num_batches)))
        assert ids == [s * num_loaders + loader for s in range(num_batches)]


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_merge_is_by_batch_id_whatever_the_arrival_order(
    lengths: list[int], world_size: int, seed: int
) -> None:
    rng = random.Random(seed)
    for rank in range(world_size):
        inbox = make_inbox(rank, world_size)
        expected = batch_ids(lengths, rank, world_size)
        events: list[list[int | None]] = [[*ids, None] for ids in expected]
        taken: list[int | None] = []
        while any(events):
            loader = rng.choice([i for i, queue in enumerate(events) if queue])
            batch_id = events[loader].pop(0)
            if batch_id is None:
                inbox.end(EndOfStream(loader, len(lengths), lengths[loader]))
            else:
                assert offer(inbox, batch_id, len(lengths)) is Offer.QUEUED
            with contextlib.suppress(DeadlineExceededError):  # the next one did not arrive yet
                while True:
                    taken.append(take(inbox))
                    if taken[-1] is None:
                        break
        assert taken[-1] is None
        assert [batch_id for batch_id in taken if batch_id is not None] == sorted(
            batch_id for ids in expected for batch_id in ids
        )


def test_not_finished_before_any_loader_has_sent_something() -> None:
    with pytest.raises(DeadlineExceededError):
        take(make_inbox(0, 1))


def test_end_before_the_last_batch_was_taken_is_not_the_end() -> None:
    inbox = make_inbox(0, 1)
    offer(inbox, 0)
    inbox.end(EndOfStream(0, 1, 1))
    assert inbox.stale_loaders(0.0) == []
    assert [take(inbox), take(inbox)] == [0, None]


def test_loader_without_batches_for_this_rank_is_not_waited_for() -> None:
    inbox = make_inbox(0, 2)
    inbox.end(EndOfStream(0, 2, 0))  # loader 1 of 2 only sends odd batch_ids
    assert take(inbox) is None


@pytest.mark.parametrize(
    ("batch_id", "match"),
    [(4, "expected batch 0 from data loader 0 and got 4"), (1, "does not belong to rank 0")],
)
def test_gaps_and_strays_are_refused(batch_id: int, match: str) -> None:
    with pytest.raises((FailedPreconditionError, InvalidArgumentError), match=match):
        offer(make_inbox(0, 2), batch_id)


def test_a_batch_of_another_loader_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="batch 1 from data loader 0 of 2 does not belong"):
        offer(make_inbox(0, 1), 1, 2, loader=0)


def test_disagreeing_loader_counts_are_refused() -> None:
    inbox = make_inbox(0, 1)
    offer(inbox, 0, 2)
    with pytest.raises(FailedPreconditionError, match="there are 3 loaders, another said 2"):
        offer(inbox, 1, 3)
    with pytest.raises(InvalidArgumentError, match="index 3 is not below its replica size 2"):
        offer(inbox, 1, 2, loader=3)


def test_end_must_agree_with_what_arrived() -> None:
    inbox = make_inbox(0, 1)
    offer(inbox, 0)
    with pytest.raises(FailedPreconditionError, match="received 1"):
        inbox.end(EndOfStream(0, 1, 3))


def test_end_may_be_repeated_but_not_contradicted() -> None:
    inbox = make_inbox(1, 2)
    for _ in range(2):
        inbox.end(EndOfStream(0, 1, 1))
    with pytest.raises(FailedPreconditionError, match="before after 1"):
        inbox.end(EndOfStream(0, 1, 0))


def test_batch_after_the_end_is_refused() -> None:
    inbox = make_inbox(0, 1)
    inbox.end(EndOfStream(0, 1, 0))
    with pytest.raises(FailedPreconditionError, match="one DataCtx"):
        offer(inbox, 0)
