"""What each role shows of itself, as metrics and as a status. Read when asked for; nothing runs per batch."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from persia._native import EmbeddingWorker, ParameterServer, RemoteClient
from persia.errors import PersiaError
from persia.messaging.subjects import DATA_LOADER, EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER
from persia.observability import metric_tables as tables
from persia.observability.checkpointing import CheckpointLog
from persia.observability.exposition import Families, Snapshot
from persia.observability.phases import FORWARD_ERRORS, QUEUES, SEND_BATCH, STEP_PHASES

_PHASE = "persia_phase_seconds", "Time of each phase of the work."
_PROBE_TIMEOUT_S = 1.0
# Of the published names, which say "more_than_1ms".
_ONE_MS = 0.001


class Source(abc.ABC):
    """One role of this process. Thread-safe: HTTP threads and the push thread read at once."""

    role: str
    index: int
    replicas: int

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

    def remark(self) -> str:
        """What /readyz adds where the process is ready, but holds an older version on purpose."""
        return ""


@dataclass(eq=False)
class ParameterServerSource(Source):
    """Rows, lookups and updates of one parameter server."""

    server: ParameterServer
    index: int
    replicas: int
    checkpoints: CheckpointLog | None = None  # None: it takes none
    following: Callable[[], Mapping[str, Any]] | None = None  # set where packets are followed
    tier: Callable[[], Mapping[str, Any]] | None = None  # set where rows are in a storage tier
    standby: Callable[[], Mapping[str, Any]] | None = None  # set where servers have standbys
    silence: Callable[[], str | None] | None = None  # set where the number of servers may change
    role = EMBEDDING_PARAMETER_SERVER

    def status(self) -> dict[str, Any]:
        # One snapshot for the whole answer, so that its numbers belong together.
        values = dict(self.server.stats())
        if self.checkpoints is not None:
            values["checkpoint_lag_s"] = self.checkpoints.lag_s()
        if self.following is not None:
            values["following"] = self.following()
        if self.tier is not None:
            values["tier"] = self.tier()
        if self.standby is not None:
            values["standby"] = self.standby()
        return values

    def configured(self) -> bool:
        return bool(self.server.stats()["configured"])

    def not_ready(self) -> str | None:
        return None if self.silence is None else self.silence()

    def remark(self) -> str:
        return held(None if self.following is None else self.following())

    def add_metrics(self, families: Families) -> None:
        durations = self.server.durations()
        _add_native(families, self.server.metrics())
        families.gauges(tables.SERVER_TIMES, _latest(durations))
        if self.checkpoints is not None:
            self.checkpoints.add_metrics(families)
        _add_durations(families, durations)
        if self.following is not None:
            add_following(families, self.following())
        if self.tier is not None:
            tier = self.tier()
            families.counters(tables.TIER_COUNTERS, tier)
            families.gauges(tables.TIER_GAUGES, tier)


@dataclass(eq=False)
class EmbeddingWorkerSource(Source):
    """Batches, slots and calls of one embedding worker."""

    worker: EmbeddingWorker
    index: int
    replicas: int
    role = EMBEDDING_WORKER
    # Of the last `not_ready()`, which every status begins with: a server that is away is waited for once.
    _loads: list[dict[str, int]] = field(default_factory=list, init=False)

    def status(self) -> dict[str, Any]:
        values = {**self.worker.stats(), "servers": self.worker.channels(), "slots": self.worker.slots()}
        if loads := self._loads:
            work = [load["num_looked_up_rows"] + load["num_updated_rows"] for load in loads]
            values["server_loads"] = loads
            values["num_moved_shards"] = len(self.worker.moved_shards)
            values["load_imbalance"] = max(work) * len(work) / sum(work) if any(work) else 1.0
        return values

    def configured(self) -> bool:
        return bool(self.worker.stats()["configured"])

    def not_ready(self) -> str | None:
        try:
            # A worker is as ready as its servers: without them it answers no lookup. The loads are replaced
            # in one step, for metrics and status may be asked for at once.
            self._loads = self.worker.server_loads(timeout_s=_PROBE_TIMEOUT_S)
        except PersiaError as failure:
            self._loads = []
            return str(failure)
        return None

    def add_metrics(self, families: Families) -> None:
        durations = self.worker.durations()
        _add_native(families, self.worker.metrics())
        families.gauges(tables.WORKER_TIMES, _latest(durations))
        for slot, metrics in self.worker.slot_metrics():
            _add_native(families, metrics, feat=slot)
        _add_durations(families, durations)
        _add_channels(families, self.worker)


@dataclass(eq=False)
class NnWorkerSource(Source):
    """One rank: its step, its batches, its calls."""

    client: RemoteClient
    index: int
    replicas: int
    _: KW_ONLY
    counters: Callable[[], Mapping[str, int]]  # what became of the rank's batches, by name
    in_flight: Callable[[], int]  # batches between lookup and update
    queues: Callable[[], Mapping[str, int]] = dict  # entries of each queue, by name
    packets: Callable[[], Mapping[str, float]] = dict
    # Measured in the batches trained, (largest, mean) by consistency mode.
    staleness: Callable[[], Mapping[str, tuple[int, float]]] = dict
    role = NN_WORKER
    _slow: dict[str, float] = field(
        default_factory=lambda: {phase: 0.0 for _, phase, _ in tables.NN_SLOW_TIMES}, init=False
    )

    def status(self) -> dict[str, Any]:
        return {
            **self.counters(),
            "in_flight": self.in_flight(),
            "staleness": {
                mode: {"max": worst, "mean": mean} for mode, (worst, mean) in self.staleness().items()
            },
            "queues": dict(self.queues()),
            "packets": dict(self.packets()),
            "exact": {name: value for name, _, _, value in self.client.exact_metrics()},
            "workers": self.client.channels(),
        }

    def add_metrics(self, families: Families) -> None:
        durations = self.client.durations()
        # The native client measures its calls; the phases of the loop are measured in Python.
        own = (*(phase.stats for phase in STEP_PHASES), *QUEUES)
        durations.update((stats.name, stats.snapshot()) for stats in own)
        latest = _latest(durations)
        families.gauges(tables.NN_TIMES, latest)
        # The published gauges keep the latest value above a millisecond that was seen.
        self._slow.update((phase, s) for phase, s in latest.items() if phase in self._slow and s > _ONE_MS)
        families.gauges(tables.NN_SLOW_TIMES, self._slow)
        families.counter("forward_error", "Lookups that failed.", FORWARD_ERRORS.value)
        for outcome, count in self.counters().items():
            families.counter(f"persia_nn_{outcome}", "What became of the rank's batches.", count)
        families.gauge("persia_nn_in_flight", "Batches between lookup and update.", self.in_flight())
        # The mean hides a slot that is far behind for a few batches, the largest hides how rare they are.
        for mode, (worst, mean) in self.staleness().items():
            families.gauge("persia_nn_staleness_max", _STALENESS_TEXT, worst, consistency=mode)
            families.gauge("persia_nn_staleness_mean", _STALENESS_TEXT, mean, consistency=mode)
        packets = self.packets()
        # Only rank 0 writes packets; the others have no such metrics rather than zeros.
        if packets:
            families.counters(tables.PACKET_COUNTERS, packets)
            families.gauges(tables.PACKET_GAUGES, packets)
        for queue, depth in self.queues().items():
            families.gauge("persia_queue_depth", "Entries of a queue.", depth, queue=queue)
        _add_native(families, self.client.exact_metrics())
        _add_durations(families, durations)
        _add_channels(families, self.client)


_STALENESS_TEXT = "Updates between the lookup and the update of a batch's slots of a consistency mode."


@dataclass(eq=False)
class DataLoaderSource(Source):
    """One data loader."""

    index: int
    replicas: int
    num_sent: Callable[[], int]
    num_ids_sent: Callable[[], int]
    role = DATA_LOADER

    def status(self) -> dict[str, Any]:
        return {"num_sent": self.num_sent(), "num_ids_sent": self.num_ids_sent()}

    def add_metrics(self, families: Families) -> None:
        families.counter("persia_loader_batches_sent", "Batches sent.", self.num_sent())
        families.counter("persia_loader_ids_sent", "IDs of these batches.", self.num_ids_sent())
        _add_durations(families, {SEND_BATCH.stats.name: SEND_BATCH.stats.snapshot()})


def add_following(families: Families, following: Mapping[str, Any]) -> None:
    """Adds how far a process has followed a training's packets; `following`: `FollowStatus.to_json()`."""
    families.counters(tables.FOLLOWING_COUNTERS, following)
    families.gauges(tables.FOLLOWING_GAUGES, following)
    stuck = bool(following["error"])
    families.gauge("persia_inc_stuck", "1: something keeps it from following; /status says what.", stuck)


