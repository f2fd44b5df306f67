"""The embedding worker process: takes ID features from loaders, and answers NN workers with embeddings."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from persia import env
from persia.config import GlobalConfig, SlotsConfig, load_embedding_config, load_global_config
from persia.errors import ConfigError, PersiaError
from persia.logger import get_default_logger, set_role
from persia.messaging.discovery import Advertiser, Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.interface import Registration, Session
from persia.messaging.payloads import MovedShards
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER
from persia.observability.sources import EmbeddingWorkerSource
from persia.pipeline.send import RegisterBatchHandler
from persia.roles import inference
from persia.roles.lifetime import (
    DRAIN_S,
    ServerOptions,
    advertised,
    connected,
    observed,
    stopped_by_signals,
    wait_for_stop,
)
from persia.security import install
from persia.security.secret import WORKER
from persia.waiting import Attempts

if TYPE_CHECKING:
    from persia._native import EmbeddingWorker

_WHO_S = 0.5


def run_embedding_worker(options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT. What is wrong in `options` is found before anything starts."""
    if options.embedding_config is None:
        raise ConfigError("the embedding worker needs --embedding-config (PERSIA_EMBEDDING_CONFIG)")
    config = load_global_config(options.global_config) if options.global_config else GlobalConfig()
    config = inference.config_of(options, config)
    slots = load_embedding_config(options.embedding_config)
    set_role(EMBEDDING_WORKER, options.replica_index)
    install(WORKER)
    name = f"{EMBEDDING_WORKER} {options.replica_index}"
    if config.common_config.job_type == inference.JOB_TYPE:
        with stopped_by_signals(name), ExitStack() as stack:
            servers = inference.inference_servers(config)
            worker = _make_worker(options, config, slots, len(servers))
            # Addresses are fixed by the config: without a broker there is no discovery.
            for index, address in enumerate(servers):
                worker.set_server(index, address)
            port = worker.start(options.host, options.port)
            stack.callback(worker.stop, DRAIN_S)
            source = EmbeddingWorkerSource(worker, options.replica_index, options.replica_size)
            observer = stack.enter_context(observed(source, None, options, config))
            observer.serving = True  # readiness asks the parameter servers each time
            get_default_logger().info("lookups are answered at %s:%d", options.host, port)
            wait_for_stop()
        return
    nats_url = env.require_nats_url()
    with stopped_by_signals(name), ExitStack() as stack:
        session = stack.enter_context(connected(nats_url, name, WORKER))
        # Left in reverse: the worker is not advertised any more, serves the batches that it holds, then
        # closes its port. The servers are watched until the end, because those batches still update rows.
        worker = _start_with_servers(stack, session, options, config, slots)
        port = worker.start(options.host, options.port)
        stack.callback(worker.stop, DRAIN_S)
        stack.callback(drain, worker, session)
        source = EmbeddingWorkerSource(worker, options.replica_index, options.replica_size)
        observer = stack.enter_context(observed(source, session, options, config))
        responder = RegisterBatchHandler.of_worker(worker)
        advertiser = stack.enter_context(
            advertised(
                session,
                EMBEDDING_WORKER,
                options,
                incarnation=worker.incarnation,
                port=port,
                schema=slots.schema_hash(),
                observer=observer,
                subscribe=lambda: session.respond(session.subjects.ids(options.replica_index), responder),
                slot_modes=slots.slot_modes,
            )
        )
        # A worker that joined before this is missed, which is harmless: clients take the largest number told.
        watch = Directory(session).watch(EMBEDDING_WORKER, partial(count_workers, advertiser))
        stack.callback(watch.close)
        watch = watch_ranks(Directory(session), worker)
        stack.callback(watch.close)
        wait_for_stop()


