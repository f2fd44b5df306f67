"""What a server of predictions has done so far: requests by their status, batches by their size, times."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from persia._native import DurationStats
from persia.embedding.data import PersiaBatch
from persia.observability.exposition import Snapshot
from persia.serving.together import Predict

__all__ = ["SIZE_BOUNDS", "ServingCounts", "ServingStatistics"]

_LARGEST_SIZE_LOG2 = 16
SIZE_BOUNDS = [*(str(1 << i) for i in range(_LARGEST_SIZE_LOG2 + 1)), "+Inf"]  # samples of a batch


@dataclass(frozen=True, kw_only=True)
class ServingCounts:
    """All of it at one moment. Times as `DurationStats.snapshot` gives them."""

    by_status: Mapping[str, int]  # requests that have their answer, by the name of their gRPC status
    sizes: Snapshot  # samples of the batches that were computed, by SIZE_BOUNDS
    request_s: Snapshot  # from a request's arrival to its answer
    batch_s: Snapshot  # of computing a batch


class ServingStatistics:
    """Thread-safe: the event loop and the threads of batches write, HTTP threads read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_status: Counter[str] = Counter()
        self._sizes = [0] * len(SIZE_BOUNDS)
        self._num_samples, self._last_size = 0, 0
        self._request_s = DurationStats("serve request")
        self._batch_s = DurationStats("serve batch")

    def add_request(self, begin_ns: int, status: str) -> None:
        """One that came at `begin_ns` of time.monotonic_ns() has its answer."""
        self._request_s.record(begin_ns, time.monotonic_ns())
        with self._lock:
            self._by_status[status] += 1

    def measured(self, predict: Predict) -> Predict:
        """`predict`, with its batches counted."""

        def measured(batch: PersiaBatch) -> tuple[str, list[NDArray[Any]]]:
            begin_ns = time.monotonic_ns()
            try:
                return predict(batch)
            finally:
                self._batch_s.record(begin_ns, time.monotonic_ns())
                self._count_batch(batch.batch_size)

        return measured

    def counts(self) -> ServingCounts:
        with self._lock:
            return ServingCounts(
                by_status=dict(self._by_status),
                sizes=(list(self._sizes), self._num_samples, self._last_size),
                request_s=self._request_s.snapshot(),
                batch_s=self._batch_s.snapshot(),
            )

    def _count_batch(self, size: int) -> None:
        with self._lock:
            self._sizes[min(max(size - 1, 0).bit_length(), _LARGEST_SIZE_LOG2 + 1)] += 1
            self._num_samples += size
            self._last_size = size
