"""The runtime of a process in its job: made whole before the context that uses it, and closed after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from persia import env
from persia.checkpoint.checkpoints import Checkpoints
from persia.checkpoint.peers import LocalPeer, Peer, find_servers
from persia.checkpoint.server_job import ServerShare, dump_percent
from persia.checkpoint.service import CheckpointService
from persia.config import GlobalConfig, SlotsConfig
from persia.errors import FailedPreconditionError
from persia.job.connection import JobConnection
from persia.job.embedded import (
    EmbeddedJob,
    GlobalSource,
    check_embeddable,
    read_global,
    read_slots,
)
from persia.messaging.subjects import NN_WORKER
from persia.packets.changes import IncrementalSettings, ServerChanges
from persia.packets.writer import PacketWriter
from persia.pipeline.backend import ClusterBackend, EmbeddingBackend
from persia.security.secret import TRAINER
from persia.storage.dense_slots import DenseSlots
from persia.storage.schema import RowSchema
from persia.storage.signature import Signature
from persia.tiers.server_tier import ServerTier

if TYPE_CHECKING:
    from persia._native import EmbeddingStore

_MAX_FAILURE = 2000  # characters of an error that other processes are told


class JobRuntime:
    """What a process holds of its job: servers, or a store of its own, connection, checkpoints and packets.

    Contexts entered inside one another share it; the outermost one closes it. `connection` is None where the
    backend was given, and `embedded` where there are servers.
    """

    def __init__(
        self,
        backend: EmbeddingBackend,
        slots: SlotsConfig | None = None,
        *,
        connection: JobConnection | None = None,
        embedded: EmbeddedJob | None = None,
        tier: ServerTier | None = None,
        num_threads: int | None = None,
    ) -> None:
        """`num_threads`: of dumps and loads of a store in this process."""
        self.backend = backend
        self.slots = slots
        self.connection = connection
        self.embedded = embedded
        self.packets: PacketWriter | None = None
        self.signature: Signature | None = None  # of the model that is trained here, or was loaded
        self.dense_slots: DenseSlots | None = None  # of the outermost context's model
        self.checkpoints = Checkpoints(self._find_peers, deadline_s=env.get_deadline_s())
        self.share: ServerShare | None = None  # the store in this process
        self._peers: list[Peer] = []
        if backend.local_store is not None:
            config = GlobalConfig() if embedded is None else embedded.config
            self.share = local_share(
                backend.local_store, slots, num_threads, dump_percent=dump_percent(config), tier=tier
            )
            packets = None if embedded is None else IncrementalSettings.of(embedded.config)
            changes = ServerChanges.of(backend.local_store, packets)
            self._peers = [LocalPeer(CheckpointService(self.share, changes))]
        self._resources = ExitStack()  # closed last
        self._is_advertised = False

    @classmethod
    def open(
        cls, slots: SlotsConfig | None, global_config: GlobalSource | None, rank: int, world_size: int
    ) -> JobRuntime:
        """Connects to the job in PERSIA_NATS_URL; without it, or with PERSIA_EMBEDDED, embeds one."""
        name = f"nn-worker-{rank}"
        if env.get_nats_url() is None or env.embedded():
            return cls.embed(name, slots or read_slots(None), read_global(global_config), world_size)
        return cls.connect(name, slots)

    @classmethod
    def connect(cls, name: str, slots: SlotsConfig | None = None) -> JobRuntime:
        """Waits for the job's embedding workers. FailedPreconditionError: they have other `slots`."""
        with ExitStack() as resources:
            connection = JobConnection.connect(name, TRAINER)
            resources.callback(connection.close)
            # Waits for the workers, and compares their slots with these: a difference would train other rows.
            backend = ClusterBackend(
                connection.directory, schema="" if slots is None else slots.schema_hash()
            )
            resources.callback(backend.close)
            runtime = cls(backend, slots, connection=connection)
            runtime._resources = resources.pop_all()  # last: until here an error closes them
            return runtime

    @classmethod
    def embed(
        cls, name: str, slots: SlotsConfig | None, config: GlobalConfig, world_size: int = 1
    ) -> JobRuntime:
        """Starts embedding worker and store in this process. Raises what `check_embeddable` does."""
        slots = check_embeddable(slots, world_size)
        storage = config.embedding_parameter_server_config.storage
        tier = None
        with ExitStack() as resources:
            if storage.has_pool:
                # Before the store, which is created on it.
                threads = config.common_config.checkpointing_config.num_workers
                schema = RowSchema.of(slots)
                tier = ServerTier(storage, index=0, replicas=1, schema=schema, num_threads=threads)
                resources.callback(tier.close)
            job = EmbeddedJob(slots, config, None if tier is None else tier.tier_options)
            resources.callback(job.close)
            if tier is not None and job.backend.local_store is not None:
                tier.attach(job.backend.local_store)
            connection = job.connect(name)
            resources.callback(connection.close)
            runtime = cls(job.backend, slots, connection=connection, embedded=job, tier=tier)
            runtime._resources = resources.pop_all()  # last: until here an error closes them
            return runtime

    def advertise(self, rank: int, world_size: int, *, address: str = "") -> None:
        """Advertises this NN worker to loaders and the other ranks; once."""
        if self.connection is not None and not self._is_advertised:
            self.connection.advertise(NN_WORKER, rank, world_size, address=address)
            self._is_advertised = True

    def fail(self, error: BaseException) -> None:
        """Tells the other processes that `error` ends this one, from its `close` on."""
        if self.connection is not None:
            self.connection.failure = f"{type(error).__name__}: {error}"[:_MAX_FAILURE]

    def start_packets(self, step: Callable[[], int], num_trainers: int) -> PacketWriter | None:
        """Writes packets of changes for inference servers, if the servers' configuration asks for them.

        `step` is that of the training loop; the packets' own thread calls it.
        """
        if self.connection is not None or self.backend.local_store is not None:
            self.packets = PacketWriter(
                self._find_peers, deadline_s=env.get_deadline_s(), step=step, num_trainers=num_trainers
            )
            # Packets pause for dumps and loads: a server does one operation at a time.
            self.checkpoints.hook = self.packets.stream
            self.packets.start()
        return self.packets

    def close(self, deadline_s: float, *, in_order: bool = True) -> None:
        """Ends dumps, loads and packets, then disconnects; waits for them unless not `in_order`."""
        # In reverse: dumps and loads end, then packets, then the connection. An error of one does not keep
        # the others from ending.
        with self._resources, contextlib.ExitStack() as last:
            last.callback(self.checkpoints.close, finish=in_order)
            if self.packets is not None:
                last.callback(self.packets.close, None if in_order else deadline_s)
                if in_order:  # a dump and a packet exclude one another
                    last.callback(self.checkpoints.close, finish=True)

    def _find_peers(self) -> list[Peer]:
        """All stores of the job: its servers', or the one of this process."""
        if self._peers:
            return self._peers
        if self.connection is None:
            raise FailedPreconditionError(
                "this context has no connection to the job's parameter servers: dump and load in a TrainCtx"
            )
        # Not kept: asked for at each operation: servers may be replaced while the job runs.
        return find_servers(self.connection.session, env.get_deadline_s())


def local_share(
    store: EmbeddingStore, slots: SlotsConfig | None, num_threads: int | None = None, **options: Any
) -> ServerShare:
    """A store of this process, which has all rows. `options`: those of `ServerShare`."""
    return ServerShare(
        store=store,
        index=0,
        replicas=1,
        schema=None if slots is None else RowSchema.of(slots),
        num_threads=num_threads or env.get_num_threads() or 2,
        **options,
    )
