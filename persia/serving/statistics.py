"""What a server of predictions has done so far for one model."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import Any

from persia._native import DurationStats, RequestCounts
from persia.embedding.data import PersiaBatch
from persia.observability.exposition import Families
from persia.serving.batch_predict import Predict, Prediction
from persia.serving.protocol import CODES

# Samples of a batch: each size up to 8, then three bounds to a doubling, up to 65536.
SIZE_BOUNDS = [*range(1, 8), *(round(2 ** (i / 3)) for i in range(9, 49))]
_SIZE_LABELS = [*map(str, SIZE_BOUNDS), "+Inf"]


class ServingStatistics:
    """Requests and batches so far. Thread-safe: the event loop and the threads of batches write, HTTP threads
    read."""

    def __init__(self) -> None:
        self.requests = RequestCounts("serve request")  # the gRPC port counts there, too
        self._lock = threading.Lock()
        # Not DurationStats: its buckets are those of seconds.
        self._sizes = [0] * len(_SIZE_LABELS)
        self._num_samples, self._last_size = 0, 0
        self._batch_s = DurationStats("serve batch")

    def add_request(self, begin_ns: int, status: str) -> None:
        """One that came at `begin_ns` of time.monotonic_ns() has its answer."""
        self.requests.add(begin_ns, CODES[status])

    def measured(self, predict: Predict) -> Predict:
        """`predict`, with its batches counted."""

        def measured(batch: PersiaBatch) -> Prediction:
            begin_ns = time.monotonic_ns()
            try:
                return predict(batch)
            finally:
                self._batch_s.record(begin_ns, time.monotonic_ns())
                self._count_batch(batch.batch_size)

        return measured

    def _count_batch(self, size: int) -> None:
        with self._lock:
            self._sizes[bisect_left(SIZE_BOUNDS, size)] += 1
            self._num_samples += size
            self._last_size = size

    def status(self) -> dict[str, Any]:
        by_status, _, _, _ = self._requests()
        num_requests = sum(by_status.values())
        with self._lock:
            return {
                "num_requests": num_requests,
                "num_failed": num_requests - by_status.get("OK", 0),
                "by_status": by_status,
                "num_batches": sum(self._sizes),
                "num_samples": self._num_samples,
                "request_s": self.requests.durations()[1],
            }

    def of_protocol(self) -> dict[str, Any]:
        """As the message ModelStatistics has them."""
        by_status, ok_ns, failed_ns, last_ms = self._requests()
        num_ok = by_status.get("OK", 0)
        with self._lock:
            return {
                "last_inference": last_ms,
                "inference_count": self._num_samples,
                "execution_count": sum(self._sizes),
                "inference_stats": {
                    "success": {"count": num_ok, "ns": ok_ns},
                    "fail": {"count": sum(by_status.values()) - num_ok, "ns": failed_ns},
                    "compute_infer": {
                        "count": sum(self._sizes),
                        "ns": int(self._batch_s.snapshot()[1] * 1e9),
                    },
                },
            }

    def _requests(self) -> tuple[dict[str, int], int, int, int]:
        """Requests by gRPC's status, and the rest of `RequestCounts.snapshot`."""
        counts, ok_ns, failed_ns, last_ms = self.requests.snapshot()
        by_status = {name: counts[code] for name, code in CODES.items() if counts[code]}
        return by_status, ok_ns, failed_ns, last_ms

    def add_metrics(self, families: Families, prefix: str = "persia_serving") -> None:
        def named(name: str) -> str:
            return name.replace("persia_serving", prefix)

        # OK is shown from the start: rates and alerts need the series before the first request.
        by_status = {"OK": 0, **self._requests()[0]}
        with self._lock:
            sizes = (list(self._sizes), self._num_samples, self._last_size)
        for status, count in by_status.items():
            families.counter(
                named("persia_serving_requests"), "Requests answered, by gRPC status.", count, status=status
            )
        families.histogram(
            named("persia_serving_request_seconds"),
            "Requests, from their arrival to the answer.",
            self.requests.durations(),
        )
        families.histogram(
            named("persia_serving_batch_seconds"), "Computing a batch.", self._batch_s.snapshot()
        )
        families.histogram(
            named("persia_serving_batch_samples"), "Samples of the batches computed.", sizes, _SIZE_LABELS
        )
