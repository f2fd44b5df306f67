"""`persia-launcher checkpoint`: inspects and removes checkpoints; dumps and loads those of a running job."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
)
from persia.launcher.options import Group, job_options, job_session, option, sign_key, verify_key

if TYPE_CHECKING:
    from rich.table import Table

    from persia.checkpoint.checkpoints import Checkpoints
    from persia.storage.location import Location
    from persia.storage.manifest import Manifest

# As sysexits.h has it: nothing is wrong, and the same may succeed later. Operators wait and ask again.
_NOT_YET = 75
# There is no training yet, another dump runs (perhaps one that no client waits for), or answers come late.
_PASSING = (FailedPreconditionError, ResourceExhaustedError, DeadlineExceededError)

# For every command that shows something: tables are for people, and may change.
_as_json = option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@click.group("checkpoint", cls=Group)
def command() -> None:
    """Look into checkpoints: what is in them, are they whole, what has changed, export of rows. `dump` and
    `load` write and read the rows of a running job; `remove` removes a checkpoint.

    \b
    A LOCATION is a checkpoint's directory, or one of several checkpoints with its `latest`:
      persia-launcher checkpoint inspect model/
      persia-launcher checkpoint verify s3://bucket/model
      persia-launcher checkpoint diff model/step-000000010000 model/step-000000020000
      persia-launcher checkpoint export model/ rows/ --format parquet
    """


@command.command()
@click.argument("location")
@_as_json
def inspect(location: str, as_json: bool) -> None:
    """Show what the manifest says: steps, rows, optimizer, slots, files. Reads nothing else."""
    place, manifest = _read(location)
    if as_json:
        print(json.dumps({"location": str(place), **json.loads(manifest.encode())}, indent=1))
        return
    _show_summary(place, manifest)
    if manifest.embeddings is not None and manifest.embeddings.schema is not None:
        slots = _table("slots", "slot", "dim", "group", "hash stack")
        for name, slot in manifest.embeddings.schema.slots.items():
            stack = "" if slot.hash_stack is None else f"{slot.hash_stack[0]} x {slot.hash_stack[1]}"
            slots.add_row(name, str(slot.dim), str(slot.group), stack)
        _print(slots)
    files = _table("files", "file", "rows", "bytes")
    for file in _files(manifest):
        files.add_row(file.path, f"{file.num_rows:,}", f"{file.num_bytes:,}")
    _print(files)


@command.command()
@click.argument("location")
@verify_key
@_as_json
def verify(location: str, as_json: bool) -> None:
    """Read every file and check every checksum, and with --verify-key the signature; exit code 1 when the
    checkpoint is not whole, or not signed by that key.
    """
    from persia.rows.reader import check_files

    place, manifest = _read(location)
    files = _files(manifest)
    with _progress("verifying", sum(file.num_bytes for file in files)) as advance:
        outcome = check_files(place, manifest, advance)
    # Every file is read even after the first broken one: a repair needs the whole list.
    broken = {path: error for path, error in outcome.items() if error is not None}
    if as_json:
        print(json.dumps({"location": str(place), "whole": not broken, "files": outcome}, indent=1))
    else:
        table = _table(str(place), "file", "state")
        for path, error in outcome.items():
            table.add_row(path, "[green]whole[/]" if error is None else f"[red]{error}[/]")
        _print(table)
    sys.exit(1 if broken else 0)


@command.command()
@click.argument("before")
@click.argument("after")
@_as_json
def diff(before: str, after: str, as_json: bool) -> None:
    """Compare the rows of two checkpoints, slot by slot: added, removed, moved, and how far."""
    from persia.rows.comparison import compare
    from persia.rows.reader import RowReader

    readers = RowReader(before), RowReader(after)
    with _progress("comparing", sum(reader.section.num_bytes for reader in readers)) as advance:
        changes = compare(*readers, advance)
    if as_json:
        print(json.dumps({name: slot.to_json() for name, slot in changes.items()}, indent=1))
        return
    columns = ("slot", "before", "after", "added", "removed", "moved", "mean move", "largest", "mean norm")
    table = _table(f"{readers[0].location} -> {readers[1].location}", *columns)
    for name, slot in changes.items():
        counts = (slot.num_before, slot.num_after, slot.num_added, slot.num_removed, slot.num_moved)
        values = slot.to_json()
        table.add_row(
            name,
            *(f"{count:,}" for count in counts),
            f"{values['mean_move']:.4g}",
            f"{slot.max_move:.4g}",
            f"{values['mean_norm_before']:.4g} -> {values['mean_norm_after']:.4g}",
        )
    _print(table)


@command.command()
@click.argument("location")
@click.argument("output", type=click.Path(path_type=Path, file_okay=False))
@option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "numpy"]),
    default="parquet",
    help="Parquet needs pyarrow.",
)
@option("--with-state", is_flag=True, help="The optimizer's state as well.")
@_as_json
def export(location: str, output: Path, kind: str, with_state: bool, as_json: bool) -> None:
    """Write the rows of each slot to the new directory OUTPUT: IDs, ages, embeddings."""
    from persia.rows.export import export as export_rows
    from persia.rows.reader import RowReader

    reader = RowReader(location)
    with _progress("exporting", reader.section.num_bytes) as advance:
        counts = export_rows(reader, output, kind, with_state=with_state, on_bytes=advance)
    if as_json:
        print(json.dumps(counts, indent=1))
        return
    table = _table(str(output), "exported", "rows")
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    _print(table)


@command.command()
@click.argument("location")
@option(
    "--with-dense",
    is_flag=True,
    help="Let rank 0 write the dense part and its optimizer as well, between two batches of the training.",
)
@option(
    "--hold",
    "hold_s",
    type=click.FloatRange(0, 3600),
    default=0.0,
    metavar="SECONDS",
    help="With --with-dense: how long the training then waits to be stopped, before it continues.",
)
@option(
    "--in-place",
    is_flag=True,
    help="Rows stay in the servers' storage tiers, which then recover this checkpoint and no earlier one.",
)
@sign_key
@job_options
def dump(
    location: str, with_dense: bool, hold_s: float, in_place: bool, nats_url: str | None, job_name: str
) -> None:
    """Write all rows of a running job to LOCATION, as they are at one moment on each parameter server.

    For operators who move jobs to other servers. Without --with-dense, a dense part that LOCATION has
    stays: a place of its own is better. A training script dumps both parts with ctx.dump_checkpoint.
    With --in-place give --with-dense, too, if the training is to continue from this checkpoint.

    Exit code 75: the job has no optimizer yet, does not train now, dumps already or does not answer in
    time; the same may succeed later.
    """
    # Refused rather than ignored: an operator would rely on a training that waits.
    if hold_s and not with_dense:
        raise click.UsageError(
            "--hold has no effect without --with-dense: rows are dumped while training continues"
        )
    try:
        if with_dense:
            _dump_training(location, nats_url, job_name, hold_s, in_place)
            return
        from persia.checkpoint.checkpoints import DumpRequest

        # Rows alone need no rank: the servers are asked from here. A dense part only rank 0 can write.
        with _checkpoints(nats_url, job_name) as checkpoints:
            checkpoints.dump(DumpRequest(location, in_place=in_place))
    except _PASSING as failure:
        click.secho(f"persia-launcher: not yet: {failure}", fg="red", err=True)
        sys.exit(_NOT_YET)


def _dump_training(location: str, nats_url: str | None, job_name: str, hold_s: float, in_place: bool) -> None:
    from persia import env
    from persia.checkpoint.training_dump import request_training_dump
    from persia.storage.location import Location

    deadline_s = env.get_deadline_s()
    # A pod that is deleted is told by SIGTERM, which a container's first process ignores unless it listens.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with job_session(nats_url, job_name, name="checkpoint", role="admin", wait_s=deadline_s) as session:
        place = str(Location.of(location))
        request_training_dump(session, place, hold_s=hold_s, deadline_s=deadline_s, in_place=in_place)
    rows = "rows in place" if in_place else "rows"
    click.echo(f"the training has dumped its dense part to {place}, and its {rows}")


@command.command()
@click.argument("location")
@option("--without-state", is_flag=True, help="Begin with the optimizer's state of new rows.")
@verify_key
@job_options
def load(location: str, without_state: bool, nats_url: str | None, job_name: str) -> None:
    """Replace all rows of a running job by those in LOCATION, on any number of parameter servers.

    Nothing is replaced before every server has checked everything. Optimizer and learning rate are the
    checkpoint's until the training script registers its own.
    """
    from persia.checkpoint.checkpoints import Source

    with _checkpoints(nats_url, job_name) as checkpoints:
        checkpoints.load(Source(location), fresh_state=without_state)


@command.command()
@click.argument("location")
def remove(location: str) -> None:
    """Remove the checkpoint in the directory LOCATION, and the directory. Nothing is left to go back to.

    A directory that holds no checkpoint is left alone. What is not there is removed already.
    """
    from persia.storage.location import Location
    from persia.storage.manifest import MANIFEST_NAME
    from persia.storage.versions import checkpoints_at

    place = Location.of(location)
    # An operator retries a removal whose answer was lost, which must succeed.
    if not place.exists():
        return
    # A typing mistake in LOCATION must not delete what is no checkpoint.
    if not (place / MANIFEST_NAME).exists_replaced():
        inside = ", ".join(checkpoint.name for checkpoint in checkpoints_at(place))
        hint = f"; it holds several, to be removed one by one: {inside}" if inside else ""
        raise NotFoundError(f"{place} is no checkpoint (no {MANIFEST_NAME}), and is left alone{hint}")
    place.remove()


@contextlib.contextmanager
def _checkpoints(nats_url: str | None, job_name: str) -> Iterator[Checkpoints]:
    from persia import env
    from persia.checkpoint.checkpoints import Checkpoints
    from persia.checkpoint.peers import find_servers

    deadline_s = env.get_deadline_s()
    with job_session(nats_url, job_name, name="checkpoint", role="admin", wait_s=deadline_s) as session:
        yield Checkpoints(lambda: find_servers(session, deadline_s), deadline_s=deadline_s)


def _read(url: str) -> tuple[Location, Manifest]:
    from persia.storage.location import Location
    from persia.storage.manifest import Manifest
    from persia.storage.versions import resolve

    # Resolved first: a directory of checkpoints stands for the one that its `latest` names.
    place = resolve(Location.of(url))
    return place, Manifest.read(place)[0]


def _files(manifest: Manifest) -> list[Any]:
    dense = () if manifest.dense is None else manifest.dense.files.values()
    rows = () if manifest.embeddings is None else manifest.embeddings.files
    return [*dense, *rows]


def _show_summary(place: Location, manifest: Manifest) -> None:
    table = _table(str(place), "", "")
    table.add_row("written by", manifest.created_by)
    table.add_row("step", "" if manifest.step is None else f"{manifest.step:,}")
    if manifest.dense is not None:
        table.add_row("dense files", f"{', '.join(manifest.dense.files)} ({manifest.dense.created_at})")
    section = manifest.embeddings
    if section is not None:
        where = "in the servers' storage tiers" if section.in_place else f"{section.num_bytes:,} bytes"
        table.add_row("embeddings", f"{section.num_rows:,} rows, {where}")
        table.add_row("dumped at", section.created_at)
        if section.optimizer is not None:
            table.add_row(
                "optimizer", ", ".join(f"{key}={value}" for key, value in section.optimizer.items())
            )
        if not section.has_state:
            table.add_row("optimizer's state", "left out (with_state=False)")
        for index, server in enumerate(section.servers):
            after = f"checkpoint {server.step:,}" if section.in_place else f"after {server.step:,} updates"
            table.add_row(f"server {index}", f"{server.num_rows:,} rows, {after}")
    _print(table)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    # Into a pipe or a file, lines are not cut to the width of a terminal.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)


@contextlib.contextmanager
def _progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    # A log has no use for a bar that is drawn again and again.
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total_bytes)
        yield lambda num_bytes: shown.advance(task, num_bytes)
