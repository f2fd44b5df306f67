"""The total order of batches, and the end of the stream, for any number of loaders and ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import FailedPreconditionError, InvalidArgumentError
from persia.pipeline.receive import StreamOrder
from persia.pipeline.send import LoaderShare


def batch_ids(lengths: list[int], rank: int, world_size: int) -> list[list[int]]:
    """By loader, the batch_ids that the definition gives to `rank`."""
    num_loaders = len(lengths)
    ids = [[s * num_loaders + i for s in range(length)] for i, length in enumerate(lengths)]
    return [[batch_id for batch_id in of_loader if batch_id % world_size == rank] for of_loader in ids]


def deliver(order: StreamOrder, loader: int, num_loaders: int, batch_id: int) -> None:
    order.introduce(loader, num_loaders)
    assert not order.is_repeated(batch_id, loader)
    order.queued(loader)


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
        order = StreamOrder(rank, world_size)
        expected = batch_ids(lengths, rank, world_size)
        events: list[list[int | None]] = [[*ids, None] for ids in expected]
        arrived: set[int] = set()
        taken: list[int] = []
        while any(events):
            loader = rng.choice([i for i, queue in enumerate(events) if queue])
            batch_id = events[loader].pop(0)
            if batch_id is None:
                order.introduce(loader, len(lengths))
                order.end(loader, lengths[loader])
            else:
                deliver(order, loader, len(lengths), batch_id)
                arrived.add(batch_id)
            while (nxt := order.next_loader()) is not None and set(expected[nxt]) & arrived - set(taken):
                taken.append(min(set(expected[nxt]) & arrived - set(taken)))
                order.taken(nxt)
        assert taken == sorted(batch_id for ids in expected for batch_id in ids)
        assert order.finished


def test_not_finished_before_any_loader_was_heard() -> None:
    assert not StreamOrder(0, 1).finished


def test_end_before_the_last_batch_was_taken_is_not_the_end() -> None:
    order = StreamOrder(0, 1)
    deliver(order, 0, 1, 0)
    order.end(0, 1)
    assert not order.finished
    assert order.unfinished_loaders() == []
    order.taken(0)
    assert order.finished


def test_loader_without_batches_for_this_rank_is_not_waited_for() -> None:
    order = StreamOrder(0, 2)
    order.introduce(0, 2)  # loader 1 of 2 only sends odd batch_ids
    order.end(0, 0)
    assert order.finished


def test_repetition_is_recognised() -> None:
    order = StreamOrder(0, 1)
    deliver(order, 0, 1, 0)
    assert order.is_repeated(0, 0)


@pytest.mark.parametrize(
    ("batch_id", "match"),
    [(4, "expected batch 0 from data loader 0 and got 4"), (1, "does not belong to rank 0")],
)
def test_gaps_and_strays_are_refused(batch_id: int, match: str) -> None:
    order = StreamOrder(0, 2)
    order.introduce(0, 1)
    with pytest.raises((FailedPreconditionError, InvalidArgumentError), match=match):
        order.is_repeated(batch_id, 0)


def test_disagreeing_loader_counts_are_refused() -> None:
    order = StreamOrder(0, 1)
    order.introduce(0, 2)
    with pytest.raises(FailedPreconditionError, match="there are 3 loaders, another said 2"):
        order.introduce(1, 3)


def test_end_must_agree_with_what_arrived() -> None:
    order = StreamOrder(0, 1)
    deliver(order, 0, 1, 0)
    with pytest.raises(FailedPreconditionError, match="received 1"):
        order.end(0, 3)


def test_end_may_be_repeated_but_not_contradicted() -> None:
    order = StreamOrder(1, 2)
    order.introduce(0, 1)
    order.end(0, 1)
    order.end(0, 1)
    with pytest.raises(FailedPreconditionError, match="before after 1"):
        order.end(0, 0)


def test_batch_after_the_end_is_refused() -> None:
    order = StreamOrder(0, 1)
    order.introduce(0, 1)
    order.end(0, 0)
    with pytest.raises(FailedPreconditionError, match="one DataCtx"):
        order.is_repeated(0, 0)
