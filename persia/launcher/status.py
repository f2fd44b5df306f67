"""`persia-launcher status`: what the processes of a job are doing."""

from __future__ import annotations

import contextlib
import json
import sys

import click

from persia.launcher.options import job_options, job_session, option


@click.command("status")
@job_options
@option("--once", is_flag=True, help="Print the table once, with the rates of one interval, and end.")
@option("--json", "as_json", is_flag=True, help="Print everything that is known as JSON, and end.")
@option(
    "--targets", is_flag=True, help="Print the processes as targets for Prometheus' file_sd_configs, and end."
)
@option(
    "--watch",
    "watched",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="With --targets: keep FILE up to date until Ctrl-C. Only processes that end in order are removed.",
)
@option(
    "--address",
    "addresses",
    multiple=True,
    metavar="HOST:PORT",
    help="Ask this metrics port instead of a broker, once for each process: of inference servers.",
)
@option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=2.0,
    help="Seconds between two looks at the job.",
)
def command(
    nats_url: str | None,
    job_name: str,
    once: bool,
    as_json: bool,
    targets: bool,
    watched: str | None,
    addresses: tuple[str, ...],
    interval: float,
) -> None:
    """Show the processes of a running job: rates, queues, staleness, memory, and what the script reports.

    The job is found by its NATS server (PERSIA_NATS_URL) and name; processes that have no broker, such as
    those of an inference job, by --address. Ends with exit code 1 when no process answers, and with --once or
    --json also when one is not ready or not there. Ctrl-C ends the live table.
    """
    from persia.launcher.status_table import JobView
    from persia.observability.status import find_processes
    from persia.observability.targets import TargetsFile, prometheus_targets

    if watched and not targets:
        raise click.UsageError("--watch keeps a file of targets: add --targets")
    if addresses and targets:
        raise click.UsageError("--targets lists the processes of a job; --address names them already")
    with contextlib.ExitStack() as stack:
        session = None
        if not addresses:
            session = stack.enter_context(job_session(nats_url, job_name, name="status", role="monitor"))
        # Addresses change with every start of a process, so that Prometheus gets a file rather than a config.
        if session is not None and watched:
            TargetsFile(session, watched).keep(interval)
            return
        if session is not None and targets:
            found = find_processes(session)
            click.echo(json.dumps(prometheus_targets(found), indent=2))
            sys.exit(0 if found else 1)
        # One look before any output: a job that does not answer gets a message instead of an empty table.
        view = JobView(session, addresses, job_name)
        if as_json:
            click.echo(view.as_json())
        elif not view.now:
            click.secho(
                f"no process of the job {job_name!r} answers: is this its NATS server, and its --job-name?",
                fg="red",
                err=True,
            )
        elif once:
            view.print_once(interval)
        else:
            view.watch(interval)
            return
        sys.exit(view.exit_code)
