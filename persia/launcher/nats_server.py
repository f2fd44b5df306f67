"""`persia-launcher nats-server`: the broker of a job."""

from __future__ import annotations

import os
import socket

import click

from persia.errors import UnavailableError
from persia.launcher.nats import find_nats_server, nats_config, parse_size

__all__ = ["command"]


@click.command("nats-server")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=4222,
    show_default=True,
    envvar="PERSIA_NATS_PORT",
    show_envvar=True,
    help="Port to listen on; 0 takes a free one, named in the output.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; the default is reachable from this machine only.",
)
@click.option(
    "--max-payload",
    default="64MB",
    show_default=True,
    help="Largest message: a batch's ID features, or its dense features and labels.",
)
def command(port: int, host: str, max_payload: str) -> None:
    """Run the NATS server that the job's processes meet at.

    Any NATS server does, when its max_payload is large enough for your batches. Point all processes to it
    with PERSIA_NATS_URL=nats://HOST:PORT. There is no authentication by default: keep it on a trusted
    network.
    """
    binary = find_nats_server()
    config = nats_config(host=host, port=port, max_payload_bytes=parse_size(max_payload))
    _check_free(host, port)
    # In memory: the server reads it after exec, when nobody is left to delete a file.
    descriptor = os.memfd_create("nats-server.conf", 0)
    os.write(descriptor, config.encode())
    os.execv(binary, [binary, "-c", f"/proc/self/fd/{descriptor}"])


def _check_free(host: str, port: int) -> None:
    """Says in one line what the server would say in many. Whoever takes the port meanwhile is told by it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # As the server does, without waiting for connections that are still timing out.
        socket.create_server(address, family=family).close()
    except OSError as error:
        raise UnavailableError(
            f"the NATS server cannot listen on {host}:{port} ({error.strerror}): stop what uses the port, or "
            "take another --port (PERSIA_NATS_PORT) or --host"
        ) from error