def _start_with_servers(
    stack: ExitStack, session: NatsSession, options: ServerOptions, config: GlobalConfig, slots: SlotsConfig
) -> EmbeddingWorker:
    """Waits for all parameter servers; returns a worker that knows them, and will know their successors."""
    directory = Directory(session)
    schema = slots.schema_hash()
    # The number of servers decides which server holds a row, so the worker cannot exist before it is known.
    servers = directory.wait_for(EMBEDDING_PARAMETER_SERVER, env.get_deadline_s(), schema=schema)
    # One without moved shards may have restarted, and not know of them yet.
    generation, moved_shards = _placement_of(max(servers, key=lambda server: len(server.moved_shards)))
    worker = _make_worker(
        options, config, slots, len(servers), generation=generation, moved_shards=moved_shards
    )
    links = ServerLinks(worker, len(servers), generation, moved_shards)
    for server in servers:
        links.connect(server)
    watch = directory.watch(EMBEDDING_PARAMETER_SERVER, links.on_event)
    stack.callback(watch.close)
    # Asked once more, for a restart that fell between the first answers and the watch.
    for server in directory.wait_for(EMBEDDING_PARAMETER_SERVER, env.get_deadline_s(), schema=schema):
        links.connect(server)
    return worker


def _make_worker(
    options: ServerOptions, config: GlobalConfig, slots: SlotsConfig, num_servers: int, **placement: Any
) -> EmbeddingWorker:
    from persia._native import EmbeddingWorker

    section = config.embedding_worker_config
    return EmbeddingWorker(
        slots=slots.native_slots(),
        feature_index_prefix_bit=slots.feature_index_prefix_bit,
        num_servers=num_servers,
        forward_buffer_size=section.forward_buffer_size,
        buffered_data_expired_s=section.buffered_data_expired_sec,
        **placement,
    )


def count_workers(advertiser: Advertiser, event: ServiceEvent) -> None:
    """Workers may come while a job runs, and go from the highest number down: newcomers ask how many."""
    worker, replicas = event.info, advertiser.info.replicas
    if event.kind is EventKind.JOINED:
        # A newcomer knows only itself, so its number is a lower bound of what the job has.
        advertiser.change(replicas=max(replicas, worker.replicas))
    # Only the highest number shrinks the job. A lower one that leaves is expected back, as after a restart.
    elif worker.index == replicas - 1 and worker.index > advertiser.info.index:
        advertiser.change(replicas=replicas - 1)


def watch_ranks(directory: Directory, worker: EmbeddingWorker) -> Registration:
    """Ends the batches that wait for a rank that has died, when a rank joins: in most cases its successor.

    A worker full of them would take no batch until they expire. A rank that lives looks its own up again.
    """
    running: set[int] = set()  # incarnations of ranks that this worker found when it started

    def on_event(event: ServiceEvent) -> None:
        if event.kind is EventKind.JOINED and event.info.incarnation not in running:
            release_waiting(worker, event.info)

    # First: to miss a successor costs more than to release batches of a rank that is about to answer.
    watch = directory.watch(NN_WORKER, on_event)
    # Once its connection to the broker is restored, each of them says again that it has joined.
    with suppress(PersiaError):  # the broker is away: batches are looked up directly
        running.update(rank.incarnation for rank in directory.present(NN_WORKER, _WHO_S))
    return watch


def release_waiting(worker: EmbeddingWorker, rank: ServiceInfo) -> None:
    if num_batches := worker.release_waiting():
        get_default_logger().info("%d batches were released: %s has joined", num_batches, rank)


