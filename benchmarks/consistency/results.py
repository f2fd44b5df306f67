"""Results on the disk: one file a run, written when it ends, so that a study goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.consistency.plan import Run

__all__ = ["Result", "Store", "load_results", "save_results"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run gave."""

    dataset: str
    mode: str
    delay_ms: float
    seed: int
    test_auc: float
    samples_per_second: float
    measured_staleness: float | None = None  # mean of the updates between lookup and update; None for plain
    ranks: int = 1

    @staticmethod
    def of(run: Run, summary: Mapping[str, Any]) -> Result:
        """Of the summary that a script has written."""
        staleness = summary.get("measured_staleness")
        return Result(
            dataset=run.dataset,
            mode=run.mode.name,
            delay_ms=run.delay_ms,
            seed=run.seed,
            test_auc=float(summary["test_auc"]),
            samples_per_second=float(summary["samples_per_second"]),
            measured_staleness=None if staleness is None else float(staleness),
            ranks=run.ranks,
        )


class Store:
    """Finished runs of a study in a folder, which belong to one set of `settings`.

    Raises:
        ValueError: the folder has runs of other settings, which must not be mixed with these.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder / "runs"
        self._folder.mkdir(parents=True, exist_ok=True)
        known = folder / "settings.json"
        if known.is_file():
            before = json.loads(known.read_text(encoding="utf-8"))
            if before != dict(settings):
                raise ValueError(
                    f"{folder} has runs with {before}, not with {dict(settings)}: choose another --output"
                )
        else:
            _write(known, dict(settings))

    def find(self, run: Run) -> Result | None:
        """The run's result, when it has finished before."""
        path = self._path(run)
        return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def add(self, run: Run, result: Result) -> None:
        _write(self._path(run), asdict(result))

    def _path(self, run: Run) -> Path:
        return self._folder / f"{run.name}.json"


def save_results(path: Path, about: Mapping[str, Any], results: Iterable[Result]) -> None:
    """One file with all figures and what they belong to: what the documents are made from."""
    _write(path, {"about": dict(about), "results": [asdict(result) for result in results]})


def load_results(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """What `save_results` has written. Raises ValueError naming the file for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content["about"]), [Result(**result) for result in content["results"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no results of this study ({error!r})") from error


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Complete, or not at all."""
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(aside, path)
