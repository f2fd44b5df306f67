"""The embedding parameter server process: holds a share of the rows, and updates them."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from persia import env
from persia.checkpoint.server_job import ServerShare, dump_percent
from persia.checkpoint.service import CheckpointService
from persia.config import GlobalConfig, SlotsConfig, load_embedding_config, load_global_config
from persia.errors import ConfigError
from persia.logger import get_default_logger, set_role
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.observability.process import ProcessObserver
from persia.observability.sources import ParameterServerSource
from persia.packets.changes import IncrementalSettings, ServerChanges
from persia.packets.follower import Follower
from persia.packets.log import PacketLog
from persia.roles import inference
from persia.roles.elastic import ElasticServer, placement_of
from persia.roles.lifetime import (
    DRAIN_S,
    ServerOptions,
    address_of,
    advertised,
    connected,
    observed,
    stopped_by_signals,
    wait_for_stop,
)
from persia.roles.replica import Replica, config_hash, starts_as_standby
from persia.roles.standby import Pair
from persia.security import install
from persia.security.secret import SERVER
from persia.storage.schema import RowSchema
from persia.tiers.server_tier import ServerTier

if TYPE_CHECKING:
    from persia._native import ParameterServer

_THREADS = 2
_REPLICATING_THREADS = 8  # most of them wait for the standby


def run_parameter_server(options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT. What is wrong in `options` is found before anything starts."""
    config = config_of(options)
    slots = load_embedding_config(options.embedding_config) if options.embedding_config else None
    set_role(EMBEDDING_PARAMETER_SERVER, options.replica_index)
    install(SERVER)
    name = f"{EMBEDDING_PARAMETER_SERVER} {options.replica_index}"
    if config.common_config.job_type == inference.JOB_TYPE:
        with stopped_by_signals(name), ExitStack() as stack:
            _serve_checkpoint(stack, options, config, slots)
            wait_for_stop()
        return
    if options.standby and not config.embedding_parameter_server_config.standbys:
        raise ConfigError("--standby needs embedding_parameter_server_config.standbys: 1")
    nats_url = env.require_nats_url()
    with stopped_by_signals(name):
        while True:
            _serve_training(nats_url, name, options, config, slots)
            get_default_logger().info("%s starts again", name)
            options = replace(options, sources=0)


def _serve_training(
    nats_url: str, name: str, options: ServerOptions, config: GlobalConfig, slots: SlotsConfig | None
) -> None:
    """Until a signal. Returns if it is to start again: as a standby that was released, or without rows."""
    section = config.embedding_parameter_server_config
    with ExitStack() as stack:
        # First, so that it is closed last: the server uses it until it has stopped.
        tier = _open_tier(stack, options, config, slots)
        session, is_standby = None, options.standby
        if section.standbys:
            session = stack.enter_context(connected(nats_url, name, SERVER))
            is_standby = is_standby or starts_as_standby(session, options.replica_index)
        elif options.generation and not options.sources and options.replica_size > 1:
            session = stack.enter_context(connected(nats_url, name, SERVER))
            options = replace(options, moved_shards=placement_of(session, options.generation))
        server = _make_server(options, config, tier, is_standby=is_standby)
        if tier is not None:
            tier.attach(server.store)
        port = server.start(options.host, options.port)
        stack.callback(server.stop, DRAIN_S)
        # At once: to connect may take long, and who knows this address of before may begin to update.
        changes = ServerChanges.of(server.store, IncrementalSettings.of(config))
        session = session or stack.enter_context(connected(nats_url, name, SERVER))
        share = _share(server, options, config, slots, tier)
        source = ParameterServerSource(server, options.replica_index, options.replica_size, share.log)
        if tier is not None:
            source.tier = tier.status
        observer = stack.enter_context(observed(source, session, options, config))
        checkpoints = stack.enter_context(closing(CheckpointService(share, changes)))
        schema = "" if slots is None else slots.schema_hash()
        elastic = stack.enter_context(closing(ElasticServer(session, server, options, port, config)))
        source.silence = elastic.not_ready
        pair = None
        if section.standbys:
            replica = Replica(session, server, options.replica_index, address_of(options, port))
            stack.callback(replica.close)
            pair = Pair(replica, config_hash(section, options.replica_size, schema), section)
            source.standby = pair.status
            if is_standby and not _follow(pair, source, observer, is_forced=options.standby):
                return
            pair.lead(checkpoints)
            stack.callback(pair.close)
        advertiser = stack.enter_context(
            advertised(
                session,
                EMBEDDING_PARAMETER_SERVER,
                options,
                incarnation=server.incarnation,
                port=port,
                schema=schema,
                observer=observer,
                has_rows=is_standby or options.sources > 0 or _has_recovered(server, tier),
                **(pair or elastic).advertisement(),
                subscribe=lambda: session.respond(
                    session.subjects.checkpoint(options.replica_index),
                    (pair or elastic).handle_checkpoint,
                ),
            )
        )
        if pair is not None:
            pair.start(advertiser)
        elastic.start(advertiser, checkpoints)
        elastic.wait()


