"""Kills random processes of a job at random steps, and compares its result with that of one process.

The job runs under `persia-launcher local --max-restarts`: 2 parameter servers, 2 embedding workers, 2 data
loaders and the ranks, each a process of its own. It fails where a batch was not trained exactly once; and
with one rank, in reproducible mode, where rows or dense weights differ in a bit.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.chaos.job import ROLES, Kill, Settings, differences, run, undisturbed
from benchmarks.chaos.results import Result, append, table

_FIRST, _LEAVE = 5, 60  # steps at the start and the end without a kill: the loaders end before the ranks


def plan(num_kills: int, settings: Settings, roles: Sequence[str], seed: int) -> list[Kill]:
    """Random kills, all of them before the loaders have sent their last batches.

    click.BadParameter: there are too few batches for one.
    """
    least = settings.ranks * (_FIRST + _LEAVE + 1)
    if settings.batches < least:
        raise click.BadParameter(
            f"{settings.batches} batches leave no step for a kill: use {least} or more with "
            f"--ranks {settings.ranks}",
            param_hint="--batches",
        )
    rng = random.Random(seed)
    steps = range(_FIRST, settings.batches // settings.ranks - _LEAVE)
    return [
        Kill(role=rng.choice(roles), step=step, which=rng.randrange(2))
        for step in sorted(rng.choices(steps, k=num_kills))
    ]


@click.command(help=__doc__)
@click.option("--kills", "num_kills", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--batches", type=click.IntRange(min=100), default=None, help="Default: 100 and 20 a kill.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--standbys", type=click.IntRange(0, 1), default=0, show_default=True, help="Of each server.")
@click.option("--device", type=click.IntRange(min=0), help="CUDA device of all ranks. [default: the CPU]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--roles", type=click.Choice(ROLES), multiple=True, default=ROLES, help="Of processes to kill.")
@click.option("--results", type=click.Path(path_type=Path), help="File to which the kills are added.")
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Folder for output and files of a run that fails."
)
def main(
    num_kills: int,
    batches: int | None,
    ranks: int,
    standbys: int,
    device: int | None,
    seed: int,
    roles: tuple[str, ...],
    results: Path | None,
    keep: Path | None,
) -> None:
    total = batches or ranks * (100 + 20 * num_kills)
    settings = Settings(
        batches=total,
        ranks=ranks,
        standbys=standbys,
        device=device,
        spare_restarts=num_kills,
        deadline_s=600 + 120 * num_kills,
    )
    kills = plan(num_kills, settings, roles, seed)
    with tempfile.TemporaryDirectory(prefix="persia-chaos-") as folder:
        outcome = run(Path(folder) / "killed", settings, kills)
        done = [kill for kill in kills if kill.at]
        problems = [] if len(done) == num_kills else [f"only {len(done)} of {num_kills} kills were done"]
        if outcome.exit_code:
            click.echo(outcome.output)
            problems.append(f"the job ended with exit code {outcome.exit_code}")
        if sorted(outcome.trained) != list(range(total)):
            problems.append("not every batch was trained exactly once")
        if ranks == 1 and not problems:
            problems += differences(undisturbed(Path(folder) / "undisturbed", settings), outcome)
        if problems and keep is not None:
            (Path(folder) / "output.log").write_text(outcome.output)
            shutil.copytree(folder, keep / f"seed-{seed}", dirs_exist_ok=True)
    result = Result(
        seed=seed,
        ranks=ranks,
        standbys=standbys,
        wasted=outcome.wasted,
        restarts=outcome.restarts,
        load=os.getloadavg()[0],
        kills=done,
        problems=problems,
    )
    if results is not None:
        append(results, result)
    click.echo(table([result]))
    click.echo(f"{total} batches, {outcome.wasted} steps rolled back and trained again")
    click.echo("\n".join(f"FAILED: {text}" for text in problems) or "each batch trained once; equal result")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
