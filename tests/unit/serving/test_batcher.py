"""Requests that wait together are computed together, and each gets its own answer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from persia.embedding.data import IDTypeFeature, NonIDTypeFeature, PersiaBatch
from persia.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.serving.batch_predict import Prediction, layout_of, merged, split
from persia.serving.batcher import Batcher, BatchingOptions
from tests.following import wait_until


def make_batch(*ids: list[int], weights: bool = False, dtype: Any = np.float32) -> PersiaBatch:
    samples = [np.array(sample, np.uint64) for sample in ids]
    weight = [np.array(sample, np.float32) for sample in ids] if weights else None
    dense = np.array([[sum(sample)] for sample in ids], dtype)
    return PersiaBatch(
        [IDTypeFeature("user", samples, weight)], [NonIDTypeFeature(dense, "sum")], requires_grad=False
    )


class Echo:
    """Returns each sample's dense value; computes when told to."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may_run = threading.Semaphore(0)
        self.running = threading.Event()

    def __call__(self, batch: PersiaBatch) -> Prediction:
        self.running.set()
        assert self.may_run.acquire(timeout=60)
        self.sizes.append(batch.batch_size)
        data = batch.non_id_type_features[0].data
        if (data < 0).any():
            raise InvalidArgumentError("negative")
        if (data == 13).any():
            raise KeyError("thirteen")
        return Prediction("7", [data])


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def make(echo: Echo) -> Iterator[Callable[..., Batcher]]:
    made: list[Batcher] = []

    def start(**options: Any) -> Batcher:
        made.append(Batcher(echo, BatchingOptions(**options)))
        return made[-1]

    yield start
    for _ in range(100):
        echo.may_run.release()
    for batcher in made:
        batcher.close()


def values(future: Any) -> list[float]:
    answer = future.result(120)
    assert answer.version == "7"
    return [float(value) for value in answer.outputs[0][:, 0]]


@pytest.mark.parametrize("weights", [False, True])
def test_merging_is_one_batch_of_all_samples(weights: bool) -> None:
    parts = [
        make_batch([1, 2], [], weights=weights),
        make_batch([3], weights=weights),
        make_batch([], [4, 5], weights=weights),
    ]
    whole = merged(parts)
    expected = make_batch([1, 2], [], [3], [], [4, 5], weights=weights)
    assert whole.to_bytes() == expected.to_bytes()
    assert [[float(x) for x in part[0][:, 0]] for part in split([np.eye(5)], [2, 1, 2])] == [
        [1.0, 0.0],
        [0.0],
        [0.0, 0.0],
    ]


def test_features_with_other_numbers_of_ids_keep_their_own_offsets() -> None:
    def batch(users: list[list[int]], items: list[list[int]]) -> PersiaBatch:
        samples = [[np.array(ids, np.uint64) for ids in feature] for feature in (users, items)]
        weights = [np.array(ids, np.float32) / 2 for ids in items]
        return PersiaBatch(
            [IDTypeFeature("user", samples[0]), IDTypeFeature("item", samples[1], weights)],
            requires_grad=False,
        )

    parts = [batch([[1], [2, 3]], [[], [4]]), batch([[5]], [[6, 7, 8]]), batch([[], [9]], [[10], []])]
    whole = batch([[1], [2, 3], [5], [], [9]], [[], [4], [6, 7, 8], [10], []])
    assert merged(parts).to_bytes() == whole.to_bytes()


def test_layouts_differ_by_names_weights_and_dtype() -> None:
    layouts = [
        layout_of(make_batch([1])),
        layout_of(make_batch([1], weights=True)),
        layout_of(make_batch([1], dtype=np.float64)),
    ]
    assert len(set(layouts)) == 3
    assert layout_of(make_batch([5], [6])) == layouts[0]


def test_requests_that_wait_are_one_batch(make: Any, echo: Echo) -> None:
    batcher = make(max_batch_size=4)
    first = batcher.submit(make_batch([1]), 60)
    assert echo.running.wait(120)
    later = [batcher.submit(make_batch([i], [i + 1]), 60) for i in (2, 4, 6)]
    other = batcher.submit(make_batch([8], dtype=np.float64), 60)
    for _ in range(4):
        echo.may_run.release()
    assert values(first) == [1]
    assert [values(future) for future in later] == [[2, 3], [4, 5], [6, 7]]
    assert values(other) == [8]
    assert echo.sizes == [1, 4, 2, 1], "at most four samples at once, of one layout"


def test_a_bad_request_does_not_fail_its_neighbours(make: Any, echo: Echo) -> None:
    batcher = make()
    batcher.submit(make_batch([1]), 60)
    assert echo.running.wait(120)
    good, other = batcher.submit(make_batch([2]), 10), batcher.submit(make_batch([13]), 60)
    bad = PersiaBatch(
        [IDTypeFeature("user", [np.array([1], np.uint64)])],
        [NonIDTypeFeature(np.array([[-1.0]], np.float32), "sum")],
        requires_grad=False,
    )
    refused = batcher.submit(bad, 60)
    for _ in range(10):
        echo.may_run.release()
    assert values(good) == [2]
    with pytest.raises(InvalidArgumentError, match="negative"):
        refused.result(120)
    with pytest.raises(InternalError, match="KeyError: 'thirteen'"):
        other.result(120)


