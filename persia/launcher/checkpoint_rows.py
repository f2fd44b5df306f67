"""`persia-launcher checkpoint dump | load | remove`: checkpoints of a running job, asked for from outside."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
)
from persia.launcher.job_session import job_options, job_session

if TYPE_CHECKING:
    from persia.checkpoint.checkpoints import Checkpoints

__all__ = ["dump", "load", "remove"]

# As sysexits.h has it: nothing is wrong, and the same may succeed later. Operators wait and ask again.
_NOT_YET = 75
# No training yet; it is busy with another dump, perhaps one that nobody waits for any more; late answers.
_PASSING = (FailedPreconditionError, ResourceExhaustedError, DeadlineExceededError)


@click.command()
@click.argument("location")
@click.option(
    "--with-dense",
    is_flag=True,
    help="Let rank 0 write the dense part and its optimizer as well, between two batches of the training.",
)
@click.option(
    "--hold",
    "hold_s",
    type=click.FloatRange(0, 3600),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="With --with-dense: for so long the training then waits to be ended; it goes on if it is not.",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="Rows stay in the pools of the servers, which go back to this checkpoint, and to no earlier one.",
)
@job_options
def dump(
    location: str, with_dense: bool, hold_s: float, in_place: bool, nats_url: str | None, job_name: str
) -> None:
    """Write all rows of a running job to LOCATION, as they are at one moment on each parameter server.

    For operators who move jobs to other servers. Without --with-dense, a dense part that LOCATION has
    stays: a place of its own is better. A training script dumps both parts with ctx.dump_checkpoint.
    With --in-place give --with-dense, too, where the training is to go on from this checkpoint.

    Exit code 75: the job has no optimizer yet, does not train now, dumps already or does not answer in
    time; the same may succeed later.
    """
    if hold_s and not with_dense:
        raise click.UsageError(
            "--hold is of no use without --with-dense: rows are dumped while training goes on"
        )
    try:
        _dump(location, nats_url, job_name, hold_s if with_dense else None, in_place)
    except _PASSING as failure:
        click.secho(f"persia-launcher: not yet: {failure}", fg="red", err=True)
        sys.exit(_NOT_YET)


def _dump(location: str, nats_url: str | None, job_name: str, hold_s: float | None, in_place: bool) -> None:
    """`hold_s`: None dumps rows only."""
    from persia import env
    from persia.checkpoint.training_dump import request_training_dump
    from persia.storage.location import Location

    if hold_s is None:
        from persia.checkpoint.checkpoints import DumpRequest

        with _checkpoints(nats_url, job_name) as checkpoints:
            checkpoints.dump(DumpRequest(location, in_place=in_place))
        return
    deadline_s = env.get_deadline_s()
    # A pod that is deleted is told by SIGTERM, which a container's first process ignores unless it listens.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with job_session(nats_url, job_name, name="checkpoint", wait_s=deadline_s) as session:
        place = str(Location.of(location))
        request_training_dump(session, place, hold_s=hold_s, deadline_s=deadline_s, in_place=in_place)
    click.echo(
        f"the training has dumped its dense part to {place}, and its rows in place"
        if in_place
        else f"the training has dumped dense part and rows to {place}"
    )


@click.command()
@click.argument("location")
@click.option("--without-state", is_flag=True, help="Begin with the optimizer's state of new rows.")
@job_options
def load(location: str, without_state: bool, nats_url: str | None, job_name: str) -> None:
    """Replace all rows of a running job by those in LOCATION, on any number of parameter servers.

    Nothing is replaced before every server has checked everything. Optimizer and learning rate are the
    checkpoint's until the training script registers its own.
    """
    from persia.checkpoint.checkpoints import Source

    with _checkpoints(nats_url, job_name) as checkpoints:
        checkpoints.load(Source(location), fresh_state=without_state)


@click.command()
@click.argument("location")
def remove(location: str) -> None:
    """Remove the checkpoint in the directory LOCATION, and the directory. Nothing is left to go back to.

    A directory that holds no checkpoint is left alone. What is not there is removed already.
    """
    from persia.storage.location import Location
    from persia.storage.manifest import MANIFEST_NAME
    from persia.storage.versions import checkpoints_at

    place = Location.of(location)
    if not place.exists():
        return
    if not (place / MANIFEST_NAME).exists_replaced():
        inside = ", ".join(checkpoint.name for checkpoint in checkpoints_at(place))
        hint = f"; it holds several, to be removed one by one: {inside}" if inside else ""
        raise NotFoundError(f"{place} is no checkpoint (no {MANIFEST_NAME}), and is left alone{hint}")
    place.remove()


@contextmanager
def _checkpoints(nats_url: str | None, job_name: str) -> Iterator[Checkpoints]:
    from persia import env
    from persia.checkpoint.checkpoints import Checkpoints
    from persia.checkpoint.peers import find_servers

    deadline_s = env.get_deadline_s()
    with job_session(nats_url, job_name, name="checkpoint", wait_s=deadline_s) as session:
        yield Checkpoints(lambda: find_servers(session, deadline_s), deadline_s=deadline_s)
