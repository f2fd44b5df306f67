"""Runs the protocol under faults that follow from seeds; prints the seeds that fail, and how to repeat them.

docs/recovery.md, "Simulation", says what is real and what is checked.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import click

from benchmarks.simulation.library import PATH, Library
from benchmarks.simulation.scenario import Outcome, run_seed

_SEEDS_A_PART, _PARTS_A_PROCESS = (
    10,
    10,
)  # what killed processes held is not freed: real ones end now and then
_COMMAND = "python -m benchmarks.simulation --seed {} --trace"


def undisturbed(library: Library) -> int:
    """The digest of the rows without faults."""
    outcome = run_seed(library, 0, expected=None, has_faults=False)
    if outcome.failure:
        raise click.ClickException(f"without faults: {outcome.failure}")
    return outcome.digest


def _run_some(expected: int, seeds: range) -> list[Outcome]:
    sys.setswitchinterval(1000)  # one thread runs at a time: there is nothing to switch to
    library = Library()
    return [run_seed(library, seed, expected=expected) for seed in seeds]


def run_seeds(seeds: range, processes: int) -> list[Outcome]:
    """The outcomes of all seeds, some of them at a time in processes of their own."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        expected = pool.submit(_undisturbed).result()
    parts = [seeds[i : i + _SEEDS_A_PART] for i in range(0, len(seeds), _SEEDS_A_PART)]
    outcomes: list[Outcome] = []
    # A worker that dies, by an assertion of the native half for instance, is an error here and no hang.
    for first in range(0, len(parts), processes * _PARTS_A_PROCESS):
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            some = parts[first : first + processes * _PARTS_A_PROCESS]
            for part in pool.map(partial(_run_some, expected), some):
                outcomes += part
    return outcomes


def _undisturbed() -> int:
    return undisturbed(Library())


@click.command(help=__doc__)
@click.option("--seeds", default=1000, help="How many seeds to run.", show_default=True)
@click.option("--first", default=1, help="The first of them.", show_default=True)
@click.option("--seed", type=int, help="Run this one alone.")
@click.option("--trace", is_flag=True, help="Print what happens, with --seed.")
@click.option("--processes", default=2, help="How many run at a time.", show_default=True)
def main(seeds: int, first: int, seed: int | None, trace: bool, processes: int) -> None:
    if not PATH.exists():
        raise click.ClickException("build/native has no library of the simulation: ./run simulate builds it")
    if seed is not None:
        library = Library()
        outcome = run_seed(library, seed, expected=undisturbed(library), trace=trace)
        print(f"seed {seed}: {outcome.failure or 'everything held'} after {outcome.elapsed_s:.1f} s")
        sys.exit(bool(outcome.failure))
    begin = time.monotonic()
    outcomes = run_seeds(range(first, first + seeds), processes)
    failed = sorted((o for o in outcomes if o.failure), key=lambda o: o.seed)
    for outcome in failed:
        print(f"seed {outcome.seed}: {outcome.failure}\n  {_COMMAND.format(outcome.seed)}")
    faults = sum((outcome.faults for outcome in outcomes), Counter[str]())
    print(f"{len(outcomes)} seeds in {time.monotonic() - begin:.0f} s, {len(failed)} failed")
    lost = sum(outcome.has_lost_rows for outcome in outcomes)
    print(f"  rows lost and reported, by a server and the broker at a time: {lost}")
    for name, count in sorted(faults.items()):
        print(f"  {name}: {count}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
