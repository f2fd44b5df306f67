"""What each role says about itself, as metrics and as a status. Read when asked for; nothing runs per batch.

The metric names without "persia_" are those of the published system.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

from persia._native import EmbeddingWorker, ParameterServer, RemoteClient
from persia.errors import PersiaError
from persia.messaging.subjects import DATA_LOADER, EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER
from persia.observability.checkpointing import CheckpointLog
from persia.observability.exposition import Families, Snapshot
from persia.observability.following import add_following
from persia.observability.phases import FORWARD_ERRORS, QUEUES, SEND_BATCH, STEP_PHASES, WAIT_FOR_BATCH
from persia.observability.tiers import add_tier

__all__ = [
    "DataLoaderSource",
    "EmbeddingWorkerSource",
    "NnWorkerSource",
    "ParameterServerSource",
    "Source",
]

_PHASE = "persia_phase_seconds", "Time of each phase of the work."
_PROBE_TIMEOUT_S = 1.0
_ONE_MS = 0.001


class Source(abc.ABC):
    """One role of this process. Thread-safe: HTTP threads and the push thread read at once."""

    role: str
    index: int
    replicas: int

    def __init__(self, role: str, index: int, replicas: int) -> None:
        self.role, self.index, self.replicas = role, index, replicas

    @abc.abstractmethod
    def add_metrics(self, families: Families) -> None:
        """Adds what there is to know now."""

    @abc.abstractmethod
    def status(self) -> dict[str, Any]:
        """Counters and gauges by name, for JSON."""

    def configured(self) -> bool:
        """Whether an embedding optimizer is known, without which nothing can be trained."""
        return True

    def not_ready(self) -> str | None:
        """Why requests could not be answered at this moment; None when they can. Ends within seconds."""
        return None


class ParameterServerSource(Source):
    """Rows, lookups and updates of one parameter server; `checkpoints` None: it takes none."""

    def __init__(
        self, server: ParameterServer, index: int, replicas: int, checkpoints: CheckpointLog | None = None
    ) -> None:
        super().__init__(EMBEDDING_PARAMETER_SERVER, index, replicas)
        self._server, self._checkpoints = server, checkpoints
        self.following: Callable[[], Mapping[str, Any]] | None = None  # set where packets are followed
        self.tier: Callable[[], Mapping[str, Any]] | None = None  # set where rows are in a pool

    def status(self) -> dict[str, Any]:
        values = dict(self._server.stats())
        if self._checkpoints is not None:
            values["checkpoint_lag_s"] = self._checkpoints.lag_s()
        if self.following is not None:
            values["following"] = self.following()
        if self.tier is not None:
            values["tier"] = self.tier()
        return values

    def configured(self) -> bool:
        return bool(self._server.stats()["configured"])

    def add_metrics(self, families: Families) -> None:
        durations = self._server.durations()
        _add_native(families, self._server.metrics())
        for name, phase, text in _SERVER_TIMES:
            families.gauge(name, text, durations[phase][2])
        if self._checkpoints is not None:
            self._checkpoints.add_metrics(families)
        _add_durations(families, durations)
        if self.following is not None:
            add_following(families, self.following())
        if self.tier is not None:
            add_tier(families, self.tier())


_SERVER_TIMES = (
    ("set_embedding_time_cost_sec", "set", "Writing rows given from outside, the latest."),
    ("decode_indices_time_cost_sec", "decode", "Decoding a lookup request, the latest."),
    ("encode_embedding_time_cost_sec", "encode", "Making the buffer of a lookup's reply, the latest."),
    ("lookup_inference_batch_time_cost_sec", "inference lookup", "Looking up without training, the latest."),
    ("lookup_hashmap_time_cost_sec", "lookup", "Looking rows up for training, the latest."),
)


class EmbeddingWorkerSource(Source):
    """Batches, slots and calls of one embedding worker."""

    def __init__(self, worker: EmbeddingWorker, index: int, replicas: int) -> None:
        super().__init__(EMBEDDING_WORKER, index, replicas)
        self._worker = worker

    def status(self) -> dict[str, Any]:
        return {**self._worker.stats(), "servers": self._worker.channels(), "slots": self._worker.slots()}

    def configured(self) -> bool:
        return bool(self._worker.stats()["configured"])

    def not_ready(self) -> str | None:
        try:
            self._worker.server_sizes(timeout_s=_PROBE_TIMEOUT_S)
        except PersiaError as failure:
            return str(failure)
        return None

    def add_metrics(self, families: Families) -> None:
        durations = self._worker.durations()
        _add_native(families, self._worker.metrics())
        for name, phase, text in _WORKER_TIMES:
            families.gauge(name, text, durations[phase][2])
        for slot in self._worker.slots():
            _add_slot(families, slot)
        _add_durations(families, durations)
        _add_channels(families, self._worker.channels())


_WORKER_TIMES = (
    (
        "lookup_preprocess_time_cost_sec",
        "lookup preprocess",
        "Deduplication and routing, the latest.",
    ),
    ("lookup_rpc_time_cost_sec", "lookup rpc", "The parameter servers' answers to a batch, the latest."),
    ("lookup_postprocess_time_cost_sec", "lookup postprocess", "Pooling a batch, the latest."),
    ("lookup_total_time_cost_sec", "lookup total", "A batch's lookup in all, the latest."),
    ("update_gradient_time_cost_sec", "update gradient", "A batch's update in all, the latest."),
)


def _add_slot(families: Families, slot: Mapping[str, Any]) -> None:
    feat = slot["slot"]
    families.gauge(
        "batch_unique_indices_rate",
        "Distinct indices of the latest batch by its indices.",
        slot["last_distinct_ratio"],
        feat=feat,
    )
    families.gauge(
        "estimated_distinct_id", "Different indices so far, estimated.", slot["estimated_distinct"], feat=feat
    )
    families.counter("nan_count", "Gradients dropped: NaN or infinite.", slot["num_nonfinite"], feat=feat)
    families.counter("nan_grad_skipped", "Gradients the loss gave none for.", slot["num_skipped"], feat=feat)


class NnWorkerSource(Source):
    """One rank: its step, its batches, its calls.

    Args:
        counters: what became of the rank's batches, by name.
        in_flight: batches between lookup and update.
        queues: entries of each queue, by name.
        staleness: measured in the batches trained, (largest, mean) by consistency mode.
    """

    def __init__(
        self,
        client: RemoteClient,
        index: int,
        replicas: int,
        *,
        counters: Callable[[], Mapping[str, int]],
        in_flight: Callable[[], int],
        queues: Callable[[], Mapping[str, int]] = dict,
        packets: Callable[[], Mapping[str, float]] = dict,
        staleness: Callable[[], Mapping[str, tuple[int, float]]] = dict,
    ) -> None:
        super().__init__(NN_WORKER, index, replicas)
        self._staleness = staleness
        self._client = client
        self._packets = packets
        self._counters, self._in_flight, self._queues = counters, in_flight, queues
        self._slow = {"client return gradients": 0.0, WAIT_FOR_BATCH.stats.name: 0.0}

    def status(self) -> dict[str, Any]:
        return {
            **self._counters(),
            "in_flight": self._in_flight(),
            "staleness": {
                mode: {"max": worst, "mean": mean} for mode, (worst, mean) in self._staleness().items()
            },
            "queues": dict(self._queues()),
            "packets": dict(self._packets()),
            "workers": self._client.channels(),
        }

    def add_metrics(self, families: Families) -> None:
        durations = self._client.durations()
        own = (*(phase.stats for phase in STEP_PHASES), *QUEUES)
        durations.update((stats.name, stats.snapshot()) for stats in own)
        for name, phase, text in _NN_TIMES:
            families.gauge(name, text, durations[phase][2])
        for name, phase, text in _NN_SLOW_TIMES:
            families.gauge(name, text, self._latest_slow(phase, durations[phase][2]))
        families.counter("forward_error", "Lookups that failed.", FORWARD_ERRORS.value)
        for outcome, count in self._counters().items():
            families.counter(f"persia_nn_{outcome}", "What became of the rank's batches.", count)
        families.gauge("persia_nn_in_flight", "Batches between lookup and update.", self._in_flight())
        for mode, (worst, mean) in self._staleness().items():
            families.gauge("persia_nn_staleness_max", _STALENESS_TEXT, worst, consistency=mode)
            families.gauge("persia_nn_staleness_mean", _STALENESS_TEXT, mean, consistency=mode)
        packets = self._packets()
        for name, key, text in _PACKET_COUNTERS if packets else ():
            families.counter(name, text, packets[key])
        for name, key, text in _PACKET_GAUGES if packets else ():
            families.gauge(name, text, packets[key])
        for queue, depth in self._queues().items():
            families.gauge("persia_queue_depth", "Entries of a queue.", depth, queue=queue)
        _add_durations(families, durations)
        _add_channels(families, self._client.channels())

    def _latest_slow(self, phase: str, last_s: float) -> float:
        """The published gauges keep the latest value above a millisecond that was seen."""
        if last_s > _ONE_MS:
            self._slow[phase] = last_s
        return self._slow[phase]


_STALENESS_TEXT = "Updates between the lookup and the update of a batch's slots of a consistency mode."
_NN_TIMES = (
    ("forward_client_time_cost_sec", "client lookup", "A batch's lookup as the rank sees it, the latest."),
    ("forward_client_to_gpu_time_cost_sec", "to device", "Making a batch's tensors, the latest."),
    ("backward_client_time_cost_sec", "hand in gradients", "Handing a batch's gradients in, the latest."),
)
_NN_SLOW_TIMES = (
    (
        "get_train_batch_time_cost_more_than_1ms_sec",
        WAIT_FOR_BATCH.stats.name,
        "The training loop's wait for a batch, the latest above 1 ms seen.",
    ),
    (
        "update_gradient_batched_time_cost_more_than_1ms_sec",
        "client return gradients",
        "A batch's gradient return as the rank sees it, the latest above 1 ms seen.",
    ),
)


_PACKET_COUNTERS = (
    ("persia_packets_written", "packets", "Packets of changes written for followers."),
    ("persia_packet_rows", "rows", "Changed and removed rows in packets."),
    ("persia_packet_bytes", "bytes", "Bytes of packets."),
    ("persia_packet_failures", "failures", "Packets that could not be written; their rows come later."),
    ("persia_packet_restarts", "restarts", "Breaks in the sequence of packets, the start of it included."),
    ("persia_packet_checkpoints", "checkpoints", "Checkpoints written because followers needed one."),
)
_PACKET_GAUGES = (
    ("persia_packet_number", "number", "The newest packet."),
    ("persia_packet_lag_seconds", "lag_s", "Age of the oldest change that is in no packet yet, at most."),
)


class DataLoaderSource(Source):
    """One data loader."""

    def __init__(
        self, index: int, replicas: int, num_sent: Callable[[], int], num_ids_sent: Callable[[], int]
    ) -> None:
        super().__init__(DATA_LOADER, index, replicas)
        self._num_sent, self._num_ids_sent = num_sent, num_ids_sent

    def status(self) -> dict[str, Any]:
        return {"num_sent": self._num_sent(), "num_ids_sent": self._num_ids_sent()}

    def add_metrics(self, families: Families) -> None:
        families.counter("persia_loader_batches_sent", "Batches sent.", self._num_sent())
        families.counter("persia_loader_ids_sent", "IDs of these batches.", self._num_ids_sent())
        _add_durations(families, {SEND_BATCH.stats.name: SEND_BATCH.stats.snapshot()})


def _add_durations(families: Families, durations: Mapping[str, Snapshot]) -> None:
    """RPC handlers, named "handle METHOD", have a family of their own; unused ones are left out."""
    for name, snapshot in durations.items():
        kind, _, method = name.partition(" ")
        if kind != "handle":
            families.histogram(*_PHASE, snapshot, phase=name)
        elif any(snapshot[0]):
            families.histogram(
                "persia_rpc_handler_seconds", "Time in the handlers of requests.", snapshot, method=method
            )


_CHANNEL_COUNTERS = (
    ("persia_rpc_calls", "num_calls", "Calls made."),
    ("persia_rpc_retries", "num_retries", "Requests sent again."),
    ("persia_rpc_connects", "num_connects", "Connections made."),
    ("persia_rpc_call_sent_bytes", "num_sent_bytes", "Bytes of requests sent."),
    ("persia_rpc_call_received_bytes", "num_received_bytes", "Bytes of replies received."),
)


def _add_native(families: Families, metrics: list[tuple[str, bool, str, float]]) -> None:
    """Adds what the engine declares; a new native metric needs no line here."""
    for name, is_counter, text, value in metrics:
        (families.counter if is_counter else families.gauge)(name, text, value)


def _add_channels(families: Families, channels: list[dict[str, Any]]) -> None:
    for channel in channels:
        peer = channel["peer"]
        for name, key, text in _CHANNEL_COUNTERS:
            families.counter(name, text, channel[key], peer=peer)
        families.gauge("persia_rpc_pending_calls", "Calls under way.", channel["num_pending"], peer=peer)
        families.histogram(
            "persia_rpc_call_seconds", "Calls, from the caller's side.", channel["calls"], peer=peer
        )