def test_a_request_that_is_cancelled_before_its_batch_fails(
    make: Any, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = make()
    batcher.submit(make_batch([1]), 60)
    assert echo.running.wait(120)
    given_up, bad = batcher.submit(make_batch([2]), 60), batcher.submit(make_batch([13]), 60)
    answer = batcher._answer

    def answer_later(batch: Any) -> None:
        given_up.cancel()  # when its batch is taken, and has not begun
        answer(batch)

    monkeypatch.setattr(batcher, "_answer", answer_later)
    for _ in range(10):
        echo.may_run.release()
    with pytest.raises(InternalError, match="KeyError: 'thirteen'"):
        bad.result(120)
    assert given_up.cancelled()
    assert values(batcher.submit(make_batch([3]), 60)) == [3]


def test_a_fault_of_our_own_does_not_end_the_thread(
    make: Any, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher, begun = make(), threading.Event()

    def fail(_batch: Any) -> None:
        begun.set()
        raise RuntimeError("a fault")

    monkeypatch.setattr(batcher, "_answer", fail)
    failed = batcher.submit(make_batch([1]), 60)
    assert begun.wait(120)
    wait_until(lambda: batcher.num_running == 0)
    with pytest.raises(InternalError, match="RuntimeError: a fault"):
        failed.result(120)
    monkeypatch.undo()
    echo.may_run.release()
    assert values(batcher.submit(make_batch([2]), 60)) == [2]


def test_full_queue_and_large_batches_are_refused(make: Any, echo: Echo) -> None:
    batcher = make(max_queued=2, max_batch_size=3)
    with pytest.raises(InvalidArgumentError, match="4 samples, this server takes 3"):
        batcher.submit(make_batch([1], [2], [3], [4]), 60)
    batcher.submit(make_batch([1]), 60)
    assert echo.running.wait(120)
    for _ in range(2):
        batcher.submit(make_batch([1]), 60)
    with pytest.raises(ResourceExhaustedError, match="2 requests wait already"):
        batcher.submit(make_batch([1]), 60)


def test_nothing_is_computed_that_nobody_waits_for(make: Any, echo: Echo) -> None:
    batcher = make()
    batcher.submit(make_batch([1]), 60)
    assert echo.running.wait(120)
    late, given_up = batcher.submit(make_batch([2]), 0.01), batcher.submit(make_batch([3]), 60)
    kept = batcher.submit(make_batch([4]), 60)
    assert given_up.cancel()
    time.sleep(0.05)
    for _ in range(2):
        echo.may_run.release()
    assert values(kept) == [4]
    with pytest.raises(DeadlineExceededError, match="while it was queued"):
        late.result(120)
    assert echo.sizes == [1, 1]


@pytest.mark.parametrize(("value", "error"), [(1, None), (13, InternalError)])
def test_no_request_runs_once_the_last_has_its_answer(make: Any, echo: Echo, value: int, error: Any) -> None:
    batcher = make()
    future = batcher.submit(make_batch([value]), 60)
    seen: list[int] = []
    assert echo.running.wait(120)
    future.add_done_callback(lambda _: seen.append(batcher.num_running))  # by the thread that answers
    assert batcher.num_running == 1
    echo.may_run.release()
    with pytest.raises(error) if error else contextlib.nullcontext():
        assert values(future) == [value]
    batcher.close()
    assert seen == [0]


def test_a_deadline_that_has_passed_is_not_invalid(make: Any, echo: Echo) -> None:
    batcher = make()
    running = batcher.submit(make_batch([1]), 60)
    assert echo.running.wait(120)
    late = batcher.submit(make_batch([2]), -0.1)
    echo.may_run.release()
    assert values(running) == [1]
    with pytest.raises(DeadlineExceededError):
        late.result(120)


def test_closing_answers_what_is_queued(make: Any, echo: Echo) -> None:
    batcher = make()
    futures = [batcher.submit(make_batch([i]), 60) for i in range(3)]
    for _ in range(3):
        echo.may_run.release()
    batcher.close()
    assert [values(future) for future in futures] == [[0], [1], [2]]
    with pytest.raises(UnavailableError, match="stopping"):
        batcher.submit(make_batch([1]), 60)


def test_a_delay_lets_requests_gather(make: Any, echo: Echo) -> None:
    batcher = make(max_delay_s=10.0, max_batch_size=3)
    futures = [batcher.submit(make_batch([i]), 60) for i in range(3)]
    echo.may_run.release()
    assert [values(future) for future in futures] == [[0], [1], [2]], "a full batch does not wait"
    assert echo.sizes == [3]


def test_a_request_that_could_not_be_answered_in_time_is_refused_at_once(
    echo: Echo, make: Callable[..., Batcher]
) -> None:
    batcher = make(max_batch_size=2)
    # Three seconds for two samples: the first batch tells what a sample takes.
    first = batcher.submit(make_batch([1], [2]), 60)
    assert echo.running.wait(120)
    time.sleep(3.0)
    echo.may_run.release()
    first.result(120)
    echo.running.clear()
    # The server is idle: it may be faster by now. Longer than a busy machine keeps its thread.
    running = batcher.submit(make_batch([1], [2]), 2.5)
    assert echo.running.wait(120)
    patient = [batcher.submit(make_batch([1], [2]), 60) for _ in range(2)]
    started = time.monotonic()
    with pytest.raises(
        ResourceExhaustedError,
        match=r"in \d+\.\d+ s, more than 60 % of the (4\.\d\d|5\.00) s that the client",
    ):
        batcher.submit(make_batch([1], [2]), 5.0)
    assert time.monotonic() - started < 5.0, "it was refused without a wait"
    patient.append(batcher.submit(make_batch([1], [2]), 60))
    for _ in range(4):
        echo.may_run.release()
    for future in (running, *patient):
        assert future.result(120).version == "7"
