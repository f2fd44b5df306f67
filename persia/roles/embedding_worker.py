"""The embedding worker process: takes ID features from loaders, and answers NN workers with embeddings."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import TYPE_CHECKING

from persia import env
from persia.config import GlobalConfig, SlotsConfig, load_embedding_config, load_global_config
from persia.errors import ConfigError, PersiaError, ResourceExhaustedError
from persia.logger import get_default_logger, set_role
from persia.messaging.discovery import Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.payloads import IdsReply, IdsRequest, ReplyStatus
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER
from persia.roles.lifetime import DRAIN_S, announced, connected, stopped_by_signals, wait_for_stop
from persia.roles.options import ServerOptions

if TYPE_CHECKING:
    from persia._native import EmbeddingWorker

__all__ = ["IdsResponder", "ServerLinks", "run_embedding_worker"]

_RETRY_MS = (5, 20)  # loaders that were refused together come back at different times


def run_embedding_worker(options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT. What is wrong in `options` is found before anything starts."""
    if options.embedding_config is None:
        raise ConfigError("the embedding worker needs --embedding-config (PERSIA_EMBEDDING_CONFIG)")
    config = load_global_config(options.global_config) if options.global_config else GlobalConfig()
    slots = load_embedding_config(options.embedding_config)
    nats_url = env.require_nats_url()
    set_role(EMBEDDING_WORKER, options.replica_index)
    name = f"{EMBEDDING_WORKER} {options.replica_index}"
    with stopped_by_signals(name), ExitStack() as stack:
        session = stack.enter_context(connected(nats_url, name))
        worker = _start_with_servers(stack, session, options, config, slots)
        port = worker.start(options.host, options.port)
        stack.callback(worker.stop, DRAIN_S)
        ids = session.respond(session.subjects.ids(options.replica_index), IdsResponder(worker))
        stack.callback(ids.close)
        stack.enter_context(
            announced(
                session,
                EMBEDDING_WORKER,
                options,
                incarnation=worker.incarnation,
                port=port,
                schema=slots.schema_hash(),
            )
        )
        wait_for_stop()


def _start_with_servers(
    stack: ExitStack, session: NatsSession, options: ServerOptions, config: GlobalConfig, slots: SlotsConfig
) -> EmbeddingWorker:
    """Waits for all parameter servers; returns a worker that knows them, and will know their successors."""
    directory = Directory(session)
    schema = slots.schema_hash()
    servers = directory.wait_for(EMBEDDING_PARAMETER_SERVER, env.get_deadline_s(), schema=schema)
    worker = _make_worker(options, config, slots, len(servers))
    links = ServerLinks(worker, len(servers))
    for server in servers:
        links.connect(server)
    watch = directory.watch(EMBEDDING_PARAMETER_SERVER, links.on_event)
    stack.callback(watch.close)
    # Asked once more, for a restart that fell between the first answers and the watch.
    for server in directory.wait_for(
        EMBEDDING_PARAMETER_SERVER, env.get_deadline_s(), len(servers), schema=schema
    ):
        links.connect(server)
    return worker


def _make_worker(
    options: ServerOptions, config: GlobalConfig, slots: SlotsConfig, num_servers: int
) -> EmbeddingWorker:
    from persia._native import EmbeddingWorker

    section = config.embedding_worker_config
    return EmbeddingWorker(
        slots=slots.native_slots(),
        feature_index_prefix_bit=slots.feature_index_prefix_bit,
        num_servers=num_servers,
        replica_index=options.replica_index,
        forward_buffer_size=section.forward_buffer_size,
        buffered_data_expired_s=section.buffered_data_expired_sec,
    )


class ServerLinks:
    """Keeps the worker's addresses of the parameter servers up to date. Idempotent.

    The watch and the start-up may call it at once: connecting twice is harmless.
    """

    def __init__(self, worker: EmbeddingWorker, num_servers: int) -> None:
        self._worker = worker
        self._num_servers = num_servers
        self._incarnations: dict[int, int] = {}

    def on_event(self, event: ServiceEvent) -> None:
        """For `Directory.watch`."""
        if event.kind is EventKind.HELLO:
            self.connect(event.info)
        else:
            get_default_logger().info("%s has stopped; lookups wait until it is back", event.info)

    def connect(self, server: ServiceInfo) -> None:
        """Uses `server` from now on for its index."""
        known = self._incarnations.get(server.index)
        if known == server.incarnation:
            return
        if server.replicas != self._num_servers:
            get_default_logger().error(
                "ignored %s: this worker runs with %d parameter servers", server, self._num_servers
            )
            return
        self._worker.set_server(server.index, server.address)
        self._incarnations[server.index] = server.incarnation
        if known is not None:
            get_default_logger().error(
                "%s has restarted: the rows that it held are lost, except those of a checkpoint loaded since",
                server,
            )


class IdsResponder:
    """Answers loaders: registers their ID features, or says why not. Called on several threads."""

    def __init__(self, worker: EmbeddingWorker) -> None:
        self._worker = worker

    def __call__(self, payload: bytes) -> bytes:
        return self._register(payload).encode()

    def _register(self, payload: bytes) -> IdsReply:
        try:
            request = IdsRequest.decode(payload)
            reference = self._worker.register_batch(request.loader_index, request.id_features)
        except ResourceExhaustedError:
            return IdsReply(ReplyStatus.FULL, retry_ms=random.randint(*_RETRY_MS))
        except PersiaError as error:
            return IdsReply(ReplyStatus.ERROR, message=str(error))
        return IdsReply(ReplyStatus.OK, worker_incarnation=self._worker.incarnation, reference=reference)
