"""Cuts and harms the network of a job, and prints how long training pauses.

NATS, the rank, the data loader, embedding workers and parameter servers each run on a host of their own: a
namespace of the kernel. It fails where a batch was not trained exactly once, where rows or dense weights
differ in a bit from those of a job that nothing met, and where training pauses for longer than it may.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.network.faults import FAULTS, measure, problems
from benchmarks.network.hosts import why_no_network


@click.command(help=__doc__)
@click.option("--fault", "names", type=click.Choice(list(FAULTS)), multiple=True, default=list(FAULTS))
@click.option("--turns", type=click.IntRange(min=1), default=1, show_default=True)
def main(names: Sequence[str], turns: int) -> None:
    if why := why_no_network():
        raise click.ClickException(why)
    failures = []
    click.echo("| failure | pause of training (s) |\n|---|---|")
    for name in names:
        fault, pauses = FAULTS[name], []
        for _ in range(turns):
            with tempfile.TemporaryDirectory(prefix="persia-network-") as folder:
                measured = measure(Path(folder), fault)
                pauses.append(measured.paused_s)
                found = problems(Path(folder), fault, measured.outcome)
            if measured.paused_s > fault.at_most_s:
                found.append(f"{measured.paused_s:.1f} s is more than {fault.at_most_s:g} s")
            failures += [f"FAILED: {name}: {text}" for text in found]
        click.echo(f"| {fault.title} | {', '.join(f'{pause:.1f}' for pause in sorted(pauses))} |")
    click.echo("\n".join(failures) or "each batch trained once; equal results")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
