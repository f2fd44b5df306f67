"""Runs the protocol under faults that follow from seeds; prints the seeds that fail, and how to repeat them.

docs/performance_recovery.md, "Simulation", says what is real and what is checked.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import click

from benchmarks.simulation.library import PATH, Library
from benchmarks.simulation.scenario import run_seed, undisturbed
from benchmarks.simulation.seeds import run_seeds

_COMMAND = "python -m benchmarks.simulation --seed {} --trace"


@click.command(help=__doc__)
@click.option("--seeds", default=1000, help="How many seeds to run.", show_default=True)
@click.option("--first", default=1, help="The first of them.", show_default=True)
@click.option("--seed", type=int, help="Run this one alone.")
@click.option("--trace", is_flag=True, help="Print what happens, with --seed.")
@click.option("--processes", default=2, help="How many run at a time.", show_default=True)
def main(seeds: int, first: int, seed: int | None, trace: bool, processes: int) -> None:
    if not PATH.exists():
        raise click.ClickException("there is no library of the simulation: ./run simulate builds it")
    if seed is not None:
        library = Library()
        outcome = run_seed(library, seed, expected=undisturbed(library), trace=trace)
        print(f"seed {seed}: {outcome.failure or 'everything held'} after {outcome.elapsed_s:.1f} s")
        sys.exit(bool(outcome.failure))
    begin = time.monotonic()
    outcomes, processor_s = run_seeds(range(first, first + seeds), processes)
    failed = sorted((o for o in outcomes if o.failure), key=lambda o: o.seed)
    for outcome in failed:
        print(f"seed {outcome.seed}: {outcome.failure}\n  {_COMMAND.format(outcome.seed)}")
    faults = sum((outcome.faults for outcome in outcomes), Counter[str]())
    print(
        f"{len(outcomes)} seeds in {time.monotonic() - begin:.0f} s, with "
        f"{processor_s:.0f} s of processors, {1000 * processor_s / len(outcomes):.1f} ms a seed; "
        f"{len(failed)} failed"
    )
    lost = sum(outcome.has_lost_rows for outcome in outcomes)
    print(f"  rows lost and reported, by a server and the broker at a time: {lost}")
    print(f"  jobs that went back to a checkpoint: {sum(bool(o.num_roll_backs) for o in outcomes)}")
    for name, count in sorted(faults.items()):
        print(f"  {name}: {count}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
