"""`persia-launcher status`: what the processes of a job are doing."""

from __future__ import annotations

import click

from persia.launcher.job_session import job_options

__all__ = ["command"]


@click.command("status")
@job_options
@click.option("--once", is_flag=True, help="Print the table once, with the rates of one interval, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print everything that is known as JSON, and end.")
@click.option(
    "--targets", is_flag=True, help="Print the processes as targets for Prometheus' file_sd_configs, and end."
)
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="HOST:PORT",
    help="Ask this metrics port instead of a broker, once for each process: of inference servers.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between two looks at the job.",
)
def command(
    nats_url: str | None,
    job_name: str,
    once: bool,
    as_json: bool,
    targets: bool,
    addresses: tuple[str, ...],
    interval: float,
) -> None:
    """Show the processes of a running job: rates, queues, staleness, memory, and what the script reports.

    The job is found by its NATS server (PERSIA_NATS_URL) and name; processes that have no broker, such as
    those of an inference job, by --address. Ends with exit code 1 when no process answers, and with --once or
    --json also when one is not ready or not there. Ctrl-C ends the live table.
    """
    import contextlib
    import json
    import sys
    import time
    from dataclasses import asdict

    from rich.console import Console, RenderableType
    from rich.live import Live

    from persia.launcher.job_session import job_session
    from persia.launcher.status_table import render
    from persia.messaging.session import NatsSession
    from persia.observability.status import (
        ProcessStatus,
        ask_processes,
        find_processes,
        job_status,
        missing_replicas,
        prometheus_targets,
        with_gone,
    )

    def look(session: NatsSession | None, known: list[ProcessStatus]) -> list[ProcessStatus]:
        if session is None:
            return ask_processes(addresses)
        if session.is_connected:
            now = job_status(find_processes(session))
        else:
            now = job_status(status.info for status in known)  # they may well train on, without discovery
        return with_gone(by_place(known), now)

    def by_place(statuses: list[ProcessStatus]) -> dict[tuple[str, int], ProcessStatus]:
        return {(status.info.role, status.info.index): status for status in statuses}

    def exit_code(statuses: list[ProcessStatus]) -> int:
        ready = all(s.values is not None and s.values["ready"] for s in statuses)
        complete = bool(addresses) or not missing_replicas(s.info for s in statuses)
        return 0 if statuses and ready and complete else 1

    def title(session: NatsSession | None) -> str:
        if session is None:
            return "by address"
        state = "" if session.is_connected else ": its NATS server does not answer, reconnecting"
        return f"job {job_name}{state}"

    def shown(
        before: dict[tuple[str, int], ProcessStatus], now: list[ProcessStatus], session: NatsSession | None
    ) -> RenderableType:
        return render(before, now, title(session), is_whole_job=not addresses)

    if addresses and targets:
        raise click.UsageError("--targets lists the processes of a job; --address names them already")
    with contextlib.ExitStack() as stack:
        session = None
        if not addresses:
            session = stack.enter_context(job_session(nats_url, job_name, name="status"))
        if session is not None and targets:
            found = find_processes(session)
            click.echo(json.dumps(prometheus_targets(found), indent=2))
            sys.exit(0 if found else 1)
        before = look(session, [])
        if as_json:
            click.echo(json.dumps([asdict(status) for status in before], indent=2))
            sys.exit(exit_code(before))
        if not before:
            click.secho(
                f"no process of the job {job_name!r} answers: is this its NATS server, and its --job-name?",
                fg="red",
                err=True,
            )
            sys.exit(1)
        if once:
            time.sleep(interval)
            now = look(session, before)
            # As wide as the table: what is piped elsewhere must not be cut.
            width = None if sys.stdout.isatty() else 200
            Console(width=width).print(shown(by_place(before), now, session))
            sys.exit(exit_code(now))
        with (
            contextlib.suppress(KeyboardInterrupt),  # how one leaves it
            Live(shown({}, before, session), screen=False, auto_refresh=False) as live,
        ):
            while True:
                time.sleep(interval)
                now = look(session, before)
                live.update(shown(by_place(before), now, session), refresh=True)
                before = now
