"""Dynamic batching: requests that wait at the same time are looked up and computed as one batch.

While a batch is computed the next requests gather, so batches grow with the load by themselves; a delay is
only worth while where a model on a GPU leaves the queue empty too often.

The queue is native: requests of the gRPC port wait in it without Python, beside those that Python submits.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from persia._native import QueuedBatch, RequestQueue
from persia.embedding.data import PersiaBatch
from persia.errors import DeadlineExceededError, InternalError, PersiaError, UnavailableError
from persia.logger import get_default_logger
from persia.serving.batch_predict import Predict, Prediction
from persia.serving.protocol import CODES, message_of, status_of
from persia.serving.tensors import datatype_of

# Threads are daemons: a computation that takes longer than this does not keep the process.
_CLOSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """Of one server."""

    max_batch_size: int = 1024  # samples in one computation, and in one request
    max_delay_s: float = 0.0  # how long the first request of a batch waits for others
    max_queued: int = 512  # requests that wait; more are refused
    num_threads: int = 1  # batches computed at a time


@dataclass
class _Submitted:
    """A request of Python. The queue calls it when its deadline has passed, or its batch has failed."""

    future: Future[Prediction] = field(default_factory=Future)
    error: PersiaError | None = None  # of its batch: more exact than the code

    def __call__(self, code: int, message: str) -> None:
        if self.acquire():
            is_late = code == CODES["DEADLINE_EXCEEDED"]
            error = self.error or (DeadlineExceededError if is_late else InternalError)(message)
            self.future.set_exception(error)

    def acquire(self) -> bool:
        """False: its caller has cancelled it. From here on it cannot, so its result is set exactly once."""
        if self.future.cancelled():  # also asked by each part of a batch that failed
            return False
        return self.future.running() or self.future.set_running_or_notify_cancel()


class Batcher:
    """Threads between requests and a predictor. `submit` never waits; a full queue refuses."""

    def __init__(self, predict: Predict, options: BatchingOptions, model_name: str = "") -> None:
        """`model_name`: in answers to requests of the gRPC port."""
        self._predict, self._model_name = predict, model_name
        self.queue = RequestQueue(
            options.max_batch_size, options.max_delay_s, options.max_queued, options.num_threads
        )
        self._threads = [
            threading.Thread(target=self._run, name=f"persia-predict-{i}", daemon=True)
            for i in range(options.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batch: PersiaBatch, timeout_s: float) -> Future[Prediction]:
        """Queues a batch. Cancelling the future gives it up.

        InvalidArgumentError: more samples than a batch may have; ResourceExhaustedError: the queue is full,
        or so long that the deadline would pass before the answer; UnavailableError: it is closed.
        """
        submitted = _Submitted()
        # The deadline may pass while the request is parsed: then it is late, not invalid.
        queued = self.queue.submit(batch.to_bytes(), max(0.0, timeout_s), submitted)

        def give_up(future: Future[Prediction]) -> None:
            if future.cancelled():
                queued.give_up()

        submitted.future.add_done_callback(give_up)
        return submitted.future

    @property
    def num_waiting(self) -> int:
        """Requests whose batch has not begun."""
        return self.queue.num_waiting

    @property
    def num_running(self) -> int:
        """Requests whose batch is being computed."""
        return self.queue.num_running

    def close(self) -> None:
        """Answers what is queued, and ends."""
        self.queue.close()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (batch := self.queue.next()) is not None:
            try:
                self._answer(batch)
            except Exception as failure:  # it must not end the thread, which all later requests need
                error = _error_of(failure)
                if batch.num_requests > 0:
                    batch.fail(CODES["INTERNAL"], message_of(error))

    def _answer(self, batch: QueuedBatch) -> None:
        receivers = [(to, begin, size) for to, begin, size in batch.receivers() if to.acquire()]
        try:
            answer = self._predict(PersiaBatch.from_bytes(batch.message()))
            outputs = [(datatype_of(output.dtype.name), output) for output in answer.outputs]
            batch.answer(self._model_name, answer.version, list(answer.parameters), outputs)
        except Exception as failure:
            # One batch's fault must not be the others': each gets an answer of its own. But a peer that does
            # not answer would not answer them one by one either, and each would wait for it.
            if batch.num_requests > 1 and not isinstance(failure, (UnavailableError, DeadlineExceededError)):
                for part in batch.split():
                    self._answer(part)
                return
            error = _error_of(failure)
            for receiver, _, _ in receivers:
                receiver.error = error
            batch.fail(CODES[status_of(error)[0]], message_of(error))
        else:
            for receiver, begin, size in receivers:
                own = [output[begin : begin + size] for output in answer.outputs]
                receiver.future.set_result(replace(answer, outputs=own))


def _error_of(failure: Exception) -> PersiaError:
    if isinstance(failure, PersiaError):
        return failure
    get_default_logger().error("a prediction failed", exc_info=failure)
    return InternalError(f"the prediction failed: {type(failure).__name__}: {failure}")
