"""The options that both kinds of servers share, with the published names and environment variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["port_or_off", "server_options"]


def port_or_off(_ctx: click.Context, _param: click.Parameter, value: str) -> int | None:
    """Of an option that takes a port number, or "off" for None."""
    if value == "off":
        return None
    if not value.isdecimal() or int(value) > 65535:
        raise click.BadParameter(f"{value!r} is neither a port number nor 'off'")
    return int(value)


_F = TypeVar("_F", bound=Callable[..., Any])


def server_options(*, default_port: int, embedding_config_required: bool) -> Callable[[_F], _F]:
    """Adds the options to a command function."""
    options = (
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            default=default_port,
            show_default=True,
            help="Port to listen on; 0 takes a free one. Others find it by discovery.",
        ),
        click.option(
            "--host",
            envvar="PERSIA_BIND_HOST",
            show_envvar=True,
            default="127.0.0.1",
            show_default=True,
            help="Address to listen on; 0.0.0.0 for jobs on several machines.",
        ),
        click.option(
            "--embedding-config",
            envvar="PERSIA_EMBEDDING_CONFIG",
            show_envvar=True,
            metavar="FILE",
            required=embedding_config_required,
            help="Slots and their dimensions (YAML).",
        ),
        click.option(
            "--global-config",
            envvar="PERSIA_GLOBAL_CONFIG",
            show_envvar=True,
            metavar="FILE",
            help="Settings of the servers (YAML); without it, the defaults.",
        ),
        click.option(
            "--replica-index",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Number of this replica, from 0.",
        ),
        click.option(
            "--replica-size",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            help="Number of replicas of the job.",
        ),
        click.option(
            "--metrics-port",
            callback=port_or_off,
            envvar="PERSIA_METRICS_PORT",
            show_envvar=True,
            default="0",
            show_default=True,
            metavar="PORT|off",
            help="Port of /metrics, /status and /readyz, on the same address; 0 takes a free one.",
        ),
        click.option(
            "--health-port",
            type=click.IntRange(0, 65535),
            envvar="PERSIA_HEALTH_PORT",
            show_envvar=True,
            help="Port of the gRPC health service (grpc.health.v1); without it there is none.",
        ),
    )

    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate
