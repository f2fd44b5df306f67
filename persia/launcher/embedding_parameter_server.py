"""`persia-launcher embedding-parameter-server`: holds a share of the embedding rows."""

from __future__ import annotations

from typing import Any

import click

from persia.launcher.server_options import server_options

__all__ = ["command"]


@click.command("embedding-parameter-server")
@server_options(default_port=8888, embedding_config_required=False)
@click.option(
    "--checkpoint",
    metavar="LOCATION",
    help="Load this checkpoint and only answer lookups, without a broker: a server of an inference job.",
)
@click.option(
    "--pmem",
    metavar="PATH",
    help="Keep rows on persistent memory that is mounted at PATH, with a cache in memory: as storage.kind "
    "pmem and storage.path of the global config, which says the rest.",
)
def command(**options: Any) -> None:
    """Run an embedding parameter server, which holds a share of the embedding rows.

    Start --replica-size of them, each with its own --replica-index. SIGTERM and Ctrl-C stop it.
    """
    from persia.roles.options import ServerOptions
    from persia.roles.parameter_server import run_parameter_server

    run_parameter_server(ServerOptions(**options))
