"""The one command: `python -m benchmarks --help`."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from benchmarks.cases import comparisons, filled, quick, select
from benchmarks.limits import Limit, memory_limits, run_rpc_bench
from benchmarks.machine import describe_machine
from benchmarks.plots import draw_curves
from benchmarks.process import MALLOC_SETTINGS, Interpreters
from benchmarks.report import (
    limit_table,
    missed,
    read_json,
    reasons,
    result_line,
    result_table,
    write_json,
)
from benchmarks.runner import BatchFiles, Result, Settings, measure
from benchmarks.workload import Fill

_TABLE_WIDTH = 120


def _cores(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, ...]:
    allowed = sorted(os.sched_getaffinity(0))
    if value is None:
        return tuple(allowed[:2])
    cores = tuple(int(core) for core in value.split(",") if core.isdigit())
    if not cores or not set(cores) <= set(allowed):
        raise click.BadParameter(f"{value!r} must be numbers of this process's cores {allowed}, as in 0,1")
    return cores


@click.command()
@click.option("--quick", "is_quick", is_flag=True, help="Show that everything runs: tiny tables, no floors.")
@click.option("--only", multiple=True, metavar="GLOB", help="Comparisons to run, as in 'train/*/fbgemm/*'.")
@click.option("--list", "is_list", is_flag=True, help="Print the comparisons' names and floors, and end.")
@click.option(
    "--malloc", type=click.Choice([*MALLOC_SETTINGS, "both"]), help="Default: both; quick: default."
)
@click.option(
    "--fill",
    type=click.Choice(["arrival", "random"]),
    default="arrival",
    show_default=True,
    help="Order in which hash tables get their rows: of first arrival under the traffic, or any.",
)
@click.option(
    "--processes", type=click.IntRange(1), default=2, help="Fresh processes per side.", show_default=True
)
@click.option("--rounds", type=click.IntRange(1), default=5, help="Turns in each process.", show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="A turn."
)
@click.option("--cores", callback=_cores, metavar="N,N", help="Cores to pin to. Default: the first two.")
@click.option("--tfra-python", metavar="PATH", help="Interpreter of the environment that has TFRA.")
@click.option(
    "--rpc-bench",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The native program rpc_bench, to judge the RPC as well.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build/benchmarks"),
    show_default=True,
)
@click.option("--add", is_flag=True, help="Keep the rows that the output folder has of other comparisons.")
def main(
    is_quick: bool,
    only: tuple[str, ...],
    is_list: bool,
    malloc: str | None,
    fill: Fill,
    processes: int,
    rounds: int,
    seconds: float,
    cores: tuple[int, ...],
    tfra_python: str | None,
    rpc_bench: Path | None,
    output: Path,
    add: bool,
) -> None:
    """Measures persia beside its peers and prints figures, ratios and floors; ends with 1 if one is missed.

    Writes results.json, table.txt and the curves into the output folder.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as on Ctrl-C: children and files go too
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)  # a pipe has no width of its own
    try:
        chosen = select(quick(comparisons()) if is_quick else comparisons(), only)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if is_list:
        for row in chosen:
            console.print(
                f"{row.name}  [dim]{'' if row.floor is None else f'>= {row.floor:g}x'}[/]", highlight=False
            )
        return
    chosen = filled(chosen, fill)
    interpreters = Interpreters(tfra=tfra_python)
    settings = (
        Settings(1, 2, 0.1, cores, interpreters)
        if is_quick
        else Settings(processes, rounds, seconds, cores, interpreters)
    )
    mallocs = [malloc or "default"] if is_quick and malloc != "both" else _mallocs(malloc)
    about: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "settings": dataclasses.asdict(settings),
    }
    about["earlier_runs"], earlier, kept_limits = _earlier(output) if add else ([], [], [])
    by_key = {(result.comparison.name, result.malloc): result for result in earlier}
    with BatchFiles() as files, console.status("") as status:
        for number, (row, setting) in enumerate(itertools.product(chosen, mallocs), start=1):
            status.update(f"{number}/{len(chosen) * len(mallocs)} {row.name}, {setting} malloc")
            result = measure(row, setting, settings, files)
            console.print(result_line(result), highlight=False)
            # A long run that is stopped keeps what it has measured, and what it has not measured again.
            by_key.pop((row.name, setting), None)
            by_key[row.name, setting] = result
            write_json(output / "results.json", about, list(by_key.values()), kept_limits)
    results = list(by_key.values())
    limits = memory_limits(results)
    limits += kept_limits if rpc_bench is None else run_rpc_bench(rpc_bench)
    write_json(output / "results.json", about, results, limits)
    _show(console, results, limits, output)
    if missed(results) or not all(limit.is_kept for limit in limits):
        sys.exit(1)


def _earlier(output: Path) -> tuple[list[dict[str, Any]], list[Result], list[Limit]]:
    """The runs whose rows the output folder has, these rows, and limits of RPC."""
    path = output / "results.json"
    if not path.exists():
        return [], [], []
    try:
        about, results, limits = read_json(path)
    except (ValueError, KeyError, TypeError) as error:
        raise click.UsageError(
            f"--add: {path} holds no results of this version: remove it ({error!r})"
        ) from error
    runs = about.pop("earlier_runs", [])
    of_memory = {limit.name for limit in memory_limits(results)}
    return [*runs, about], results, [limit for limit in limits if limit.name not in of_memory]


def _mallocs(choice: str | None) -> list[str]:
    return list(MALLOC_SETTINGS) if choice in (None, "both") else [choice]


def _show(console: Console, results: list[Result], limits: list[Limit], output: Path) -> None:
    with (output / "table.txt").open("w") as file:
        for to in (console, Console(file=file, width=_TABLE_WIDTH)):
            to.print(result_table(results))
            if limits:
                to.print(limit_table(limits))
            for system, why in reasons(results).items():
                for reason in sorted(why):
                    to.print(f"[yellow]not run[/] {system}: {escape(reason)}", highlight=False)
    for path in (output / "results.json", output / "table.txt", *draw_curves(results, output)):
        console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    main()
