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

from benchmarks.arguments import dim, folder, number, whole
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
from persia.config import parse_global_config
from persia.errors import ConfigError
from persia.pmem import HAS_PMEM


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=whole(1), default=1_000_000, help="of all slots")
    parser.add_argument("--slots", type=whole(1), default=26)
    parser.add_argument("--dim", type=dim, default=16)
    parser.add_argument("--batch-size", type=whole(1), default=2048)
    parser.add_argument("--exponent", type=number(above=0), default=1.5, help="of the IDs' Zipf law; not 1")
    parser.add_argument("--settle", type=whole(0), default=100, help="steps before time is taken")
    parser.add_argument(
        "--cache", type=number(above=0, most=1), nargs="+", default=[0.1], help="shares of the rows"
    )
    parser.add_argument(
        "--count-bytes",
        action="store_true",
        help="a share of the rows' bytes, from which the index of all rows takes its part, too",
    )
    parser.add_argument("--kind", choices=("file", "pmem"), default="pmem")
    parser.add_argument("--job", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seconds", type=number(above=0), default=3.0, help="of a turn")
    parser.add_argument("--rounds", type=whole(1), default=7)
    parser.add_argument(
        "--page-cache", type=number(above=0), metavar="SHARE", help="memory for the pool's file; needs root"
    )
    parser.add_argument("--announce", action="store_true", help="what announcing rows brings")
    parser.add_argument(
        "--checkpoint-every", type=number(above=0), metavar="SECONDS", help="turns of that length"
    )
    parser.add_argument("--directory", type=folder, help="of the pools; /dev/shm is tmpfs")
    parser.add_argument(
        "--curve", type=Path, metavar="PNG", help="throughput and misses by size of the cache"
    )
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks/tiers.json"))
    options = parser.parse_args()
    if options.exponent == 1:
        parser.error("--exponent 1: the law is computed for all others; give 1.001")
    if options.rows < options.slots:
        parser.error(f"--rows {options.rows}: give at least one for each of --slots {options.slots}")
    if options.kind == "pmem" and not HAS_PMEM:
        parser.error("--kind pmem: persia was built without libpmem; give --kind file")
    try:
        smallest = _pool_job_of(options, min(options.cache))
        parse_global_config({"embedding_parameter_server_config": smallest.server})
    except ConfigError as error:
        parser.error(f"--cache {min(options.cache):g} of --rows {options.rows}: {error}")
    return options


def _job_of(options: argparse.Namespace) -> JobOptions:
    return JobOptions(
        rows=options.rows,
        slots=options.slots,
        dim=options.dim,
        batch_size=options.batch_size,
        exponent=options.exponent,
    )


def _pool_job_of(options: argparse.Namespace, cache: float) -> JobOptions:
    return dataclasses.replace(
        _job_of(options), kind=options.kind, cache=cache, counts_bytes=options.count_bytes, directory="."
    )


def _compare(options: argparse.Namespace, schedule: Schedule, console: Console) -> None:
    job = _job_of(options)
    pools = [_pool_job_of(options, cache) for cache in options.cache]
    with opened([job, *pools], schedule, options.directory, options.page_cache) as sides:
        comparisons = compare(sides, schedule, options.job)
        memories = [
            {"kind": side.options.kind, "cache": side.options.cache, **side.memory()} for side in sides
        ]
    console.print(comparison_table(comparisons))
    console.print(memory_table(memories))
    if options.curve is not None:
        title = f"{job.rows:,} rows of dim {job.dim} in a pool of kind {options.kind}, Zipf({job.exponent:g})"
        draw_curve(options.curve, title, comparisons, memories, job.batch_size)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(to_json(comparisons, memories, shlex.join(sys.argv)))


def _compare_checkpoints(options: argparse.Namespace, schedule: Schedule, console: Console) -> None:
    pool = _pool_job_of(options, options.cache[0])
    with opened([pool, pool], schedule, options.directory, options.page_cache) as sides:
        comparison = compare_checkpoints(sides, schedule)
    console.print("\n".join(checkpoint_lines(comparison)))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(to_json([comparison], [], shlex.join(sys.argv)))


def _compare_announced(options: argparse.Namespace, schedule: Schedule, console: Console) -> None:
    pool = _pool_job_of(options, options.cache[0])
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
    seconds = options.checkpoint_every or options.seconds
    schedule = Schedule(rounds=options.rounds, seconds=seconds, settle=options.settle)
    if options.announce:
        run = _compare_announced
    else:
        run = _compare if options.checkpoint_every is None else _compare_checkpoints
    run(options, schedule, Console(width=140))


if __name__ == "__main__":
    main()
