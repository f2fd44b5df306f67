"""Answers of computing threads reach the requests that wait on the event loop, many with one wake-up."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest

from persia.errors import DeadlineExceededError, UnavailableError
from persia.serving import inference as module
from persia.serving.batch_predict import Prediction
from persia.serving.inference import Inference

NUM_REQUESTS = 40
WAIT_S = 60.0


class Queue:
    """A batcher whose answers the test gives."""

    def __init__(self) -> None:
        self.futures: list[Future[Prediction]] = []

    def submit(self, _batch: Any, _timeout_s: float) -> Future[Prediction]:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def inference(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Inference:
    model = Mock()
    model.settings.name = "ads"
    monkeypatch.setattr(module, "batch_of", lambda tensors, _signature: tensors)
    return Inference(model, queue, Mock(), timeout_s=WAIT_S)  # type: ignore[arg-type]


async def started(inference: Inference, queue: Queue, count: int) -> list[asyncio.Task[Prediction]]:
    tasks = [asyncio.create_task(inference.infer("", [])) for _ in range(count)]
    while len(queue.futures) < count:
        await asyncio.sleep(0)
    return tasks


def test_a_batch_of_answers_wakes_the_loop_once(inference: Inference, queue: Queue) -> None:
    async def scenario() -> tuple[list[Any], int]:
        tasks = await started(inference, queue, NUM_REQUESTS)
        loop = asyncio.get_running_loop()
        wakes = Mock(side_effect=loop.call_soon_threadsafe)

        def answer() -> None:
            for number, future in enumerate(queue.futures[:-1]):
                future.set_result(Prediction(str(number), []))
            queue.futures[-1].set_exception(UnavailableError("no worker"))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", wakes)
            thread = threading.Thread(target=answer)
            thread.start()
            thread.join(WAIT_S)  # the loop stands meanwhile, as it does while it reads another request
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
        return answers, wakes.call_count

    answers, num_wakes = asyncio.run(scenario())
    assert [answer.version for answer in answers[:-1]] == [str(i) for i in range(NUM_REQUESTS - 1)]
    assert isinstance(answers[-1], UnavailableError)
    assert num_wakes == 1


def test_later_answers_wake_the_loop_again(inference: Inference, queue: Queue) -> None:
    async def scenario() -> list[str]:
        versions = []
        for number in range(3):
            (task,) = await started(inference, queue, 1)
            queue.futures.pop().set_result(Prediction(str(number), []))
            versions.append((await asyncio.wait_for(task, WAIT_S)).version)
        return versions

    assert asyncio.run(scenario()) == ["0", "1", "2"]


def test_a_client_that_leaves_cancels_its_request(inference: Inference, queue: Queue) -> None:
    async def scenario() -> None:
        left, stays = await started(inference, queue, 2)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert queue.futures[0].cancelled(), "it is not computed"
        queue.futures[1].set_result(Prediction("7", []))
        assert (await asyncio.wait_for(stays, WAIT_S)).version == "7"

    asyncio.run(scenario())


def test_an_answer_after_its_client_has_left_is_dropped(inference: Inference, queue: Queue) -> None:
    async def scenario() -> None:
        left, stays = await started(inference, queue, 2)
        assert queue.futures[0].set_running_or_notify_cancel(), "its batch is computed"
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        for future in queue.futures:
            future.set_result(Prediction("7", []))
        assert (await asyncio.wait_for(stays, WAIT_S)).version == "7"

    asyncio.run(scenario())


def test_a_request_that_nothing_answers_ends_with_its_deadline(inference: Inference, queue: Queue) -> None:
    async def scenario() -> None:
        asked = inference.infer("", [], left_s=0.01)
        with pytest.raises(DeadlineExceededError, match="before its answer"):
            await asyncio.wait_for(asked, WAIT_S)
        assert queue.futures[0].cancelled(), "it is not computed"

    asyncio.run(scenario())
