"""`persia-launcher embedding-parameter-server` and `embedding-worker`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from persia.launcher import options
from persia.launcher.options import PORT, all_of, option


def _server_options(*, default_port: int, embedding_config_required: bool) -> Callable[[Any], Any]:
    return all_of(
        option(
            "--port",
            type=PORT,
            default=default_port,
            help="Port to listen on; 0 takes a free one. Others find it by discovery.",
        ),
        options.host,
        options.embedding_config(required=embedding_config_required),
        options.global_config,
        options.replica_options,
        options.metrics_port,
        option(
            "--health-port",
            type=PORT,
            variable="PERSIA_HEALTH_PORT",
            help="Port of the gRPC health service (grpc.health.v1); without it there is none.",
        ),
    )


@click.command("embedding-parameter-server")
@_server_options(default_port=8888, embedding_config_required=False)
@option(
    "--checkpoint",
    metavar="LOCATION",
    help="Load this checkpoint and only answer lookups, without a broker: a server of an inference job.",
)
@option(
    "--standby",
    is_flag=True,
    help="Keep a second copy of the rows of the server with this --replica-index, and replace that server "
    "when it dies.",
)
@options.verify_key
@option(
    "--generation",
    type=click.IntRange(min=0),
    default=0,
    hidden=True,
    help="Of persia-launcher resize: the servers of a higher one replace those of lower ones.",
)
@option(
    "--sources",
    type=click.IntRange(min=0),
    default=0,
    hidden=True,
    help="Of persia-launcher resize: from how many servers this one gathers its rows.",
)
@option(
    "--pmem",
    metavar="PATH",
    help="Keep rows on persistent memory that is mounted at PATH, with a cache in memory: as storage.kind "
    "pmem and storage.path of the global config, which says the rest.",
)
def embedding_parameter_server(**options: Any) -> None:
    """Run an embedding parameter server, which holds a share of the embedding rows.

    Start --replica-size of them, each with its own --replica-index. SIGTERM and Ctrl-C stop it.
    """
    from persia.roles.lifetime import ServerOptions
    from persia.roles.parameter_server import run_parameter_server

    # Imported when the server starts: the native module and numpy would slow --help down.
    # The options are named like the fields.
    run_parameter_server(ServerOptions(**options))


@click.command("embedding-worker")
@_server_options(default_port=8887, embedding_config_required=True)
@option(
    "--parameter-server",
    "parameter_servers",
    multiple=True,
    metavar="HOST:PORT",
    help="A worker of an inference job, without a broker: a parameter server of it; give it once for each, "
    "in the order of their replica indices.",
)
def embedding_worker(**options: Any) -> None:
    """Run an embedding worker, which prepares the embeddings of batches from the rows of the parameter
    servers.

    Start --replica-size of them, each with its own --replica-index. SIGTERM and Ctrl-C stop it.
    """
    from persia.roles.embedding_worker import run_embedding_worker
    from persia.roles.lifetime import ServerOptions

    run_embedding_worker(ServerOptions(**options))
