"""`persia-launcher trace`: what every process did while some batches went through the job."""

from __future__ import annotations

import click

from persia.launcher.options import job_options, job_session, option


@click.command("trace")
@job_options
@option(
    "--batches",
    type=click.IntRange(1, 100_000),
    default=200,
    help="Stop when the NN workers have trained so many more.",
)
@option("--seconds", type=click.FloatRange(0.1, 100), default=30, help="Stop after this time in any case.")
@option(
    "--output", type=click.Path(dir_okay=False), default="trace.json", metavar="FILE", help="File to write."
)
@option("--summary", is_flag=True, help="Also print where the time of a batch goes, phase by phase.")
def command(
    nats_url: str | None, job_name: str, batches: int, seconds: float, output: str, summary: bool
) -> None:
    """Record a running job's phases into FILE, for https://ui.perfetto.dev or chrome://tracing.

    Each process is a track: waiting, lookups, pooling, RPC, forward, backward, gradient return, update.
    Spans of training batches carry batch_id in all processes. docs/operations.md explains how to read one.
    """
    import os
    import sys

    from persia.errors import StorageError
    from persia.observability.recording import record
    from persia.observability.status import find_processes
    from persia.observability.trace_summary import summarize

    folder = os.path.dirname(os.path.abspath(output))
    if not os.access(folder, os.W_OK):  # told before the recording rather than after
        raise StorageError(f"--output {output}: {folder} does not exist, or cannot be written to")
    with job_session(nats_url, job_name, name="trace", role="monitor") as session:
        # A process without an HTTP port cannot be told to record.
        processes = [info for info in find_processes(session) if info.status_address]
        if not processes:
            click.secho(
                f"no process of the job {job_name!r} answers with a status: is this its NATS server?",
                fg="red",
                err=True,
            )
            sys.exit(1)
        result = record(processes, num_batches=batches, limit_s=seconds)
    # What was recorded is written even if a process has ended meanwhile: it may show why.
    result.write(output)
    click.echo(
        f"{result.num_spans} spans of {len(processes)} processes, {result.num_batches} batches in "
        f"{result.elapsed_s:.2f} s: {output}"
    )
    if summary:
        click.echo("\n".join(summarize(result.events)))
    for problem in result.problems:
        click.secho(problem, fg="yellow", err=True)
