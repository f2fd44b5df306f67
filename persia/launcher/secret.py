"""`persia-launcher secret`: the job's secret, and what to give to other hosts and to Prometheus."""

from __future__ import annotations

import click

from persia.launcher.options import Group, option

ROLES = ("job", "trainer", "loader", "worker", "server", "inference", "monitor", "admin")


@click.group("secret", cls=Group)
def command() -> None:
    """Show and create the secret by which the processes of a job know each other.

    On one machine nothing has to be done: the processes of one user find the secret by themselves. Other
    machines need it in PERSIA_JOB_SECRET, or in a file that PERSIA_JOB_SECRET_FILE names.
    """


@command.command()
@option("--replace", is_flag=True, help="Make a new secret. Jobs that run end with the old one.")
def create(replace: bool) -> None:
    """Create the file of the secret, unless it exists, and print its path."""
    from persia.security import secret

    if replace:
        click.echo(secret.replace())
        return
    click.echo(secret.find().source)


@command.command()
@option(
    "--role",
    type=click.Choice(ROLES),
    default="job",
    help="Print the credential of one role. With the whole secret (job) a process may be any role.",
)
def show(role: str) -> None:
    """Print the secret, or a role's credential, for PERSIA_JOB_SECRET on another machine. Keep it secret."""
    from persia.security import secret

    click.echo(secret.find().limited_to(role).text)


@command.command()
@option(
    "--for",
    "use",
    type=click.Choice(("monitor", "serve")),
    default="monitor",
    help="monitor: metrics and status, for Prometheus' credentials_file. serve: predictions of "
    "persia-launcher serve --require-token.",
)
def token(use: str) -> None:
    """Print the bearer token of metrics and status, or of predictions. Keep it secret."""
    from persia.security import http_token, serve_token

    click.echo(http_token() if use == "monitor" else serve_token())
