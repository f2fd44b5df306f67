"""The table a person reads, and the JSON that keeps every sample."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from benchmarks.cases import Case, Comparison
from benchmarks.limits import Limit
from benchmarks.runner import Result, Side
from benchmarks.stats import Summary, paired_ratio, summarize

__all__ = [
    "Verdict",
    "limit_table",
    "missed",
    "read_json",
    "reasons",
    "result_line",
    "result_table",
    "verdict",
    "write_json",
]

Verdict = Literal["pass", "miss", "no floor", "not run"]

_COLOURS = {"pass": "green", "miss": "bold red", "no floor": "dim", "not run": "yellow"}


def verdict(result: Result) -> Verdict:
    """Whether the median ratio reaches the floor."""
    if not (result.ours.samples and result.theirs.samples):
        return "not run"
    if result.comparison.floor is None:
        return "no floor"
    ratio = paired_ratio(result.ours.samples, result.theirs.samples)
    return "pass" if ratio.median >= result.comparison.floor else "miss"


def missed(results: Iterable[Result]) -> list[Result]:
    """The results below their floor."""
    return [result for result in results if verdict(result) == "miss"]


def result_table(results: Sequence[Result]) -> Table:
    """One line per comparison and malloc setting; figures are medians, ± half the range."""
    table = Table(title="persia beside its peers, IDs/s (mlp: samples/s)", title_justify="left")
    for heading in ("comparison", "malloc"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ours", "theirs", "ratio", "range", "floor"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for result in results:
        table.add_row(*_cells(result))
    return table


def result_line(result: Result) -> str:
    """A row of the table as one line of a log."""
    name, malloc, ours, theirs, ratio, spread, _, judged = _cells(result)
    ratio = f"ratio {ratio} ({spread}), " if ratio else ""
    return f"{name}, {malloc} malloc: ours {ours}, theirs {theirs}, {ratio}{judged}"


def limit_table(limits: Sequence[Limit]) -> Table:
    """One line per figure that has a bound of its own."""
    table = Table(title="limits", title_justify="left")
    table.add_column("what", overflow="fold")
    for heading in ("figure", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for limit in limits:
        judged = "pass" if limit.is_kept else "miss"
        bound = f"{'<=' if limit.at_most else '>='} {limit.bound:g}"
        table.add_row(limit.name, f"{limit.figure:.3g}", bound, f"[{_COLOURS[judged]}]{judged}[/]")
    return table


def reasons(results: Iterable[Result]) -> dict[str, set[str]]:
    """System -> why it has no figure somewhere."""
    found: dict[str, set[str]] = {}
    for result in results:
        for side in (result.ours, result.theirs):
            if side.unavailable:
                found.setdefault(side.system, set()).add(side.unavailable)
    return found


def write_json(
    path: Path, about: dict[str, Any], results: Sequence[Result], limits: Sequence[Limit] = ()
) -> None:
    """Writes `about` (machine, command, settings), all results with all samples, and limits to `path`."""
    document = {
        **about,
        "results": [_fields(result) for result in results],
        "limits": [{**dataclasses.asdict(limit), "is_kept": limit.is_kept} for limit in limits],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def read_json(path: Path) -> tuple[dict[str, Any], list[Result], list[Limit]]:
    """What `write_json` wrote: `about`, results, limits.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError, KeyError, TypeError: it is none of `write_json`, or of another version.
    """
    document = json.loads(path.read_text())
    results = [_result(fields) for fields in document.pop("results")]
    limits = [
        Limit(**{field.name: fields[field.name] for field in dataclasses.fields(Limit)})
        for fields in document.pop("limits")
    ]
    return document, results, limits


def _result(fields: dict[str, Any]) -> Result:
    comparison = dict(fields["comparison"])
    for side in ("ours", "theirs"):
        comparison[side] = Case.from_json(comparison[side])
    return Result(
        Comparison(**comparison), fields["malloc"], Side(**fields["ours"]), Side(**fields["theirs"])
    )


def _cells(result: Result) -> list[str]:
    floor = result.comparison.floor
    judged = verdict(result)
    ratio = spread = ""
    if result.ours.samples and result.theirs.samples:
        paired = paired_ratio(result.ours.samples, result.theirs.samples)
        ratio, spread = f"{paired.median:.2f}", f"{paired.least:.2f}-{paired.most:.2f}"
    return [
        result.comparison.name,
        result.malloc,
        _figure(result.ours.samples),
        _figure(result.theirs.samples),
        ratio,
        spread,
        "" if floor is None else f"{floor:g}",
        f"[{_COLOURS[judged]}]{judged}[/]",
    ]


def _figure(samples: Sequence[float]) -> str:
    """Median and spread, as in "12.3 M ±4%"."""
    if not samples:
        return "-"
    summary = summarize(samples)
    scale, letter = (1e6, "M") if summary.median >= 1e6 else (1e3, "k")
    return f"{summary.median / scale:.3g} {letter} ±{summary.spread:.0%}"


def _fields(result: Result) -> dict[str, Any]:
    return {
        **dataclasses.asdict(result),
        "verdict": verdict(result),
        "summary": {
            "ours": _summary(result.ours.samples),
            "theirs": _summary(result.theirs.samples),
        },
        "ratio": (
            dataclasses.asdict(paired_ratio(result.ours.samples, result.theirs.samples))
            if result.ours.samples and result.theirs.samples
            else None
        ),
    }


def _summary(samples: Sequence[float]) -> dict[str, float] | None:
    summary: Summary | None = summarize(samples) if samples else None
    return dataclasses.asdict(summary) if summary else None
