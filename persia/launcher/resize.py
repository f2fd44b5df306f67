"""`persia-launcher resize`: changes the number of parameter servers of a running job, or evens their load."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from persia.launcher.options import COUNT, job_options, job_session, option

if TYPE_CHECKING:
    from persia.messaging.session import NatsSession

_NOT_RESIZED = 3  # the exit code of a change that was given up: the old servers continue


@click.command("resize")
@job_options
@option(
    "--parameter-servers",
    type=COUNT,
    help="How many parameter servers the job is to have.",
)
@option(
    "--rebalance",
    is_flag=True,
    help="Replace the parameter servers by as many, among which the measured load is even.",
)
@option(
    "--generation",
    type=click.IntRange(min=1),
    hidden=True,
    help="Move rows to servers of this generation, which something else has started and will end.",
)
@option(
    "--from-generation",
    type=click.IntRange(min=0),
    hidden=True,
    help="With --generation: from servers of this generation; by default, the one before.",
)
@option(
    "--sources",
    type=COUNT,
    default=1,
    hidden=True,
    help="With --generation: from how many servers.",
)
def command(
    nats_url: str | None,
    job_name: str,
    parameter_servers: int | None,
    rebalance: bool,
    generation: int | None,
    from_generation: int | None,
    sources: int,
) -> None:
    """Change the number of parameter servers of a job of `persia-launcher local` while it trains.

    New servers are started beside those that run, and get their rows and what changes. Then they take over
    within some tens of milliseconds, and the old servers end. No batch fails, and each update is applied
    once. Meanwhile all rows are in memory twice.

    First the load is measured, for 2 to 10 seconds. The new servers have the rows such that it is even among
    them. If it is even anyhow, rows are placed by hash alone. `load_imbalance` in the status of an embedding
    worker shows the load of the busiest server by the mean.

    If anything fails before the new servers take over, they end, and the old ones continue. If the new ones
    fail later, that is the death of parameter servers. Ends with exit code 1 both times. No checkpoint can be
    written or loaded until it is over.

    Not possible with standbys, storage tiers, incremental updates, admit_after, time_to_live_sec or min_norm.
    """
    if (parameter_servers is None) != rebalance or (rebalance and generation is not None):
        raise click.UsageError("give either --parameter-servers or --rebalance")
    with job_session(nats_url, job_name, name="resize", role="admin") as session:
        if generation is None:
            _ask_supervisor(session, job_name, parameter_servers)
        else:
            assert parameter_servers is not None
            old = generation - 1 if from_generation is None else from_generation
            _coordinate(session, (old, sources), (generation, parameter_servers))


def _coordinate(session: NatsSession, old: tuple[int, int], new: tuple[int, int]) -> None:
    from persia.errors import PermissionDeniedError
    from persia.launcher.coordinator import Coordinator, NotResizedError
    from persia.launcher.hand_over import servers

    coordinator = Coordinator(session, servers(*old), servers(*new), tell=partial(click.echo, err=True))
    try:
        coordinator.run()
    except NotResizedError as error:
        click.echo(str(error), err=True)
        sys.exit(_NOT_RESIZED)
    except PermissionDeniedError as error:  # this broker has let no coordinator begin
        click.echo(f"{error}: start the broker again, if it is of an earlier version", err=True)
        sys.exit(_NOT_RESIZED)


def _ask_supervisor(session: NatsSession, job_name: str, parameter_servers: int | None) -> None:
    """`parameter_servers`: None for as many as before, with an even load."""
    from persia.errors import UnavailableError
    from persia.launcher.resizing import ResizeQuestion, ResizeState
    from persia.waiting import Attempts

    def ask(wanted: int, *, rebalances: bool = False) -> ResizeState:
        question = ResizeQuestion(parameter_servers=wanted, rebalances=rebalances).encode()
        return ResizeState.decode(session.request(session.subjects.resize_job, question, 30.0))

    try:
        state = ask(parameter_servers or 0, rebalances=parameter_servers is None)
    except UnavailableError as error:
        if not error.has_no_listener:
            raise
        raise UnavailableError(
            f"no `persia-launcher local` supervises a job {job_name!r} on this NATS server: it alone "
            "starts and ends the servers of a job"
        ) from None
    # The supervisor has one change at a time. Another number means that this one is over, and another user
    # has begun the next.
    asked, shown = state.number, ""
    # Without a limit: copying rows takes as long as there are rows. A supervisor that dies ends this by
    # the deadline of `ask`.
    for _ in Attempts(float("inf"), pause_s=0.2):
        if state.is_over:
            break
        if state.step != shown:
            click.echo(f"{state.step} ...", err=True)
            shown = state.step
        state = ask(0)
        if state.number != asked:
            raise UnavailableError("it is over, and another change has begun: see the output of the job")
    if state.failure:
        click.secho(f"{state.outcome}: {state.failure}", fg="red", err=True)
        sys.exit(1)
    click.echo(
        f"{state.after} parameter servers instead of {state.before}: {state.num_rows} rows, "
        f"{state.num_bytes / 1e6:.1f} MB in {state.copy_s:.1f} s; requests waited for "
        f"{state.pause_s * 1e3:.0f} ms; {state.num_moved_shards} virtual shards are placed by their load"
    )
