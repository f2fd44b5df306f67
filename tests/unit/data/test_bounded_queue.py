"""A closed or failed queue wakes whoever waits."""

from __future__ import annotations

import threading

import pytest

from persia.errors import DeadlineExceededError
from persia.pipeline.queues import BoundedQueue, QueueClosed


def test_first_in_first_out_and_closed_after_the_last() -> None:
    queue: BoundedQueue[int] = BoundedQueue(2)
    queue.put(1)
    queue.put(2)
    queue.close()
    assert [queue.get(), queue.get()] == [1, 2]
    with pytest.raises(QueueClosed):
        queue.get()
    with pytest.raises(QueueClosed):
        queue.put(3)


def test_put_waits_for_room() -> None:
    queue: BoundedQueue[int] = BoundedQueue(1)
    queue.put(1)
    producer = threading.Thread(target=queue.put, args=(2,))
    producer.start()
    assert queue.get() == 1
    assert queue.get(timeout_s=30) == 2
    producer.join()


def test_failure_overtakes_the_items_and_stays() -> None:
    queue: BoundedQueue[int] = BoundedQueue(2)
    queue.put(1)
    queue.fail(ValueError("first"))
    queue.fail(ValueError("second"))
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            queue.get()


def test_close_wakes_a_blocked_producer() -> None:
    queue: BoundedQueue[int] = BoundedQueue(1)
    queue.put(1)
    outcome: list[str] = []

    def produce() -> None:
        try:
            queue.put(2)
        except QueueClosed:
            outcome.append("closed")

    producer = threading.Thread(target=produce)
    producer.start()
    assert queue.drain() in ([1], [1, 2])
    producer.join(120)
    assert outcome in (["closed"], [])
    assert not producer.is_alive()


def test_get_gives_up_in_time() -> None:
    with pytest.raises(DeadlineExceededError):
        BoundedQueue[int](1).get(timeout_s=0.01)


def test_reserved_room_is_kept_until_it_is_used_or_given_back() -> None:
    queue: BoundedQueue[int] = BoundedQueue(1)
    queue.reserve("first")
    waiting = threading.Thread(target=queue.put, args=(2,))
    waiting.start()
    queue.put_reserved("first", 1)  # never waits
    assert [queue.get(60), queue.get(60)] == [1, 2]
    waiting.join(60)
    queue.reserve("second")
    waiting = threading.Thread(target=queue.put, args=(3,))
    waiting.start()
    queue.cancel("second")
    queue.cancel("second")
    assert queue.get(60) == 3
    waiting.join(60)
    queue.reserve("third")
    queue.close()
    with pytest.raises(QueueClosed):
        queue.put_reserved("third", 4)
    with pytest.raises(QueueClosed):
        queue.reserve("fourth")
