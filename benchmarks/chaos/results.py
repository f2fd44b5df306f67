"""Prints one table of all kills in files of `--results`: `python -m benchmarks.chaos.results FILE ...`."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import click

from benchmarks.chaos.job import ROLES, Kill

__all__ = ["Result", "append", "read", "table"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. `load`: of the machine at its end; `problems`: why it failed, empty if it has not."""

    seed: int
    ranks: int
    standbys: int
    wasted: int = 0
    restarts: int = 0
    load: float = 0.0
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def append(path: Path, result: Result) -> None:
    """Adds a run to a file, which other runs may write at the same time."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(paths: Iterable[Path]) -> Iterator[Result]:
    for path in paths:
        for line in path.read_text().splitlines():
            fields = json.loads(line)
            yield Result(**{**fields, "kills": [Kill(**kill) for kill in fields["kills"]]})


def table(results: Iterable[Result]) -> str:
    """Pauses by setting and role, in Markdown, without the waits of the launcher before a restart."""
    pauses = defaultdict[tuple[int, int, str], list[float]](list)
    for result in results:
        for kill in result.kills:
            pauses[result.ranks, result.standbys, kill.role].append(kill.pause_s - kill.back_off_s)
    lines = [
        "| ranks | standbys | killed | kills | median pause (s) | p99 (s) | longest (s) |",
        "|---" * 7 + "|",
    ]
    for key in sorted(pauses, key=lambda key: (key[0], key[1], ROLES.index(key[2]))):
        ordered = sorted(pauses[key])
        figures = (median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1])
        cells = (*key, len(ordered), *(f"{figure:.1f}" for figure in figures))
        lines.append("".join(f"| {cell} " for cell in cells) + "|")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def main(files: Sequence[Path]) -> None:
    results = list(read(files))
    click.echo(table(results))
    failed = [result for result in results if result.problems]
    loads = sorted(result.load for result in results)
    click.echo(
        f"{len(results)} runs, {len(failed)} failed, {sum(len(result.kills) for result in results)} kills,"
    )
    click.echo(f"{sum(result.restarts for result in results)} restarts,")
    click.echo(f"{sum(result.wasted for result in results)} steps rolled back and trained again;")
    click.echo(f"load of the machine {loads[0]:.0f} to {loads[-1]:.0f}")
    for result in failed:
        click.echo(
            f"FAILED: seed {result.seed}, {result.ranks} ranks, {result.standbys} standbys: {result.problems}"
        )


if __name__ == "__main__":
    main()
