"""`persia-launcher certificates`: a CA for a job, and certificates for PERSIA_TLS_DIR."""

from __future__ import annotations

from pathlib import Path

import click

from persia.launcher.options import COUNT, Group, option
from persia.launcher.secret import ROLES


@click.group("certificates", cls=Group)
def command() -> None:
    """Certificates that encrypt the job's connections (PERSIA_TLS_DIR)."""


@command.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@option("--days", type=COUNT, default=90, help="Lifetime of the certificates; the CA's is ten years.")
@option(
    "--role",
    "roles",
    type=click.Choice(ROLES),
    multiple=True,
    help="Make one for this role only; once for each. job: for all processes of one machine.",
)
@option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name or address for clients that compare it, such as those of `serve`; once for each. persia, "
    "localhost and 127.0.0.1 are always in the certificates.",
)
@option("--replace", is_flag=True, help="Renew certificates that exist, with the same CA.")
def create(folder: Path, days: int, roles: tuple[str, ...], hosts: tuple[str, ...], replace: bool) -> None:
    """Make a CA in DIR, unless it has one, and a certificate for each role in DIR/ROLE.

    \b
      persia-launcher certificates create certificates
      PERSIA_TLS_DIR=certificates/job persia-launcher local ...
      persia-launcher certificates create certificates --replace     # renew; no process has to restart
    Copy DIR/ROLE to the machines of the job, and keep DIR/ca.key away from them.
    """
    from persia.security import certificates  # not for --help

    made = certificates.create(folder, roles or ROLES, days=days, hosts=hosts, replace=replace)
    click.echo("\n".join(str(one) for one in made))
