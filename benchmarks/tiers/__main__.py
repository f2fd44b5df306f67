"""One job, its rows in memory and in pools with caches of several sizes, end to end and in turns.

    python -m benchmarks.tiers --directory /dev/shm                             # against the floors
    python -m benchmarks.tiers --directory build --kind file --curve build/tiers.png --cache 0.5 0.1 0.02
    python -m benchmarks.tiers --directory /dev/shm --checkpoint-every 10       # what checkpoints cost
    python -m benchmarks.tiers --directory build --kind file --announce --page-cache 0.25   # as root

All jobs are alive together, each in a process of its own, and take turns of `--seconds`; the ratio is the
median of the ratios of neighbouring turns, beside the least and the largest. A job is embedded, made of 26
slots and a tower of 256 and 128, and looks its batches up ahead by `DataLoader`: as users have it, with
staleness 1, and without the tower. IDs follow a Zipf law; `--exponent` says how steep. All rows are there
before time is taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.tiers.job import VARIANTS, JobOptions
from benchmarks.tiers.report import (
    announced_line,
    checkpoint_lines,
    comparison_table,
    draw_curve,
    memory_table,
    to_json,
)
from benchmarks.tiers.turns import Schedule, compare, compare_checkpoints, opened


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="of all slots")
    parser.add_argument("--slots", type=int, default=26)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--exponent", type=float, default=1.5, help="of the IDs' Zipf law; not 1")
    parser.add_argument("--settle", type=int, default=100, help="steps before time is taken")
    parser.add_argument("--cache", type=float, nargs="+", default=[0.1], help="shares of the rows")
    parser.add_argument("--kind", default="pmem", help="file or pmem")
    parser.add_argument("--job", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--page-cache", type=float, metavar="SHARE", help="memory for the pool's file; needs root"
    )
    parser.add_argument("--announce", action="store_true", help="what announcing rows brings")
    parser.add_argument("--checkpoint-every", type=float, metavar="SECONDS", help="turns of that length")
    parser.add_argument("--directory", type=Path, help="of the pools; /dev/shm is tmpfs")
    parser.add_argument(
        "--curve", type=Path, metavar="PNG", help="throughput and misses by size of the cache"
    )
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks/tiers.json"))
    return parser.parse_args()


def _compare(options: argparse.Namespace, job: JobOptions, schedule: Schedule, console: Console) -> None:
    pools = [dataclasses.replace(job, kind=options.kind, cache=cache) for cache in options.cache]
    with opened([job, *pools], schedule, options.directory, options.page_cache) as sides:
        comparisons = compare(sides, schedule, options.job)
        memories = [
            {"kind": side.options.kind, "cache": side.options.cache, **side.memory()} for side in sides
        ]
    console.print(comparison_table(comparisons))
    console.print(memory_table(memories))
    if options.curve is not None:
        title = f"{job.rows:,} rows of dim {job.dim} in a pool of kind {options.kind}, Zipf({job.exponent:g})"
        draw_curve(options.curve, title, comparisons, job.batch_size)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(to_json(comparisons, memories, shlex.join(sys.argv)))


def _compare_checkpoints(
    options: argparse.Namespace, job: JobOptions, schedule: Schedule, console: Console
) -> None:
    pool = dataclasses.replace(job, kind=options.kind, cache=options.cache[0])
    with opened([pool, pool], schedule, options.directory, options.page_cache) as sides:
        comparison = compare_checkpoints(sides, schedule)
    console.print("\n".join(checkpoint_lines(comparison)))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(to_json([comparison], [], shlex.join(sys.argv)))


def _compare_announced(
    options: argparse.Namespace, job: JobOptions, schedule: Schedule, console: Console
) -> None:
    pool = dataclasses.replace(job, kind=options.kind, cache=options.cache[0])
    comparisons = []
    for name in options.job:  # each with its own jobs: a context has one stream
        announced = dataclasses.replace(pool, announces=True, stream_staleness=VARIANTS[name].staleness)
        with opened([pool, announced], schedule, options.directory, options.page_cache) as sides:
            comparisons += compare(sides, schedule, [name])
        console.print(announced_line(comparisons[-1]))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(to_json(comparisons, [], shlex.join(sys.argv)))


def main() -> None:
    """Prints, and writes `--output`."""
    options = _options()
    job = JobOptions(
        rows=options.rows,
        slots=options.slots,
        dim=options.dim,
        batch_size=options.batch_size,
        exponent=options.exponent,
    )
    seconds = options.checkpoint_every or options.seconds
    schedule = Schedule(rounds=options.rounds, seconds=seconds, settle=options.settle)
    if options.announce:
        run = _compare_announced
    else:
        run = _compare if options.checkpoint_every is None else _compare_checkpoints
    run(options, job, schedule, Console(width=140))


if __name__ == "__main__":
    main()
