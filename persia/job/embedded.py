"""A job inside one process: embedding worker and store, and the way in which its data loaders reach it.

What stands in for the servers of a cluster is the same engine behind the same interfaces, so results of
reproducible runs are equal to the last bit, and loaders, back-pressure and the end of a stream follow the
same protocol.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from persia import env
from persia._native import EmbeddedClient, TierOptions
from persia.config import (
    GlobalConfig,
    SlotsConfig,
    load_embedding_config,
    load_global_config,
    parse_embedding_config,
    parse_global_config,
)
from persia.errors import (
    ConfigError,
    FailedPreconditionError,
    StreamClosedError,
    UnavailableError,
)
from persia.job.connection import JobConnection
from persia.logger import get_default_logger
from persia.messaging.local_session import LocalBroker, LocalSession
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.queues import Deadline
from persia.pipeline.receive import LOADER_REMEDY, Inbox
from persia.pipeline.send import RegisterBatchHandler
from persia.security.secret import TRAINER

# A YAML file, what would stand in it, or the checked configuration itself.
SlotsSource = SlotsConfig | Mapping[str, Any] | str | os.PathLike[str]
GlobalSource = GlobalConfig | Mapping[str, Any] | str | os.PathLike[str]

_REPORT_INTERVAL_S = 5.0
_LOADER_END_S = 5.0


class EmbeddedJob:
    """Worker and store of one context. Contexts nested in it share it; others have their own."""

    def __init__(self, slots: SlotsConfig, config: GlobalConfig, tier: TierOptions | None = None) -> None:
        """Loaders are threads of this process; with PERSIA_NATS_URL also processes that meet there."""
        self.config = config
        self.has_nats = env.get_nats_url() is not None
        self._broker = LocalBroker()  # unused where there is NATS
        store, worker = config.embedding_parameter_server_config, config.embedding_worker_config
        self._client = EmbeddedClient(
            slots=slots.native_slots(),
            feature_index_prefix_bit=slots.feature_index_prefix_bit,
            capacity=store.capacity,
            num_internal_shards=store.num_hashmap_internal_shards,
            forward_buffer_size=worker.forward_buffer_size,
            tier=tier,
            row_dtype=store.row_dtype,
        )
        self.backend = EmbeddingBackend(
            self._client, deadline_s=env.get_deadline_s(), slot_modes=slots.slot_modes
        )
        # A participant of its own, as in a cluster: loaders find the worker by discovery and register with
        # it.
        self._worker = self.connect("embedding-worker-0")
        try:
            session = self._worker.session
            session.respond(session.subjects.ids(0), RegisterBatchHandler(self._register))
            self._worker.advertise(
                EMBEDDING_WORKER, 0, 1, schema=slots.schema_hash(), slot_modes=slots.slot_modes
            )
        except BaseException:
            self._worker.close()
            raise
        # Last: a loader on another thread may find the job from here on, and the worker must answer it.
        with _jobs_changed:
            _jobs.append(self)
            _jobs_changed.notify_all()
        get_default_logger().info(
            "embedded mode: embedding worker and store of %d slots live in this process",
            len(slots.slots_config),
        )

    @property
    def loader_remedy(self) -> str:
        """How to start the data loader that a stream waits for."""
        here = "in one process, pass StreamingDataset(loader=...) or run a DataCtx on another thread"
        return f"{here}; or {LOADER_REMEDY}" if self.has_nats else here

    def connect(self, name: str) -> JobConnection:
        """A participant: the context itself, or one of its data loaders."""
        if self.has_nats:
            return JobConnection.connect(name, TRAINER)
        return JobConnection(LocalSession(self._broker, name=name))

    def close(self) -> None:
        """Takes no more batches. Idempotent; lookups under way end by themselves."""
        with _jobs_changed:
            if self in _jobs:
                _jobs.remove(self)
        self._worker.close()

    def _register(self, loader_index: int, id_features: bytes | memoryview) -> tuple[int, int]:
        reference = self._client.register_batch(loader_index, id_features)
        return reference.worker_incarnation, reference.reference


# The embedded jobs of this process, for loaders that run on other threads than their context.
_jobs: list[EmbeddedJob] = []  # guarded by _jobs_changed
_jobs_changed = threading.Condition()
# `job`: what a loader thread of `StreamingDataset` feeds, whatever else runs in this process.
_of_thread = threading.local()


def find_embedded_job() -> EmbeddedJob:
    """The job that a loader on this thread feeds: the one it was started for, else the only one.

    Waits for a job to begin, but not on the main thread. Raises FailedPreconditionError without one, or with
    several.
    """
    assigned: EmbeddedJob | None = getattr(_of_thread, "job", None)
    if assigned is not None:
        return assigned
    # A job of the main thread cannot begin while that thread waits here for it.
    may_wait = threading.current_thread() is not threading.main_thread()
    deadline = Deadline(env.get_deadline_s())
    with _jobs_changed:
        while may_wait and not _jobs and not deadline.over:
            if not _jobs_changed.wait(min(_REPORT_INTERVAL_S, deadline.left_s())):
                get_default_logger().info("a DataCtx waits for a TrainCtx of this process (embedded mode)")
        # With several the choice would be a guess, and batches of one model would train another.
        if len(_jobs) == 1:
            return _jobs[0]
    if not _jobs:
        raise FailedPreconditionError(
            "PERSIA_NATS_URL is not set and no context of this process trains: start the loader with "
            "persia-launcher, or on a thread of the process that has the TrainCtx"
        )
    raise FailedPreconditionError(
        f"{len(_jobs)} embedded contexts are there: name the one to feed, DataCtx(to=ctx)"
    )


class LoaderThread:
    """Runs `loader()`, whose DataCtx feeds `job`; what goes wrong there is raised in the training loop."""

    def __init__(self, loader: Callable[[], object], job: EmbeddedJob, inbox: Inbox) -> None:
        self._loader, self._job, self._inbox = loader, job, inbox
        self._thread = threading.Thread(target=self._run, name="persia-loader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After the receiver has stopped: waits for the loader to notice."""
        self._thread.join(_LOADER_END_S)
        if self._thread.is_alive():  # it cannot be interrupted; a daemon, it does not keep the process
            get_default_logger().warning(
                "the data loader did not end within %g s, left behind", _LOADER_END_S
            )

    def _run(self) -> None:
        _of_thread.job = self._job  # for the DataCtx in it, which asks find_embedded_job
        try:
            self._loader()
        except StreamClosedError:
            pass  # training has ended first
        except BaseException as error:  # also sys.exit(): the loop must not wait for more
            failure = UnavailableError(
                f"the data loader ended with an error: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._inbox.fail(failure)
        else:
            if self._inbox.num_loaders is None:  # nothing was sent, not even the end of its data
                self._inbox.fail(FailedPreconditionError("the data loader has ended without a DataCtx"))


def read_slots(given: SlotsSource | None) -> SlotsConfig | None:
    """The slots as given to a context, else those of PERSIA_EMBEDDING_CONFIG; None without either."""
    if given is None:
        given = env.embedding_config_path()
    if given is None or isinstance(given, SlotsConfig):
        return given
    return parse_embedding_config(given) if isinstance(given, Mapping) else load_embedding_config(given)


def read_global(given: GlobalSource | None) -> GlobalConfig:
    """The settings as given to a context, else those of PERSIA_GLOBAL_CONFIG, else the defaults."""
    if given is None:
        given = env.global_config_path()
    if given is None or isinstance(given, GlobalConfig):
        return given or GlobalConfig()
    return parse_global_config(given) if isinstance(given, Mapping) else load_global_config(given)


def check_embeddable(slots: SlotsConfig | None, world_size: int) -> SlotsConfig:
    """The slots of a job without servers. ConfigError, FailedPreconditionError: with the remedies."""
    if slots is None:
        raise ConfigError(
            "PERSIA_NATS_URL is not set, so embeddings live in this process, which needs their slots: pass "
            "slots={'slots_config': {...}} or a file to the context, or set PERSIA_EMBEDDING_CONFIG; to join "
            "a cluster, start the script with persia-launcher"
        )
    if world_size > 1:
        raise FailedPreconditionError(
            f"WORLD_SIZE is {world_size} and there are no servers: every rank would train embeddings of its "
            "own; start the job with `persia-launcher local --nproc-per-node`, or name its broker in "
            "PERSIA_NATS_URL"
        )
    return slots
