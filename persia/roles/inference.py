"""Servers of an inference job (`job_type: Infer`): a checkpoint's rows, looked up and never changed.

Parameter servers load their shares when they start, and refuse everything until they have done so; embedding
workers find them by `infer_config.servers`. Neither needs a broker, and `InferCtx` asks the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from persia.checkpoint.server_job import ServerShare
from persia.config import GlobalConfig, InferConfig
from persia.errors import ConfigError
from persia.logger import get_default_logger
from persia.messaging.local_session import LocalBroker, LocalSession
from persia.observability.sources import ParameterServerSource
from persia.observability.sources import Source as ObservedSource
from persia.packets.follower import Follower, FollowOptions
from persia.packets.log import PacketLog
from persia.roles.following import RowCopies, load_share
from persia.roles.lifetime import DRAIN_S, observed, wait_for_stop
from persia.roles.options import ServerOptions
from persia.storage.location import Location

if TYPE_CHECKING:
    from persia._native import EmbeddingWorker, ParameterServer

JOB_TYPE = "Infer"


def config_of(options: ServerOptions, config: GlobalConfig) -> GlobalConfig:
    """`config` with what the command line says of an inference job, which makes it one."""
    if options.checkpoint is None and not options.parameter_servers:
        return config
    given = _infer_config(config)
    infer = given.replace(
        embedding_checkpoint=options.checkpoint or given.embedding_checkpoint,
        servers=list(options.parameter_servers) or given.servers,
    )
    common = config.common_config.replace(job_type=JOB_TYPE, infer_config=infer)
    return config.replace(common_config=common)


def serve_rows(
    server: ParameterServer,
    make_share: Callable[[], ServerShare],
    source: ParameterServerSource,
    options: ServerOptions,
    config: GlobalConfig,
    make_beside: Callable[[], ParameterServer],
) -> None:
    """Loads the server's share of the checkpoint and answers lookups until it is stopped; with
    `enable_incremental_update` it follows the training's packets meanwhile.

    NotFoundError, CorruptionError, FailedPreconditionError: what cannot be loaded.
    """
    checkpoint = _infer_config(config).embedding_checkpoint
    follow = _follow_options(config)
    # A server without rows would answer every lookup with zeros, which looks like a bad model.
    if checkpoint is None and follow is None:
        raise ConfigError(
            "common_config.infer_config.embedding_checkpoint is missing: a parameter server with "
            "job_type='Infer' needs it, or --checkpoint"
        )
    with ExitStack() as stack:
        port = server.start(options.host, options.port)
        stack.callback(server.stop, DRAIN_S)
        share = make_share()  # a server has a store once it is started
        observer = stack.enter_context(observed(source, _no_broker(stack), options, config))
        if follow is not None:
            follower = Follower(RowCopies(PacketLog(follow.packets), server, share, make_beside), follow)
            source.following = lambda: follower.status.to_json()
            stack.callback(follower.close)
            follower.start()
        elif checkpoint is not None:
            load_share(share, checkpoint)
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
        wait_for_stop()


def serve_lookups(
    worker: EmbeddingWorker, source: ObservedSource, options: ServerOptions, config: GlobalConfig
) -> None:
    """Answers lookups from the rows of `infer_config.servers` until it is stopped."""
    with ExitStack() as stack:
        # Addresses are fixed by the config: without a broker there is no discovery.
        for index, address in enumerate(inference_servers(config)):
            worker.set_server(index, address)
        port = worker.start(options.host, options.port)
        stack.callback(worker.stop, DRAIN_S)
        observer = stack.enter_context(observed(source, _no_broker(stack), options, config))
        observer.serving = True  # readiness asks the parameter servers each time
        get_default_logger().info("lookups are answered at %s:%d", options.host, port)
        wait_for_stop()


def inference_servers(config: GlobalConfig) -> list[str]:
    """ "host:port" of the parameter servers, by replica index. ConfigError: none are given."""
    servers = _infer_config(config).servers
    if not servers:
        raise ConfigError(
            "common_config.infer_config.servers is missing: an embedding worker with job_type='Infer' needs "
            "the host:port of each parameter server, in the order of their replica indices (or as "
            "--parameter-server)"
        )
    return servers


def _infer_config(config: GlobalConfig) -> InferConfig:
    return config.common_config.infer_config or InferConfig()


def _follow_options(config: GlobalConfig) -> FollowOptions | None:
    """Returns None for servers that follow no packets."""
    section, infer = config.embedding_parameter_server_config, _infer_config(config)
    if not section.enable_incremental_update:
        return None
    return FollowOptions(
        packets=Location.of(section.incremental_dir),
        checkpoints=None if infer.embedding_checkpoint is None else Location.of(infer.embedding_checkpoint),
        poll_s=infer.incremental_poll_ms / 1000,
        max_behind=infer.incremental_max_behind,
    )


def _no_broker(stack: ExitStack) -> LocalSession:
    # The observer asks a session whether it is connected; this one always is.
    session = LocalSession(LocalBroker(), name="inference")
    stack.callback(session.close)
    return session
