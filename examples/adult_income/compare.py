"""Test AUC through the real pipeline, in several arrangements, beside plain PyTorch.

    python compare.py                             every case
    python compare.py reproducible                one of them
    python compare.py two_ranks --repeat 20

Exit code 0 when every case holds what it promises. Needs prepared data (prepare_data.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from dataset import DEFAULT_DIRECTORY, REPOSITORY, DataError, load_info
from reference import reference_auc
from results import remove_results
from settings import DEFAULT_SEED

HERE = Path(__file__).resolve().parent
RUN_DEADLINE_S = 600.0
SEEDS = range(5)
ROW_DTYPES = ("float32", "float16", "bfloat16")
console = Console(highlight=False)


class RunError(RuntimeError):
    """A run did not end well; the message holds the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """One run of the job; the defaults are the smallest cluster in the default mode."""

    name: str
    seed: int = DEFAULT_SEED
    reproducible: bool = False
    parameter_servers: int = 1
    embedding_workers: int = 1
    data_loaders: int = 1
    ranks: int = 1
    row_dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Runs that belong together, and what must hold for their AUCs (in the order of the runs)."""

    promise: str
    runs: list[Arrangement]
    holds: Callable[[list[float]], bool]


def cases(repeat: int) -> dict[str, Case]:
    """By the name used on the command line."""
    return {
        "asynchronous": Case(
            promise="mean at least 0.893, each at least 0.892",
            runs=[Arrangement(name=f"seed {seed}", seed=seed) for seed in SEEDS],
            holds=lambda aucs: sum(aucs) / len(aucs) >= 0.893 and min(aucs) >= 0.892,
        ),
        "reproducible": Case(
            promise="equal to the last digit, and at least 0.892",
            runs=[
                Arrangement(name="one of each server", reproducible=True),
                Arrangement(name="the same again", reproducible=True),
                Arrangement(name="3 parameter servers", reproducible=True, parameter_servers=3),
                Arrangement(name="2 embedding workers", reproducible=True, embedding_workers=2),
                Arrangement(name="2 data loaders", reproducible=True, data_loaders=2),
            ],
            holds=lambda aucs: len(set(aucs)) == 1 and aucs[0] >= 0.892,
        ),
        "row_dtype": Case(
            promise="on average at most 0.001 below rows of 32 bits",
            runs=[
                Arrangement(name=f"{dtype}, seed {seed}", seed=seed, reproducible=True, row_dtype=dtype)
                for dtype in ROW_DTYPES
                for seed in SEEDS
            ],
            holds=lambda aucs: min(means := _means_by_dtype(aucs)) >= means[0] - 0.001,
        ),
        "two_ranks": Case(
            promise="within 0.002 of one rank",
            runs=[
                Arrangement(name="1 rank, 1 loader"),
                *(
                    Arrangement(name=f"2 ranks, 2 loaders, run {run + 1}", ranks=2, data_loaders=2)
                    for run in range(repeat)
                ),
            ],
            holds=lambda aucs: all(abs(auc - aucs[0]) <= 0.002 for auc in aucs),
        ),
    }


def _means_by_dtype(aucs: list[float]) -> list[float]:
    return [statistics.fmean(aucs[i : i + len(SEEDS)]) for i in range(0, len(aucs), len(SEEDS))]


def global_config(row_dtype: str, folder: Path) -> Path:
    """The example's, with rows of that type."""
    config = yaml.safe_load((HERE / "config" / "global_config.yml").read_text(encoding="utf-8"))
    config["embedding_parameter_server_config"]["row_dtype"] = row_dtype
    path = folder / "global_config.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def run(arrangement: Arrangement, data: Path, output: Path) -> float:
    """Test AUC of one run; raises RunError with the end of its output when it fails."""
    summary = output / "summary.json"
    remove_results(output)
    output.mkdir(parents=True, exist_ok=True)
    options = {
        "--nn-worker": HERE / "train.py",
        "--data-loader": HERE / "data_loader.py",
        "--embedding-config": HERE / "config" / "embedding_config.yml",
        "--global-config": global_config(arrangement.row_dtype, output),
        "--parameter-servers": arrangement.parameter_servers,
        "--embedding-workers": arrangement.embedding_workers,
        "--data-loaders": arrangement.data_loaders,
        "--nproc-per-node": arrangement.ranks,
    }
    environment = {
        "ADULT_DATA": str(data),
        "ADULT_OUTPUT": str(output),
        "SEED": str(arrangement.seed),
        "REPRODUCIBLE": str(int(arrangement.reproducible)),
        "EMBEDDING_STALENESS": "",  # The default of the mode, whatever the caller's environment says.
    }
    command = [sys.executable, "-m", "persia.launcher", "local"]
    for name, value in options.items():
        command += [name, str(value)]
    finished = subprocess.run(
        command,
        env={"OMP_NUM_THREADS": "1"} | os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=RUN_DEADLINE_S,
        check=False,
    )
    if finished.returncode != 0 or not summary.is_file():
        raise RunError(f"{arrangement.name}: exit code {finished.returncode}\n{finished.stdout[-4000:]}")
    return float(json.loads(summary.read_text(encoding="utf-8"))["test_auc"])


def check(name: str, case: Case, data: Path, output: Path, references: dict[int, float]) -> bool:
    """Runs one case and prints its table."""
    table = Table(title=f"{name}: {case.promise}", title_justify="left")
    for column in ("run", "seed", "test AUC", "plain PyTorch"):
        table.add_column(column)
    aucs = []
    for arrangement in case.runs:
        aucs.append(run(arrangement, data, output))
        seed = arrangement.seed
        if seed not in references:
            references[seed] = reference_auc(data, seed)
        console.print(f"{name}, {arrangement.name}: {aucs[-1]!r}")
        table.add_row(arrangement.name, str(seed), repr(aucs[-1]), f"{references[seed]:.7f}")
    table.add_row("mean", "", f"{sum(aucs) / len(aucs):.7f}", "", style="bold")
    console.print(table)
    held = case.holds(aucs)
    console.print(f"{name}: {'holds' if held else 'DOES NOT HOLD'} ({case.promise})")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases(1))}; all of them by default"
    )
    parser.add_argument("--data", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help="prepared data")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build" / "compare", metavar="DIR")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs with two ranks (default 3)")
    arguments = parser.parse_args()
    known = cases(arguments.repeat)
    if unknown := [name for name in arguments.cases if name not in known]:
        parser.error(f"no case {', '.join(unknown)}: choose from {', '.join(known)}")
    references: dict[int, float] = {}
    try:
        console.print(f"data set: {load_info(arguments.data).dataset}")
        chosen = arguments.cases or list(known)
        held = [check(name, known[name], arguments.data, arguments.output, references) for name in chosen]
    except (DataError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