def held(following: Mapping[str, Any] | None) -> str:
    """Why a follower does not take a new stream; empty: there is none that it does not take."""
    return f", held: {following['error']}" if following is not None and following["held"] else ""


def _latest(durations: Mapping[str, Snapshot]) -> dict[str, float]:
    return {phase: last_s for phase, (_, _, last_s) in durations.items()}


def _add_durations(families: Families, durations: Mapping[str, Snapshot]) -> None:
    """RPC handlers, named "handle METHOD", have a family of their own; unused ones are left out."""
    for name, snapshot in durations.items():
        kind, _, method = name.partition(" ")
        if kind != "handle":
            families.histogram(*_PHASE, snapshot, phase=name)
        # A histogram has a series for each bucket, and a role never calls most methods.
        elif any(snapshot[0]):
            families.histogram(
                "persia_rpc_handler_seconds", "Time in the handlers of requests.", snapshot, method=method
            )


def _add_native(families: Families, metrics: list[tuple[str, bool, str, float]], **labels: str) -> None:
    """Adds what the engine declares; a new native metric needs no line here."""
    for name, is_counter, text, value in metrics:
        (families.counter if is_counter else families.gauge)(name, text, value, **labels)


def _add_channels(families: Families, caller: EmbeddingWorker | RemoteClient) -> None:
    for peer, metrics in caller.channel_metrics():
        _add_native(families, metrics, peer=peer)
    for channel in caller.channels():
        peer = channel["peer"]
        families.histogram(
            "persia_rpc_call_seconds", "Calls, from the caller's side.", channel["calls"], peer=peer
        )
