"""Dynamic batching: requests that wait at the same time are looked up and computed as one batch.

While a batch is computed the next requests gather, so batches grow with the load by themselves; a delay is
only worth while where a model on a GPU leaves the queue empty too often.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from persia.embedding.data import PersiaBatch
from persia.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    PersiaError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.serving.batch_predict import Layout, Predict, Prediction, layout_of, predict_together

# Threads are daemons: a computation that takes longer than this does not keep the process.
_CLOSE_S = 10.0
_FLAT = 1e-3  # sizes whose variance is a smaller share of their square are equal
_LATELY = 0.1  # the share of the last batch in averages


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """Of one server."""

    max_batch_size: int = 1024  # samples in one computation, and in one request
    max_delay_s: float = 0.0  # how long the first request of a batch waits for others
    max_queued: int = 512  # requests that wait; more are refused
    num_threads: int = 1  # batches computed at a time


@dataclass
class _Request:
    batch: PersiaBatch
    expires_at: float  # by time.monotonic(); the client waits no longer
    future: Future[Prediction] = field(default_factory=Future)
    layout: Layout = ()

    def is_wanted(self) -> bool:
        """Acquires it for computation. False: its caller has cancelled it, or its deadline has passed."""
        # From here on the future cannot be cancelled, so its result is set exactly once.
        if not self.future.set_running_or_notify_cancel():
            return False
        if time.monotonic() < self.expires_at:
            return True
        self.future.set_exception(
            DeadlineExceededError("the request's deadline passed while it was queued: the server is behind")
        )
        return False


class _BatchTimes:
    """How long batches took lately: a straight line, with a time for each batch and one for each sample."""

    def __init__(self) -> None:
        self._means: list[float] = []  # of size, seconds, their product and the square of the size

    def add(self, num_samples: int, took_s: float) -> None:
        new = [num_samples, took_s, num_samples * took_s, num_samples**2]
        pairs = zip(self._means, new, strict=True)
        self._means = [mean + _LATELY * (value - mean) for mean, value in pairs] if self._means else new

    def estimated_s(self, num_batches: int, num_samples: int) -> float:
        """Of so many batches with so many samples in all; 0: none was computed yet."""
        if not self._means:
            return 0.0
        size, took_s, product, square = self._means
        variance = square - size**2
        # Of equal sizes nobody knows: taken for the batches', so that no request is refused that need not be.
        sample_s = max(0.0, product - size * took_s) / variance if variance > _FLAT * square else 0.0
        batch_s = max(0.0, took_s - sample_s * size)
        return num_batches * batch_s + num_samples * sample_s


class Batcher:
    """Threads between requests and a predictor. `submit` never waits; a full queue refuses."""

    def __init__(self, predict: Predict, options: BatchingOptions) -> None:
        self._predict = predict
        self._options = options
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._num_samples = 0  # of the requests that wait
        self._times = _BatchTimes()
        self._num_running = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"persia-predict-{i}", daemon=True)
            for i in range(options.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batch: PersiaBatch, timeout_s: float) -> Future[Prediction]:
        """Queues a batch. Cancelling the future gives it up.

        InvalidArgumentError: more samples than a batch may have; ResourceExhaustedError: the queue is full,
        or so long that the deadline would pass before the answer.
        """
        if batch.batch_size > self._options.max_batch_size:
            raise InvalidArgumentError(
                f"the batch has {batch.batch_size} samples, this server takes {self._options.max_batch_size} "
                "at a time: send several requests, or raise --max-batch-size"
            )
        request = _Request(batch, time.monotonic() + timeout_s, layout=layout_of(batch))
        with self._changed:
            if self._closed:
                raise UnavailableError("the server is stopping: ask another one")
            # Refused and not held: behind a queue this long the deadline would pass, and a client can ask
            # another server.
            if len(self._waiting) >= self._options.max_queued:
                raise ResourceExhaustedError(
                    f"{len(self._waiting)} requests wait already (--max-queued): try again later, or ask "
                    "another server"
                )
            if (wait_s := self._estimated_s(batch.batch_size)) > timeout_s:
                raise ResourceExhaustedError(
                    f"the answer would take {wait_s:.2f} s, and the client waits for {timeout_s:.2f} s: try "
                    "again later, or ask another server"
                )
            self._waiting.append(request)
            self._num_samples += batch.batch_size
            self._changed.notify()
        return request.future

    @property
    def num_waiting(self) -> int:
        """Requests whose batch has not begun."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests whose batch is being computed."""
        return self._num_running

    def close(self) -> None:
        """Answers what is queued, and ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            gathered = self._gather()
            if gathered is None:
                return
            wanted = [request for request in gathered if request.is_wanted()]
            if wanted:
                with self._changed:
                    self._num_running += len(wanted)
                self._answer(wanted)

    def _gather(self) -> list[_Request] | None:
        """Requests of one layout that fit one batch, the oldest first; None when it is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            # Counted from the moment a thread is free, so that a busy server adds no delay to that of the
            # queue.
            if self._options.max_delay_s > 0:
                size = self._options.max_batch_size
                self._changed.wait_for(
                    lambda: self._closed or self._num_samples >= size,
                    self._options.max_delay_s,
                )
            return self._take()

    def _take(self) -> list[_Request]:
        taken: list[_Request] = []
        num_samples = 0
        while self._waiting:
            request = self._waiting[0]
            num_samples += request.batch.batch_size
            # Stops at the first that does not fit: taking later ones out of order could starve it.
            if taken and (request.layout != taken[0].layout or num_samples > self._options.max_batch_size):
                break
            taken.append(self._waiting.popleft())
            self._num_samples -= request.batch.batch_size
        return taken

    def _estimated_s(self, num_samples: int) -> float:
        """Until a request with so many samples that is queued now would have its answer. Holds the lock."""
        # An idle server takes every request: the estimate may be of a time when it was slow.
        if not self._waiting and not self._num_running:
            return 0.0
        num_samples += self._num_samples
        num_batches = -(-num_samples // self._options.max_batch_size)
        return self._times.estimated_s(num_batches, num_samples) / self._options.num_threads

    def _answer(self, requests: Sequence[_Request]) -> None:
        started = time.monotonic()
        answers = predict_together(self._predict, [request.batch for request in requests])
        num_samples = sum(request.batch.batch_size for request in requests)
        # Before the answers: who has the last of them sees no request running.
        with self._changed:
            self._times.add(num_samples, time.monotonic() - started)
            self._num_running -= len(requests)
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, PersiaError):
                request.future.set_exception(answer)
            else:
                request.future.set_result(answer)
