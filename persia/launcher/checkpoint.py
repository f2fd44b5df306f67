"""`persia-launcher checkpoint`: looks into checkpoints, changing nothing in them; moves running jobs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from persia.launcher.checkpoint_rows import dump, load, remove

if TYPE_CHECKING:
    from rich.table import Table

    from persia.storage.location import Location
    from persia.storage.manifest import Manifest

__all__ = ["command"]

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@click.group("checkpoint")
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


command.add_command(dump)
command.add_command(load)
command.add_command(remove)


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
@_as_json
def verify(location: str, as_json: bool) -> None:
    """Read every file and check every checksum; exit code 1 when the checkpoint is not whole."""
    from persia.rows.reader import check_files

    place, manifest = _read(location)
    files = _files(manifest)
    with _progress("verifying", sum(file.num_bytes for file in files)) as advance:
        outcome = check_files(place, manifest, advance)
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
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "numpy"]),
    default="parquet",
    show_default=True,
    help="Parquet needs pyarrow.",
)
@click.option("--with-state", is_flag=True, help="The optimizer's state as well.")
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


def _read(url: str) -> tuple[Location, Manifest]:
    from persia.storage.location import Location
    from persia.storage.manifest import Manifest
    from persia.storage.versions import resolve

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
        where = "in the servers' pools" if section.in_place else f"{section.num_bytes:,} bytes"
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
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total_bytes)
        yield lambda num_bytes: shown.advance(task, num_bytes)
