"""The embedding parameter server process: holds a share of the rows, and updates them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from persia import env
from persia.config import GlobalConfig, load_embedding_config, load_global_config
from persia.logger import set_role
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.lifetime import DRAIN_S, announced, connected, stopped_by_signals, wait_for_stop
from persia.roles.options import ServerOptions

if TYPE_CHECKING:
    from persia._native import ParameterServer

__all__ = ["run_parameter_server"]


def run_parameter_server(options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT. What is wrong in `options` is found before anything starts."""
    config = load_global_config(options.global_config) if options.global_config else GlobalConfig()
    schema = load_embedding_config(options.embedding_config).schema_hash() if options.embedding_config else ""
    nats_url = env.require_nats_url()
    set_role(EMBEDDING_PARAMETER_SERVER, options.replica_index)
    name = f"{EMBEDDING_PARAMETER_SERVER} {options.replica_index}"
    with stopped_by_signals(name), ExitStack() as stack:
        server = _make_server(options, config)
        port = server.start(options.host, options.port)
        stack.callback(server.stop, DRAIN_S)
        session = stack.enter_context(connected(nats_url, name))
        stack.enter_context(
            announced(
                session,
                EMBEDDING_PARAMETER_SERVER,
                options,
                incarnation=server.incarnation,
                port=port,
                schema=schema,
            )
        )
        wait_for_stop()


def _make_server(options: ServerOptions, config: GlobalConfig) -> ParameterServer:
    from persia._native import ParameterServer

    section = config.embedding_parameter_server_config
    return ParameterServer(
        replica_index=options.replica_index,
        replica_size=options.replica_size,
        capacity=section.capacity,
        num_internal_shards=section.num_hashmap_internal_shards,
    )
