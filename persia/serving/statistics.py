"""What a server of predictions has done so far, and how `persia-launcher serve` shows it."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from persia._native import DurationStats, RequestCounts, kept_memory_bytes
from persia.embedding.data import PersiaBatch
from persia.messaging.subjects import SERVING
from persia.observability.exposition import Families
from persia.observability.sources import Source, add_following, held
from persia.serving.batch_predict import Predict, Prediction
from persia.serving.batcher import Batcher
from persia.serving.protocol import CODES
from persia.serving.request_log import RequestLog
from persia.serving.versions import ServedModel

if TYPE_CHECKING:
    from persia.serving.canary import Canary

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


@dataclass(eq=False)
class ServingSource(Source):
    """One server of predictions."""

    model: ServedModel
    statistics: ServingStatistics
    index: int
    replicas: int
    batcher: Batcher
    canary: Canary | None = None
    request_log: RequestLog | None = None
    role = SERVING

    def not_ready(self) -> str | None:
        return self.model.not_ready()

    def remark(self) -> str:
        following = self.model.following
        outage = self.model.outage and f", answers from default rows: {self.model.outage}"
        trial = "" if self.canary is None else self.canary.remark()
        return outage + held(None if following is None else following.to_json()) + trial

    def status(self) -> dict[str, Any]:
        following = self.model.following
        return {
            "model": self.model.settings.name,
            "served_version": self.model.version,
            "version_error": self.model.error,
            **self.statistics.status(),
            "num_running": self.batcher.num_running,
            "num_waiting": self.batcher.num_waiting,
            "num_missing": self.model.num_missing,
            "num_default_batches": self.model.num_default_batches,
            "rows_error": self.model.outage,
            "kept_memory_bytes": kept_memory_bytes(),
            "following": None if following is None else following.to_json(),
            "canary": None if self.canary is None else self.canary.status(),
            "request_log": None if self.request_log is None else self.request_log.status(),
        }

    def add_metrics(self, families: Families) -> None:
        model = self.model
        families.gauge(
            "persia_serving_version_info",
            "1; the labels tell which version answers.",
            1,
            model=model.settings.name,
            model_version=model.version,
        )
        if self.canary is not None:
            self.canary.add_metrics(families)
        if self.request_log is not None:
            self.request_log.add_metrics(families)
        families.gauge(
            "persia_serving_version_refused",
            "1: the newest version cannot be served; the log and /status say why.",
            bool(model.error),
        )
        self.statistics.add_metrics(families)
        families.gauge(
            "persia_serving_running_requests", "Requests whose batch is computed.", self.batcher.num_running
        )
        families.gauge(
            "persia_queue_depth", "Entries of a queue.", self.batcher.num_waiting, queue="requests"
        )
        families.counter(
            "persia_serving_default_batches",
            "Batches answered from default rows, as a server of rows was down (--on-missing-server).",
            model.num_default_batches,
        )
        if model.num_missing is not None:
            families.counter(
                "persia_serving_missing_rows",
                "IDs without a row, read as zeros; of the version that answers.",
                model.num_missing,
            )
        following = model.following
        if following is not None:
            add_following(families, following.to_json())
