"""Two builds of a native benchmark in turns: what a change to the engine gains.

    ./run bench bags --benchmark_list_tests    # builds it; once for each of two checkouts
    python -m benchmarks.builds OLD/build/bench/bench/bags_bench build/bench/bench/bags_bench \\
        --filter 'mode:1/optimizer:2/dim:16/rows:500000/ids:20/'

Each turn is a new process of one build, on one core. Prints items (IDs, rows) a second of processor time, and
the median, least and largest ratio of neighbouring turns for each benchmark that `--filter` names.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict

import click
from rich.console import Console
from rich.progress import track

from benchmarks.stats import paired_ratio, summarize

_TIMEOUT_S = 3600.0  # of a turn: filling the largest tables takes minutes
PROGRAM = click.Path(exists=True, dir_okay=False, resolve_path=True)


def turn(program: str, pattern: str, seconds: float, core: int) -> dict[str, float]:
    """Items a second of processor time, by benchmark."""
    command = [program, f"--benchmark_filter={pattern}", f"--benchmark_min_time={seconds}"]
    done = subprocess.run(
        [*command, "--benchmark_format=json"],
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_S,
        check=True,
        text=True,
    )
    if not done.stdout:  # it says on stderr that no name matches, and ends well
        raise click.BadParameter(f"{pattern!r} matches no benchmark of {program}", param_hint="--filter")
    found = {}
    for one in json.loads(done.stdout)["benchmarks"]:
        # Google Benchmark divides items by the time that the benchmark chose, here that of the clock.
        found[one["name"]] = one["items_per_second"] * one["real_time"] / one["cpu_time"]
    return found


@click.command(help=__doc__)
@click.argument("old", type=PROGRAM)
@click.argument("new", type=PROGRAM)
@click.option("--filter", "pattern", default=".", show_default=True, help="Of names; a regular expression.")
@click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True, help="Of each build.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=0.5, show_default=True)
@click.option("--core", type=click.IntRange(min=0), default=0, show_default=True)
def main(old: str, new: str, pattern: str, turns: int, seconds: float, core: int) -> None:
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: {old: [], new: []})
    for number in track(range(turns), "turns", console=Console(stderr=True)):
        for program in (old, new) if number % 2 == 0 else (new, old):
            for name, rate in turn(program, pattern, seconds, core).items():
                samples[name][program].append(rate)
    print("| benchmark | new / old | M items/s of a processor, new / old |\n|---|---|---|")
    for name, rates in samples.items():
        ratio = paired_ratio(rates[new], rates[old])
        pair = " / ".join(f"{summarize(rates[build]).median / 1e6:.1f}" for build in (new, old))
        print(f"| `{name}` | {ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f}) | {pair} |")


if __name__ == "__main__":
    main()