def drain(worker: EmbeddingWorker, session: Session) -> None:
    """Serves on until no batch waits for its lookup or its gradients, or no NN worker is there to send them.

    Called when no more batches are registered. Whoever has sent SIGTERM may still kill, after its own grace.
    """
    reported = False
    for _ in Attempts(env.get_deadline_s()):
        stats = worker.stats()
        num_batches = stats["num_buffered"] + stats["num_in_flight"]
        if num_batches == 0:
            return
        # Without ranks no gradients will arrive, and waiting for the deadline would only delay the end.
        answers: list[bytes] = []
        with suppress(PersiaError):  # the broker has ended first
            answers = session.request_many(session.subjects.who(NN_WORKER), b"", _WHO_S, enough=bool)
        if not answers:
            get_default_logger().info("%d batches are given up: no NN worker answers", num_batches)
            return
        if not reported:
            get_default_logger().info("%d batches are still served before the end", num_batches)
            reported = True
    get_default_logger().warning("%d batches are given up after PERSIA_DEADLINE_SEC", num_batches)


_Placement = tuple[int, MovedShards]


def _placement_of(server: ServiceInfo) -> _Placement:
    return server.generation, server.moved_shards


class ServerLinks:
    """Keeps the worker's addresses of the parameter servers up to date. Idempotent.

    The watch and the start-up may call it at once: connecting twice is harmless. Once all servers of a higher
    generation are known, they replace those of before. So do all servers of the same generation that have
    forgotten its placement, since all have restarted.
    """

    def __init__(
        self, worker: EmbeddingWorker, num_servers: int, generation: int = 0, moved_shards: MovedShards = ()
    ) -> None:
        self._worker = worker
        self._num_servers = num_servers
        self._placement: _Placement = (generation, moved_shards)
        self._servers: dict[int, ServiceInfo] = {}
        self._next: dict[int, ServiceInfo] = {}  # of the highest generation, until all are known
        self._lock = threading.Lock()

    def on_event(self, event: ServiceEvent) -> None:
        """For `Directory.watch`."""
        if event.kind is EventKind.JOINED:
            self.connect(event.info)
        elif event.info.generation >= self._placement[0]:  # else others have its rows
            get_default_logger().info("%s has stopped; lookups wait until it is back", event.info)

    def connect(self, server: ServiceInfo) -> None:
        """Uses `server` from now on for its index."""
        with self._lock:
            if _placement_of(server) == self._placement:
                self._connect(server)
            elif server.generation >= self._placement[0]:
                self._gather(server)

    def _gather(self, server: ServiceInfo) -> None:
        if server.generation == self._placement[0] and self._next.get(server.index) != server:
            get_default_logger().error(
                "%s has %d moved virtual shards, and this worker knows %d of the same generation %d: lookups "
                "of its rows wait until it has begun again, or all others have; end it if it does not",
                server,
                len(server.moved_shards),
                len(self._placement[1]),
                server.generation,
            )
        known = next(iter(self._next.values()), server)
        if server.generation < known.generation:  # it was replaced before it was known
            return
        if _placement_of(server) != _placement_of(known):
            self._next = {}
        self._next[server.index] = server
        if len(self._next) < server.replicas:
            return
        self._worker.replace_servers(
            [self._next[index].address for index in range(server.replicas)],
            generation=server.generation,
            moved_shards=server.moved_shards,
        )
        self._servers, self._next = self._next, {}
        self._num_servers, self._placement = server.replicas, _placement_of(server)
        get_default_logger().info("%d parameter servers have replaced those of before", server.replicas)

    def _connect(self, server: ServiceInfo) -> None:
        # By incarnation rather than address: a restarted server may listen on the address of its predecessor.
        known = self._servers.get(server.index)
        if known is not None and server.is_outranked_by(known):
            return
        if known is not None and known.incarnation == server.incarnation:
            self._servers[server.index] = server  # its term may have risen
            return
        # Rows would be asked of the wrong server: routing uses the number that this worker was made with.
        if server.replicas != self._num_servers:
            get_default_logger().error(
                "ignored %s: this worker runs with %d parameter servers", server, self._num_servers
            )
            return
        self._worker.set_server(server.index, server.address)
        self._servers[server.index] = server
        if known is not None:
            kept = "with rows of its predecessor" if server.has_rows else "without the rows that it held"
            get_default_logger().error("%s has restarted %s", server, kept)
