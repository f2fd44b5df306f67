"""The models of one server by their names, and how the server shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persia._native import kept_memory_bytes
from persia._version import __version__
from persia.errors import NotFoundError
from persia.messaging.subjects import SERVING
from persia.observability.exposition import Families
from persia.observability.sources import Source, add_following, held
from persia.serving.embeddings import EmbeddedRows
from persia.serving.inference import Inference
from persia.serving.statistics import ServingStatistics

_EXTENSIONS = ["statistics", "model_repository", "binary_tensor_data"]
_SUMS = [
    "num_requests",
    "num_failed",
    "num_batches",
    "num_samples",
    "request_s",
    "num_running",
    "num_waiting",
]


@dataclass(frozen=True)
class Models:
    """At least one."""

    by_name: Mapping[str, Inference]
    statistics: ServingStatistics  # of requests that name none of them, or end before that is known

    @classmethod
    def of(cls, models: Sequence[Inference]) -> Models:
        # A server of one model counts all requests in one place.
        statistics = models[0].statistics if len(models) == 1 else ServingStatistics()
        return cls({one.model.settings.name: one for one in models}, statistics)

    @property
    def names(self) -> str:
        """For people."""
        return ", ".join(self.by_name)

    def named(self, name: str) -> Inference:
        """NotFoundError: this server has other models."""
        if name not in self.by_name:
            has = ", ".join(map(repr, self.by_name))
            raise NotFoundError(f"there is no model {name!r}: this server has {has}")
        return self.by_name[name]

    def statistics_of(self, name: str) -> ServingStatistics:
        """Where a request for a model is counted, or for none."""
        return self.by_name[name].statistics if name in self.by_name else self.statistics

    async def are_ready(self) -> bool:
        return all(await asyncio.gather(*(one.is_ready() for one in self.by_name.values())))

    def server_metadata(self) -> dict[str, Any]:
        return {"name": "persia", "version": __version__, "extensions": _EXTENSIONS}

    def model_statistics(self, name: str, version: str) -> dict[str, Any]:
        """`name` "": of all models, in any version."""
        if name:
            return {"model_stats": [self.named(name).model_statistics(version)]}
        return {"model_stats": [one.model_statistics("") for one in self.by_name.values()]}

    def repository_index(self) -> list[dict[str, Any]]:
        return [version for one in self.by_name.values() for version in one.repository_index()]


@dataclass(eq=False)
class ServingSource(Source):
    """One server of predictions."""

    models: Models
    index: int
    replicas: int
    role = SERVING

    def not_ready(self) -> str | None:
        for name, one in self.models.by_name.items():
            if (reason := one.model.not_ready()) is not None:
                return self._about(name) + reason
        return None

    def remark(self) -> str:
        found = {name: _remark(one) for name, one in self.models.by_name.items()}
        return "".join(f", {self._about(name)}{remark[2:]}" for name, remark in found.items() if remark)

    def status(self) -> dict[str, Any]:
        models = [_status(one) for one in self.models.by_name.values()]
        of_process = {"kept_memory_bytes": kept_memory_bytes()}
        if len(models) == 1:
            return {**models[0], **of_process}
        counted = [*models, {**dict.fromkeys(_SUMS, 0), **self.models.statistics.status()}]
        sums = {key: sum(one[key] for one in counted) for key in _SUMS}
        return {**sums, **of_process, "models": models}

    def add_metrics(self, families: Families) -> None:
        counted = set()
        for name, one in self.models.by_name.items():
            labelled = families.labelled(model=name)
            _add_metrics(one, labelled)
            rows = one.model.current.predictor.embeddings
            if isinstance(rows, EmbeddedRows) and rows not in counted:
                counted.add(rows)
                what = "IDs without a row, read as zeros; of all models that read these rows."
                labelled.counter("persia_serving_missing_rows", what, rows.num_missing)
        if len(self.models.by_name) > 1:
            self.models.statistics.add_metrics(families.labelled(model=""))
        stats = [rows.stats() for rows in self._copies()]
        what = "Rows in this process. Models with the same rows share one copy."
        families.gauge("persia_serving_rows", what, sum(one.num_rows for one in stats))
        what = "Memory of these rows."
        families.gauge("persia_serving_row_bytes", what, sum(one.memory_bytes for one in stats))

    def _about(self, name: str) -> str:
        return f"{name}: " if len(self.models.by_name) > 1 else ""

    def _copies(self) -> set[EmbeddedRows]:
        """Of rows in this process."""
        models = self.models.by_name.values()
        versions = [one.model.current for one in models]
        versions += [one.canary.current for one in models if one.canary and one.canary.current]
        rows = {version.predictor.embeddings for version in versions}
        return {one for one in rows if isinstance(one, EmbeddedRows)}


def _remark(one: Inference) -> str:
    following = one.model.following
    outage = one.model.outage and f", answers from default rows: {one.model.outage}"
    trial = "" if one.canary is None else one.canary.remark()
    return outage + held(None if following is None else following.to_json()) + trial


def _status(one: Inference) -> dict[str, Any]:
    model, following = one.model, one.model.following
    return {
        "model": model.settings.name,
        "served_version": model.version,
        "version_error": model.error,
        **one.statistics.status(),
        "num_running": one.batcher.num_running,
        "num_waiting": one.batcher.num_waiting,
        "num_missing": model.num_missing,
        "num_default_batches": model.num_default_batches,
        "rows_error": model.outage,
        "following": None if following is None else following.to_json(),
        "canary": None if one.canary is None else one.canary.status(),
        "request_log": None if one.request_log is None else one.request_log.status(),
    }


def _add_metrics(one: Inference, families: Families) -> None:
    """Each sample has the label of the model."""
    model = one.model
    families.gauge(
        "persia_serving_version_info",
        "1; the labels tell which version answers.",
        1,
        model_version=model.version,
    )
    if one.canary is not None:
        one.canary.add_metrics(families)
    if one.request_log is not None:
        one.request_log.add_metrics(families)
    families.gauge(
        "persia_serving_version_refused",
        "1: the newest version cannot be served; the log and /status say why.",
        bool(model.error),
    )
    one.statistics.add_metrics(families)
    families.gauge(
        "persia_serving_running_requests", "Requests whose batch is computed.", one.batcher.num_running
    )
    families.gauge("persia_queue_depth", "Entries of a queue.", one.batcher.num_waiting, queue="requests")
    families.counter(
        "persia_serving_default_batches",
        "Batches answered from default rows, as a server of rows was down (--on-missing-server).",
        model.num_default_batches,
    )
    if model.following is not None:
        add_following(families, model.following.to_json())
