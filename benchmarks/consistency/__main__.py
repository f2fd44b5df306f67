"""The one command: `python -m benchmarks.consistency --help`."""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.consistency.job import Sources, StudyError, prepare, run_job
from benchmarks.consistency.plan import DATASETS, MODES, Run, planned
from benchmarks.consistency.plots import draw
from benchmarks.consistency.report import (
    auc_table,
    figures_section,
    speed_table,
    verdict_table,
    write_section,
)
from benchmarks.consistency.results import Result, Store, load_results, save_results
from benchmarks.consistency.verdicts import cells, verdicts
from benchmarks.machine import describe_machine

_FOLDER = click.Path(file_okay=False, path_type=Path)
_WIDTH = 130
_QUICK_ROWS = 2_000
_QUICK_DELAYS_MS = (2.0,)
_QUICK_MODES = ("synchronous", "hybrid 8")


@click.command()
@click.option(
    "--quick", is_flag=True, help="Does everything run? One seed, two modes, little data; no floors."
)
@click.option(
    "--dataset", "datasets", multiple=True, type=click.Choice(DATASETS), help="Default: those with data."
)
@click.option(
    "--mode", "names", multiple=True, type=click.Choice([mode.name for mode in MODES]), help="Default: all."
)
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--ranks",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="They share the samples of a step. Several have no exact mode and no plain PyTorch.",
)
@click.option(
    "--delay",
    "delays",
    multiple=True,
    type=click.FloatRange(0, 1000),
    default=(0.0, 2.0, 10.0),
    show_default=True,
    metavar="MS",
    help="Added to the round trip between NN worker and embedding worker.",
)
@click.option(
    "--adult-source",
    envvar="ADULT_SOURCE",
    show_envvar=True,
    type=_FOLDER,
    help="Folder with adult.data and adult.test, plain or .xz; without it, those of the example.",
)
@click.option(
    "--kuairand",
    envvar="KUAIRAND_DIR",
    show_envvar=True,
    type=_FOLDER,
    help="Folder with the Parquet files of KuaiRand-Pure; without it the data set is left out.",
)
@click.option("--output", type=_FOLDER, default=Path("build/consistency"), show_default=True)
@click.option("--report-only", is_flag=True, help="Run nothing; tables and pictures of the runs there are.")
@click.option(
    "--write",
    "page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put the figures into this page (docs/consistency.md).",
)
def main(
    quick: bool,
    datasets: tuple[str, ...],
    names: tuple[str, ...],
    seeds: int,
    ranks: int,
    delays: tuple[float, ...],
    adult_source: Path | None,
    kuairand: Path | None,
    output: Path,
    report_only: bool,
    page: Path | None,
) -> None:
    """Trains on real data in every mode of consistency, with a network of several lengths, for several seeds.

    Ends with 1 if a floor is missed. Each run's result is kept when it ends: the same command goes on where
    it was stopped, and with more --seeds adds to what is there.
    """
    console = Console()
    console.width = max(console.width, _WIDTH)
    chosen_modes = [mode for mode in MODES if mode.name in (names or (_QUICK_MODES if quick else names))]
    chosen_modes = chosen_modes or [mode for mode in MODES if ranks == 1 or not mode.is_exact]
    if ranks > 1 and any(mode.is_exact for mode in chosen_modes):
        raise click.UsageError(f"--ranks {ranks} with an exact mode: it trains one rank, leave either out")
    if quick:
        seeds, delays, output = 1, _QUICK_DELAYS_MS, output / "quick"
    if not report_only:
        chosen_data = _with_data(datasets, kuairand, console)
        sources = Sources(adult=output / "adult", kuairand=kuairand, max_rows=_QUICK_ROWS if quick else None)
        runs = list(planned(chosen_data, chosen_modes, sorted(set(delays)), seeds, ranks))
        try:
            store = Store(output, {"max_rows": sources.max_rows})
            if "adult" in chosen_data:
                prepare(adult_source, sources.adult)
            _run_all(runs, sources, store, output, console)
        except (StudyError, ValueError) as error:
            raise click.ClickException(str(error)) from error
    try:
        about, results = load_results(output / "results.json")
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{error}: run the study first, without --report-only") from error
    _show(console, results, output)
    if page is not None:
        write_section(page, figures_section(about, results))
        console.print(f"wrote {page}")
    judged = [] if quick else verdicts(cells(results))
    if judged:
        console.print(verdict_table(judged))
    if any(one.kept is False for one in judged):
        sys.exit(1)


def _with_data(datasets: Sequence[str], kuairand: Path | None, console: Console) -> list[str]:
    if kuairand is None and "kuairand" in datasets:
        raise click.UsageError("kuairand needs its files: --kuairand DIR, or KUAIRAND_DIR")
    if kuairand is None and not datasets:
        console.print("[yellow]left out[/] kuairand: --kuairand names no folder")
    return [
        name for name in DATASETS if name in datasets or (not datasets and (kuairand or name != "kuairand"))
    ]


def _run_all(runs: Sequence[Run], sources: Sources, store: Store, output: Path, console: Console) -> None:
    """Runs what has not finished before; results.json has, after each, all that are there."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    about = _about()
    results: list[Result] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(runs))
        for run in runs:
            progress.update(task, description=run.name)
            result = store.find(run)
            if result is None:
                result = Result.of(run, run_job(run, sources))
                store.add(run, result)
                console.print(escape(_line(run, result)), highlight=False)
            results.append(result)
            save_results(output / "results.json", about, results)
            progress.advance(task)


def _line(run: Run, result: Result) -> str:
    return f"{run.name}: AUC {result.test_auc:.5f}, {result.samples_per_second:,.0f} samples/s"


def _about() -> dict[str, Any]:
    return {
        "command": shlex.join(
            ["python", "-m", "benchmarks.consistency", *map(_without_folder, sys.argv[1:])]
        ),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
    }


def _without_folder(argument: str) -> str:
    """Where somebody keeps their data is not what a figure depends on."""
    return "DIR" if os.path.isabs(argument) else argument


def _show(console: Console, results: Sequence[Result], output: Path) -> None:
    for table in (auc_table(results), speed_table(results)):
        console.print(table)
    for path in (output / "results.json", *draw(results, output)):
        console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    main()
