"""A second version beside the stable one: its share of requests, shadow requests, and its rollback.

The stable version answers a request that the canary fails. Only if it can, the failure counts against the
canary.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from persia.embedding.data import PersiaBatch
from persia.errors import DeadlineExceededError, InternalError, ResourceExhaustedError, UnavailableError
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import lower_priority
from persia.observability.exposition import Families, Row, Snapshot
from persia.serving.batch_predict import Prediction
from persia.serving.batcher import Batcher, BatchingOptions
from persia.serving.gate import drift_of
from persia.serving.predictor import ModelSettings, Version
from persia.serving.protocol import message_of
from persia.serving.sideline import Share, Sideline
from persia.serving.statistics import ServingStatistics
from persia.serving.versions import ServedModel
from persia.storage.location import Location

STABLE, CANARY = "stable", "canary"  # what requests may ask for in place of a version

_WINDOW = 100  # answers that are judged together
_MIN_DRIFTS = 10  # their mean is compared from then on
_MAX_PAUSE_S = 60.0  # between two tries to load the first version
_CLOSE_S = 5.0
_DRIFT_BOUNDS = [round(factor * 10.0**power, 9) for power in range(-6, 1) for factor in (1, 2, 5)]
_DRIFT_LABELS = [*(f"{bound:g}" for bound in _DRIFT_BOUNDS), "+Inf"]
_COUNTERS: list[Row] = [
    ("persia_serving_canary_errors", "num_errors", "Requests that the canary failed, shadow requests too."),
    ("persia_serving_canary_rollbacks", "num_rollbacks", "Canaries rolled back."),
    ("persia_serving_shadows_dropped", "num_shadows_dropped", "Shadow requests left out for lack of time."),
]
_CIRCUMSTANCES = (UnavailableError, ResourceExhaustedError)  # rows are not available; the queue is full


@dataclass(frozen=True, kw_only=True)
class CanaryOptions:
    """What a canary is, and when it is rolled back."""

    location: Location  # like that of the stable version
    share: float | Path = 0.0  # of requests that ask for no version; a file's may change
    shadow_share: float | Path = 0.0  # of requests that the stable version has answered
    max_errors: int = 5  # among its last 100 answers
    drift_limit: float | None = None  # mean absolute difference of the last 100 shadow requests


class Trial:
    """How a version has done. Of each version anew. Thread-safe."""

    def __init__(self, options: CanaryOptions) -> None:
        self.num_errors, self.num_rollbacks = 0, 0
        self._options = options
        self._lock = threading.Lock()
        self._digest = ""  # of the version that the windows belong to; a Version would keep its rows
        self._errors: deque[bool] = deque(maxlen=_WINDOW)
        self._drifts: deque[float] = deque(maxlen=_WINDOW)
        self._reason = ""
        self.drift: float | None = None  # of the last shadow requests; None: there are too few
        self._histogram, self._sum = [0] * len(_DRIFT_LABELS), 0.0

    def reason(self, version: Version) -> str:
        """Why `version` is rolled back; empty: it is not."""
        return self._reason if version.digest == self._digest else ""

    def add(self, version: Version, error: str = "", drift: float | None = None) -> None:
        """`error` empty: it has answered. `drift`: compared with the stable version."""
        with self._lock:
            if version.digest != self._digest:
                self._digest, self._reason = version.digest, ""
                self._errors.clear()
                self._drifts.clear()
            self._errors.append(bool(error))
            self.num_errors += bool(error)
            if drift is not None:
                self._drifts.append(drift)
                self._histogram[bisect_left(_DRIFT_BOUNDS, drift)] += 1
                self._sum += drift
            enough = len(self._drifts) >= _MIN_DRIFTS
            self.drift = sum(self._drifts) / len(self._drifts) if enough else None
            if not self._reason and (reason := self._judged(error)):
                self._reason = reason
                self.num_rollbacks += 1
                get_default_logger().error("canary %s is rolled back: %s", version.name, reason)

    @property
    def differences(self) -> Snapshot:
        """Of all shadow requests, as a histogram."""
        with self._lock:
            return list(self._histogram), self._sum, 0.0

    def _judged(self, error: str) -> str:
        """Why it is to be rolled back; empty: nothing is wrong. Holds the lock."""
        limits = self._options
        if (num_errors := sum(self._errors)) > limits.max_errors:
            return (
                f"it failed {num_errors} of its last {len(self._errors)} requests, more than "
                f"--canary-max-errors {limits.max_errors}: {error}"
            )
        if limits.drift_limit is None or self.drift is None or self.drift <= limits.drift_limit:
            return ""
        return (
            f"its predictions differ from those of the stable version by {self.drift:.6g} on average, more "
            f"than --canary-max-drift {limits.drift_limit:g}"
        )


class Canary:
    """The canary of one served model. It is loaded beside it, so that a broken one stops no server."""

    def __init__(
        self, settings: ModelSettings, options: CanaryOptions, batching: BatchingOptions, num_threads: int
    ) -> None:
        self.share = Share(options.share, CANARY)
        self.shadow_share = Share(options.shadow_share, "shadow")
        self.trial = Trial(options)
        self.statistics = ServingStatistics()  # of requests that it was to answer
        self.model: ServedModel | None = None  # until it is loaded
        self.batcher = Batcher(self.statistics.measured(self._predict), batching)
        # The gate guards what replaces the stable version.
        self._settings = replace(
            settings, name=f"{settings.name} (canary)", location=options.location, follow=None, gate=None
        )
        self._num_threads = num_threads
        self._load_error = ""
        self._stopped = threading.Event()
        self._shadows = Sideline("persia-shadow", self._compare)
        self._thread = threading.Thread(target=self._load, name="persia-canary", daemon=True)
        self._thread.start()

    @property
    def current(self) -> Version | None:
        """The version that answers; None: none is loaded yet."""
        return None if self.model is None else self.model.current

    @property
    def version(self) -> str:
        """Empty: none is loaded yet."""
        return "" if self.model is None else self.model.version

    @property
    def rolled_back(self) -> str:
        """Why it is rolled back, until there is another version; empty: it is not."""
        return "" if (version := self.current) is None else self.trial.reason(version)

    @property
    def error(self) -> str:
        """Why its newest version cannot be served."""
        return self._load_error if self.model is None else self.model.error

    def takes(self, request_id: str) -> bool:
        """Whether it is to answer a request that asks for no version."""
        return self._is_used and self.share.takes(request_id)

    def reread_shares(self) -> None:
        """Reads their files again if that is due."""
        for share in (self.share, self.shadow_share):
            _ = share.value

    def shadow(self, batch: PersiaBatch, answer: Prediction, request_id: str) -> None:
        """Computes a request that the stable version has answered once more, if it is of the share."""
        if self._is_used and self.shadow_share.takes(request_id):
            self._shadows.offer((batch, answer))

    def judge(
        self, version: Version | None, failure: Exception | None = None, drift: float | None = None
    ) -> None:
        """Counts a request. `version`: `current` before it. `failure`: the stable version could answer it."""
        # A request during a switch may have been answered by either version.
        if version is not None and version is self.current and not isinstance(failure, _CIRCUMSTANCES):
            self.trial.add(version, "" if failure is None else message_of(failure), drift)

    def status(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "share": self.share.value,
            "shadow_share": self.shadow_share.value,
            "rolled_back": self.rolled_back,
            "error": self.error,
            "drift": self.trial.drift,
            "num_rollbacks": self.trial.num_rollbacks,
            "num_errors": self.trial.num_errors,
            "num_shadows_dropped": self._shadows.num_dropped,
        }

    def remark(self) -> str:
        """For /readyz."""
        if reason := self.rolled_back:
            return f", canary {self.version} is rolled back: {reason}"
        return f", the canary cannot be served: {self.error}" if self.error else ""

    def add_metrics(self, families: Families) -> None:
        self.statistics.add_metrics(families, "persia_serving_canary")
        families.counters(_COUNTERS, self.status())
        what = "Mean absolute difference of the canary's predictions from those of the stable version."
        families.histogram("persia_serving_shadow_difference", what, self.trial.differences, _DRIFT_LABELS)
        what = "1; the label tells which version is the canary."
        families.gauge("persia_serving_canary_info", what, 1, model_version=self.version)
        what = "1: the canary gets no requests; /status and /readyz say why."
        families.gauge("persia_serving_canary_rolled_back", what, bool(self.rolled_back))

    def close(self) -> None:
        self._stopped.set()
        self._shadows.close()
        self.batcher.close()
        # Like a new version of ServedModel: a thread in native code at the end of a process may abort it.
        self._thread.join(_CLOSE_S)
        if self.model is not None:
            self.model.close()

    @property
    def _is_used(self) -> bool:
        return self.model is not None and not self.rolled_back

    def _predict(self, batch: PersiaBatch) -> Prediction:
        if self.model is None:
            raise UnavailableError("the canary is not loaded yet")
        return replace(self.model.predict(batch), is_canary=True)

    def _compare(self, shadow: tuple[PersiaBatch, Prediction]) -> None:
        (batch, answer), version = shadow, self.current
        if self.model is None or self.rolled_back:
            return
        try:
            found = self.model.predict(batch)
            drift = drift_of([found.outputs], [answer.outputs])
            if not np.isfinite(drift):
                raise InternalError("a prediction is NaN or infinite")
        except DeadlineExceededError:
            return  # the rows were late: a shadow request has no deadline
        except Exception as failure:
            # What is not finite in both says nothing about the canary.
            if all(np.isfinite(output).all() for output in answer.outputs):
                self.judge(version, failure)
        else:
            if not (found.has_default_rows or answer.has_default_rows):
                self.judge(version, drift=drift)

    def _load(self) -> None:
        lower_priority()
        pause_s = self._settings.poll_s
        while not self._stopped.is_set():
            try:
                # One more for shadow requests: they compute slowly, and must not hold up the others.
                self.model = ServedModel(self._settings, num_threads=self._num_threads + 1)
                return
            except Exception as failure:
                if str(failure) != self._load_error:
                    get_default_logger().error("the canary cannot be served: %s", failure)
                self._load_error = str(failure)
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
