"""What became of a server's checkpoint operations, and how old the last dump is."""

from __future__ import annotations

import threading
import time

from persia._native import DurationStats
from persia.observability.exposition import Families

_PHASES = {"dump": "checkpoint dump", "load": "checkpoint load", "packet": "checkpoint packet"}


class CheckpointLog:
    """Of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saved_at = time.monotonic()
        # All series exist from the start: an alert on the first failure needs the zero before it.
        self._outcomes = {(kind, outcome): 0 for kind in _PHASES for outcome in ("done", "failed")}
        self._durations = {kind: DurationStats(name) for kind, name in _PHASES.items()}

    def ended(self, kind: str, *, began: float, done: bool) -> None:
        """An operation is over. `kind`: dump, load or packet (of changes, which save nothing by themselves);
        `began`: its time.monotonic(), when a dump's rows were fixed."""
        self._durations[kind].record(int(began * 1e9), time.monotonic_ns())
        with self._lock:
            self._outcomes[kind, "done" if done else "failed"] += 1
            if done and kind != "packet":
                # Operations may end in another order than they began.
                self._saved_at = max(self._saved_at, began)

    def lag_s(self) -> float:
        """Seconds of updates that no finished dump of this server has: since the last dump or load, else
        since the start. Whether the job's checkpoint was completed, its coordinator knows."""
        with self._lock:
            return time.monotonic() - self._saved_at

    def add_metrics(self, families: Families) -> None:
        with self._lock:
            outcomes = dict(self._outcomes)
        for (kind, outcome), count in outcomes.items():
            text = "Checkpoint operations that have ended."
            families.counter("persia_checkpoints", text, count, operation=kind, outcome=outcome)
        families.gauge(
            "persia_checkpoint_lag_seconds",
            "Age of the rows that this server last dumped or loaded; without any, since its start.",
            self.lag_s(),
        )
        for stats in self._durations.values():
            text = "Time of each phase of the work."
            families.histogram("persia_phase_seconds", text, stats.snapshot(), phase=stats.name)
