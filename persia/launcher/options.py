"""Options that several commands share, with the published names and environment variables."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from persia import env

if TYPE_CHECKING:
    from persia.messaging.session import NatsSession

_F = TypeVar("_F", bound=Callable[..., Any])
_Decorator = Callable[[_F], _F]

PORT = click.IntRange(0, 65535)
COUNT = click.IntRange(min=1)


class Group(click.Group):
    """A command group whose help has whole summaries, and which suggests a command for a misspelt one."""

    sections: Mapping[str, Iterable[str]] = {}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
        if near and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}: did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in (self.sections or {"Commands": self.list_commands(ctx)}).items():
            with formatter.section(title):
                # click would cut summaries after 45 characters.
                commands = [(name, self.get_command(ctx, name)) for name in names]
                formatter.write_dl([(name, one.get_short_help_str(200)) for name, one in commands if one])


def option(*names: str, variable: str | None = None, **settings: Any) -> _Decorator[Any]:
    """`click.option` whose help shows the default, and the environment variable that may hold the value."""
    # click shows neither by itself, and a variable that the help hides is never used.
    shown = {"show_default": True, "envvar": variable, "show_envvar": variable is not None}
    return click.option(*names, **{**shown, **settings})


def all_of(*options: _Decorator[Any]) -> _Decorator[Any]:
    """Several options as one decorator, which the help lists in their order."""

    def decorate(function: _F) -> _F:
        # click lists the options of stacked decorators from the outermost to the innermost.
        for one in reversed(options):
            function = one(function)
        return function

    return decorate


def embedding_config(
    text: str = "Slots and their dimensions (YAML).", *, required: bool = False
) -> _Decorator[Any]:
    """`--embedding-config`, described by `text`."""
    return option(
        "--embedding-config", variable="PERSIA_EMBEDDING_CONFIG", metavar="FILE", required=required, help=text
    )


def _port_or_off(_ctx: click.Context, _param: click.Parameter, value: str) -> int | None:
    # click has no type for "a port, or a word".
    if value == "off":
        return None
    if not value.isdecimal() or int(value) > 65535:
        raise click.BadParameter(f"{value!r} is neither a port number nor 'off'")
    return int(value)


global_config = option(
    "--global-config",
    variable="PERSIA_GLOBAL_CONFIG",
    metavar="FILE",
    help="Settings of the servers (YAML); without it, the defaults.",
)
host = option(
    "--host",
    variable="PERSIA_BIND_HOST",
    default="127.0.0.1",
    help="Address to listen on; 0.0.0.0 for clients on other machines, which then need the job's secret "
    "(docs/security.md).",
)
replica_options = all_of(
    option("--replica-index", type=click.IntRange(min=0), default=0, help="Number of this replica, from 0."),
    option("--replica-size", type=COUNT, default=1, help="Number of replicas of the job."),
)
metrics_port = option(
    "--metrics-port",
    callback=_port_or_off,
    variable="PERSIA_METRICS_PORT",
    default="0",
    metavar="PORT|off",
    help="Port of /metrics, /status, /healthz and /readyz, on the same address; 0 takes a free one.",
)
nats_url = option("--nats-url", variable="PERSIA_NATS_URL", metavar="URL", help="The job's broker.")
job_name = option(
    "--job-name",
    variable="PERSIA_JOB_NAME",
    default="default",
    help="Name of the job, which keeps jobs that share a NATS server apart.",
)
job_options = all_of(nats_url, job_name)


def _for_all(variable: str) -> Callable[[click.Context, click.Parameter, str | bool | None], None]:
    """A callback that sets `variable` for this process and those it starts: keys are read where files are."""

    def set_variable(ctx: click.Context, param: click.Parameter, value: str | bool | None) -> None:
        # As of `--verify-key "$KEY"` without KEY: to leave the option out would check nothing.
        if value == "" and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            raise click.BadParameter("it is empty: give a file, or leave the option out", ctx, param)
        if value:
            os.environ[variable] = "1" if value is True else str(value)

    return set_variable


sign_key = option(
    "--sign-key",
    variable="PERSIA_SIGN_KEY",
    metavar="FILE",
    expose_value=False,
    callback=_for_all("PERSIA_SIGN_KEY"),
    help="Private key that signs checkpoints and packets: persia-launcher signing-key create.",
)
verify_key = option(
    "--verify-key",
    variable="PERSIA_VERIFY_KEY",
    metavar="FILE",
    expose_value=False,
    callback=_for_all("PERSIA_VERIFY_KEY"),
    help="Public key that must have signed every checkpoint and packet that is read; several: joined by ':'.",
)
trust_scripts = option(
    "--trust-scripts",
    variable="PERSIA_TRUST_SCRIPTS",
    is_flag=True,
    expose_value=False,
    callback=_for_all("PERSIA_TRUST_SCRIPTS"),
    help="Run the checkpoint's TorchScript although it is unsigned and another user's. It is code.",
)

# Of a checkpoint that answers requests.
model_name = option("--model-name", default="model", help="What requests call it.")
embedding_workers = option(
    "--embedding-worker",
    "embedding_workers",
    multiple=True,
    metavar="HOST:PORT",
    help="Take rows from this embedding worker instead of the checkpoint; give it once for each worker.",
)


@contextlib.contextmanager
def job_session(
    nats_url: str | None, job_name: str, *, name: str, role: str, wait_s: float = 5.0
) -> Iterator[NatsSession]:
    """Connects a command to a job as `role`. Raises UnavailableError if no broker answers in `wait_s`."""
    from persia.messaging.session import NatsSession

    with NatsSession(nats_url or env.require_nats_url(), job_name, name=name, role=role) as session:
        session.connect(wait_s)
        yield session
