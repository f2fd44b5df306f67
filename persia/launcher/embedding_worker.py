"""`persia-launcher embedding-worker`: looks rows up for batches, pools them, and returns gradients."""

from __future__ import annotations

from typing import Any

import click

from persia.launcher.server_options import server_options

__all__ = ["command"]


@click.command("embedding-worker")
@server_options(default_port=8887, embedding_config_required=True)
@click.option(
    "--parameter-server",
    "parameter_servers",
    multiple=True,
    metavar="HOST:PORT",
    help="A worker of an inference job, without a broker: a parameter server of it; give it once for each, "
    "in the order of their replica indices.",
)
def command(**options: Any) -> None:
    """Run an embedding worker, which prepares the embeddings of batches from the rows of the parameter
    servers.

    Start --replica-size of them, each with its own --replica-index. SIGTERM and Ctrl-C stop it.
    """
    from persia.roles.embedding_worker import run_embedding_worker
    from persia.roles.options import ServerOptions

    run_embedding_worker(ServerOptions(**options))
