"""Which version of a model answers: a checkpoint, or what `latest` names, replaced while requests arrive.

A new version is loaded beside the one that answers, tried, and takes its place between two batches; batches
under way end with the version they began with. What cannot be loaded changes nothing, and is tried again when
the checkpoint changes. Rolling back is the same: let `latest` name the older step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from persia._native import LookupResult
from persia.checkpoint.checkpoints import Source
from persia.embedding.data import PersiaBatch
from persia.errors import DeadlineExceededError, FailedPreconditionError, PersiaError, UnavailableError
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import lower_priority
from persia.packets.follower import Follower, FollowStatus
from persia.serving.batch_predict import Prediction
from persia.serving.following import ServedCopies, ServedCopy
from persia.serving.predictor import ModelSettings, Predictor, Version, digest_of, load_version
from persia.storage.signature import Signature
from persia.storage.versions import resolve

# Lookups at a time; further ones wait. As many as `persia-launcher serve --threads` allows.
_MAX_LOOKUPS = 64


class ServedModel:
    """The current version, and a thread that looks for the next one. Thread-safe."""

    def __init__(self, settings: ModelSettings, *, num_threads: int = _MAX_LOOKUPS) -> None:
        """Loads the first version, and raises what is wrong with it. `num_threads` compute at a time."""
        if settings.embeddings is None and settings.slots is None:
            raise FailedPreconditionError(
                "rows are loaded into this process and need their slots: give --embedding-config, or "
                "--embedding-worker for rows that servers hold"
            )
        self.settings = settings
        self._refused = ""  # digest of what could not be loaded
        self._error = ""
        self._outputs: list[tuple[str, list[int]]] = []
        self.outage = ""  # why the last batch has default rows; empty: it has its own
        self.num_default_batches = 0
        self._counting = threading.Lock()
        self._lookups = threading.Semaphore(_MAX_LOOKUPS)
        self._computing = threading.Semaphore(num_threads)
        self._current: Version
        self._stopped = threading.Event()
        self._follower: Follower[ServedCopy] | None = None
        self._thread: threading.Thread | None = None
        if settings.follow is not None:
            judge = None if settings.gate is None else self._judge_copy
            self._follower = Follower(ServedCopies(settings, self._switch), settings.follow, judge)
            self._follower.start()
        else:
            self._use(self._load())
            self._thread = threading.Thread(target=self._watch, name="persia-versions", daemon=True)
        try:
            if settings.gate is not None:  # wrong samples would refuse every version
                settings.gate.predictions(self._current.predictor.predict)
        except BaseException:
            if self._follower is not None:
                self._follower.close()
            raise
        if self._thread is not None:
            self._thread.start()

    @property
    def following(self) -> FollowStatus | None:
        """Where it stands in the packets that it follows; None: it follows none."""
        return None if self._follower is None else self._follower.status

    @property
    def current(self) -> Version:
        """The version that answers."""
        return self._current

    @property
    def version(self) -> str:
        """The training step of the checkpoint, or the name of its dump where that is not known.

        Where packets are followed, the last one: "stream/number".
        """
        return self._current.name

    @property
    def error(self) -> str:
        """Why the newest version is not served; empty: it is."""
        return self._error if self._follower is None else self._follower.status.error

    @property
    def num_missing(self) -> int | None:
        """IDs that the current version read as zeros; None: the servers count them."""
        return self._current.predictor.embeddings.num_missing

    @property
    def outputs(self) -> list[tuple[str, list[int]]]:
        """(dtype, shape of a sample) of each output, as the last prediction had them; empty before it."""
        return self._outputs

    @property
    def signature(self) -> Signature | None:
        """The features that the current version takes; None: it does not tell."""
        return self._current.predictor.signature

    def checked(self, batch: PersiaBatch) -> PersiaBatch:
        """See `Predictor.checked`; before batches are merged, which takes them in one order."""
        return self._current.predictor.checked(batch)

    def predict(self, batch: PersiaBatch) -> Prediction:
        """See `Predictor.predict`. Of default rows where the settings have them and others cannot be had."""
        # Remote rows change when their servers change them, and a lookup may take long.
        is_local = self.settings.embeddings is None
        with self._lookups if is_local else contextlib.nullcontext():
            current = self._current
            # Again: the version may have changed since the request was checked.
            batch = current.predictor.checked(batch)
            rows, is_default = self._look_up(current.predictor, batch)
        # Outside the lock: rows were copied by the lookup, and a model may compute for long.
        with self._computing:
            outputs = current.predictor.compute(batch, rows)
        self._outputs = [(output.dtype.name, list(output.shape[1:])) for output in outputs]
        return Prediction(current.name, outputs, is_default)

    def _look_up(self, predictor: Predictor, batch: PersiaBatch) -> tuple[LookupResult | None, bool]:
        """The rows, and whether they are default rows."""
        try:
            rows = predictor.look_up(batch)
        except (UnavailableError, DeadlineExceededError) as failure:
            if self.settings.default_rows is None:
                raise
            if not self.outage:
                get_default_logger().error("%s: answers from default rows: %s", self.settings.name, failure)
            self.outage = str(failure)
            with self._counting:
                self.num_default_batches += 1
            return predictor.look_up(batch, self.settings.default_rows), True
        self.outage = ""
        return rows, False

    def lookup(self, id_features: bytes) -> LookupResult:
        """Of the rows of the current version, for other models: this one is an `EmbeddingSource` too."""
        with self._lookups:
            return self._current.predictor.embeddings.lookup(id_features)

    def check_serving(self) -> None:
        """See `EmbeddingSource`."""
        self._current.predictor.embeddings.check_serving()

    def not_ready(self) -> str | None:
        """Why no request could be answered now; None: they can. May wait a second for each worker."""
        if self.settings.default_rows is not None:
            return None
        try:
            self._current.predictor.embeddings.check_serving()
        except PersiaError as failure:
            return str(failure)
        return None

    def close(self) -> None:
        self._stopped.set()
        if self._follower is not None:
            self._follower.close()
        if self._thread is not None:
            # Loading cannot be interrupted; the thread is a daemon.
            self._thread.join(5.0)

    def _switch(self, version: Version, change_rows: Callable[[], None]) -> None:
        # With all permits no lookup is under way: a batch never sees the rows of another version. A permit
        # that was acquired is kept while the next is waited for, so that load cannot starve the switch. Only
        # the follower's thread switches: two that collect permits at once would block each other for ever.
        for _ in range(_MAX_LOOKUPS):
            self._lookups.acquire()
        try:
            change_rows()
            self._current = version
        finally:
            self._lookups.release(_MAX_LOOKUPS)

    def _watch(self) -> None:
        # Loading takes the processors for seconds: what it leaves to requests must not be an equal share.
        lower_priority()
        while not self._stopped.wait(self.settings.poll_s):
            self._update()

    def _update(self) -> None:
        digest = ""
        try:
            digest = digest_of(resolve(self.settings.location))
            # A version that was refused is not loaded again each second, which would take the processors from
            # requests.
            if digest in (self._current.digest, self._refused):
                self._error = self._error if digest == self._refused else ""
                return
            version = self._load()
            self._judge(version)
            self._use(version)
            self._refused = self._error = ""
        except Exception as failure:  # whatever it is, the current version keeps answering
            if str(failure) != self._error:
                get_default_logger().error(
                    "%s: version %s stays, the next one cannot be served: %s",
                    self.settings.name,
                    self.version,
                    failure,
                )
            self._error = str(failure)
            # What may pass by itself is tried again.
            self._refused = "" if isinstance(failure, (OSError, UnavailableError)) else digest

    def _judge_copy(self, copy: ServedCopy) -> None:
        if copy.version is not None:  # else it cannot be used, which says why
            self._judge(copy.version)

    def _judge(self, version: Version) -> None:
        """FailedPreconditionError: the gate says that it may not take the place of the current one."""
        if self.settings.gate is not None:
            self.settings.gate.check(version.predictor.predict, self._current.predictor.predict)

    def _use(self, version: Version) -> None:
        self._current = version
        get_default_logger().info("%s: version %s answers from now on", self.settings.name, version.name)

    def _load(self) -> Version:
        started = time.monotonic()
        source = Source(self.settings.location)
        version = load_version(self.settings, source)
        get_default_logger().info(
            "%s: version %s is loaded from %s in %.1f s",
            self.settings.name,
            version.name,
            source.location,
            time.monotonic() - started,
        )
        return version
