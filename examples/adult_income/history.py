"""The course of a run as JSON lines: one record a training step, and one for each evaluation.

A line is written at once, so that a run that fails, or is watched by another program, has its history up to
that step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


class HistoryWriter:
    """Replaces the file at `path`; close it when the run is over."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def write(self, step: int, **values: float) -> None:
        """`values` are any of loss, staleness (batches in flight), samples_per_second, test_auc."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


@dataclass
class Series:
    """One curve: `values[i]` was measured after step `steps[i]`."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def read_history(path: Path) -> dict[str, Series]:
    """The curves of a history file by name; raises ValueError naming file and line for anything else."""
    curves: dict[str, Series] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = {name: float(value) for name, value in json.loads(line).items()}
            step = int(record.pop("step"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not a history record ({error}): {line!r}") from error
        for name, value in record.items():
            series = curves.setdefault(name, Series())
            series.steps.append(step)
            series.values.append(value)
    return curves
