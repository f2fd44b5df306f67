"""What `persia-launcher serve` shows of itself, as metrics and as a status."""

from __future__ import annotations

from typing import Any

from persia.messaging.subjects import SERVING
from persia.observability.exposition import Families
from persia.observability.following import add_following
from persia.observability.sources import Source
from persia.serving.batcher import Batcher
from persia.serving.statistics import SIZE_BOUNDS, ServingStatistics
from persia.serving.versions import ServedModel

__all__ = ["ServingSource"]


class ServingSource(Source):
    """One server of predictions."""

    def __init__(
        self,
        model: ServedModel,
        statistics: ServingStatistics,
        index: int,
        replicas: int,
        batcher: Batcher,
    ) -> None:
        super().__init__(SERVING, index, replicas)
        self._model, self._statistics, self._queue = model, statistics, batcher

    def not_ready(self) -> str | None:
        return self._model.not_ready()

    def status(self) -> dict[str, Any]:
        counts = self._statistics.counts()
        num_requests = sum(counts.by_status.values())
        following = self._model.following
        return {
            "model": self._model.settings.name,
            "served_version": self._model.version,
            "version_error": self._model.error,
            "num_requests": num_requests,
            "num_failed": num_requests - counts.by_status.get("OK", 0),
            "by_status": dict(counts.by_status),
            "num_running": self._queue.num_running,
            "num_waiting": self._queue.num_waiting,
            "num_batches": sum(counts.sizes[0]),
            "num_samples": counts.sizes[1],
            "num_missing": self._model.num_missing,
            "request_s": counts.request_s[1],
            "following": None if following is None else following.to_json(),
        }

    def add_metrics(self, families: Families) -> None:
        counts, model = self._statistics.counts(), self._model
        families.gauge(
            "persia_serving_version_info",
            "1; the labels tell which version answers.",
            1,
            model=model.settings.name,
            model_version=model.version,
        )
        families.gauge(
            "persia_serving_version_refused",
            "1: the newest version cannot be served; the log and /status say why.",
            bool(model.error),
        )
        for status, count in {"OK": 0, **counts.by_status}.items():
            families.counter(
                "persia_serving_requests", "Requests answered, by gRPC status.", count, status=status
            )
        families.histogram(
            "persia_serving_request_seconds",
            "Requests, from their arrival to the answer.",
            counts.request_s,
        )
        families.histogram("persia_serving_batch_seconds", "Computing a batch.", counts.batch_s)
        families.histogram(
            "persia_serving_batch_samples", "Samples of the batches computed.", counts.sizes, SIZE_BOUNDS
        )
        families.gauge(
            "persia_serving_running_requests", "Requests whose batch is computed.", self._queue.num_running
        )
        families.gauge("persia_queue_depth", "Entries of a queue.", self._queue.num_waiting, queue="requests")
        if model.num_missing is not None:
            families.counter(
                "persia_serving_missing_rows",
                "IDs without a row, read as zeros; of the version that answers.",
                model.num_missing,
            )
        following = model.following
        if following is not None:
            add_following(families, following.to_json())