def _follow(pair: Pair, source: ParameterServerSource, observer: ProcessObserver, *, is_forced: bool) -> bool:
    """As `Pair.follow`. A standby is ready once it has the rows: a supervisor waits for that."""
    before, server = source.silence, source.server
    source.silence = lambda: None if server.has_copy else "it copies the rows of its server"
    observer.serving = True
    has_taken_over = pair.follow(is_forced=is_forced)
    observer.serving, source.silence = False, before
    return has_taken_over


def _has_recovered(server: ParameterServer, tier: ServerTier | None) -> bool:
    return tier is not None and server.stats()["num_rows"] > 0


def _serve_checkpoint(
    stack: ExitStack, options: ServerOptions, config: GlobalConfig, slots: SlotsConfig | None
) -> None:
    """Loads the server's share of the checkpoint, and answers lookups from then on; with
    `enable_incremental_update` it follows the training's packets meanwhile.

    NotFoundError, CorruptionError, FailedPreconditionError: what cannot be loaded.
    """
    follow = inference.follow_options(config)
    checkpoint = inference.infer_config(config).embedding_checkpoint
    server = _make_server(options, config)
    port = server.start(options.host, options.port)
    stack.callback(server.stop, DRAIN_S)
    share = _share(server, options, config, slots)  # a server has a store once it is started
    source = ParameterServerSource(server, options.replica_index, options.replica_size)
    # Needs no broker: what the rows come from is in the config.
    observer = stack.enter_context(observed(source, None, options, config))
    if follow is not None:
        copies = inference.RowCopies(
            PacketLog(follow.packets), server, share, lambda: _make_server(options, config)
        )
        follower = Follower(copies, follow)
        source.following = lambda: follower.status.to_json()
        stack.callback(follower.close)
        follower.start()
    elif checkpoint is not None:
        inference.load_share(share, checkpoint)
    # Until here lookups were refused: an empty server would answer with zeros.
    server.mark_loaded()
    observer.serving = True
    get_default_logger().info(
        "%d rows of %s are served at %s:%d",
        server.stats()["num_rows"],
        checkpoint if follow is None else follow.packets,
        options.host,
        port,
    )


def config_of(options: ServerOptions) -> GlobalConfig:
    config = load_global_config(options.global_config) if options.global_config else GlobalConfig()
    if options.pmem is not None:
        section = config.embedding_parameter_server_config
        storage = section.storage.replace(kind="pmem", path=options.pmem)
        config = config.replace(embedding_parameter_server_config=section.replace(storage=storage))
    return inference.config_of(options, config)


def _open_tier(
    stack: ExitStack, options: ServerOptions, config: GlobalConfig, slots: SlotsConfig | None
) -> ServerTier | None:
    """Returns None if rows are in memory alone."""
    storage = config.embedding_parameter_server_config.storage
    if not storage.has_pool:
        return None
    tier = ServerTier(
        storage,
        index=options.replica_index,
        replicas=options.replica_size,
        schema=None if slots is None else RowSchema.of(slots),
        num_threads=config.common_config.checkpointing_config.num_workers,
    )
    stack.callback(tier.close)
    return tier


def _make_server(
    options: ServerOptions,
    config: GlobalConfig,
    tier: ServerTier | None = None,
    *,
    is_standby: bool = False,
) -> ParameterServer:
    from persia._native import ParameterServer

    section = config.embedding_parameter_server_config
    return ParameterServer(
        replica_index=options.replica_index,
        replica_size=options.replica_size,
        capacity=section.capacity,
        num_internal_shards=section.num_hashmap_internal_shards,
        # Updates of an inference job would diverge from its checkpoint, so the server refuses them.
        read_only=config.common_config.job_type == inference.JOB_TYPE,
        # The options only: the tier itself attaches to the store once the server has made it.
        tier=None if tier is None else tier.tier_options,
        row_dtype=section.row_dtype,
        standby_deadline_s=section.standby_deadline_sec if section.standbys else 0.0,
        is_standby=is_standby,
        num_sources=options.sources,
        moved_shards=options.moved_shards,
        num_handler_threads=_REPLICATING_THREADS if section.standbys else _THREADS,
    )


def _share(
    server: ParameterServer,
    options: ServerOptions,
    config: GlobalConfig,
    slots: SlotsConfig | None,
    tier: ServerTier | None = None,
) -> ServerShare:
    return ServerShare(
        store=server.store,
        moved_shards=lambda: server.moved_shards,
        index=options.replica_index,
        replicas=options.replica_size,
        generation=options.generation,
        schema=None if slots is None else RowSchema.of(slots),
        num_threads=config.common_config.checkpointing_config.num_workers,
        # Dumping threads run at a lower priority than lookups.
        lowers_priority=True,
        dump_percent=dump_percent(config),
        tier=tier,
    )
