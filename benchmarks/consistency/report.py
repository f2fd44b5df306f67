"""The figures as tables: on a terminal, and in docs/consistency.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.consistency.plan import MODES, PLAIN
from benchmarks.consistency.results import Result
from benchmarks.consistency.verdicts import Cell, Key, Verdict, cells, verdicts

__all__ = ["auc_table", "figures_section", "speed_table", "verdict_table", "write_section"]

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"
_ORDER = (PLAIN, *MODES)
_JUDGED = {True: "pass", False: "miss", None: "not judged"}

Rows = list[list[str]]


def auc_table(results: Sequence[Result]) -> Table:
    """Mean test AUC ± standard deviation over seeds."""
    return _rich("test AUC: mean ± standard deviation over seeds", *_grid(results, _auc))


def speed_table(results: Sequence[Result]) -> Table:
    """Median samples per second."""
    return _rich("samples per second: median over seeds (least to most)", *_grid(results, _rate))


def verdict_table(judged: Sequence[Verdict]) -> Table:
    table = _rich("floors", *_verdict_rows(judged))
    table.columns[-1].style = "bold"
    return table


def figures_section(about: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The figures that stand between the marks of docs/consistency.md."""
    machine = about["machine"]
    where = f"{machine['processor']}, {len(machine['cores'])} cores"
    parts = [
        f"`{about['command']}` on {about['started'][:10]}, {where}.",
        "### Test AUC\n\nMean ± standard deviation over seeds.\n\n" + _markdown(*_grid(results, _auc)),
        "### Samples per second\n\nMedian over seeds (least to most).\n\n"
        + _markdown(*_grid(results, _rate)),
        "### Measured staleness\n\nMean, in updates.\n\n" + _markdown(*_staleness_grid(results)),
        "### Floors\n\n" + _markdown(*_verdict_rows(verdicts(cells(results)))),
    ]
    return "\n\n".join(parts)


def write_section(page: Path, section: str) -> None:
    """Replaces the figures of a page. Raises ValueError for one without the marks."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {_BEGIN} and {_END}, between which the figures go")
    page.write_text(f"{before}{begin}\n\n{section}\n\n{end}{after}", encoding="utf-8")


def _grid(results: Sequence[Result], show: Any) -> tuple[list[str], Rows]:
    """A row for each data set and mode, a column for each delay."""
    table = cells(results)
    delays = sorted({key[2] for key in table})
    header = ["data", "mode", *(f"{delay:g} ms" for delay in delays)]
    rows = [
        [dataset, mode.name, *(_cell(table.get((dataset, mode.name, delay)), show) for delay in delays)]
        for dataset in dict.fromkeys(key[0] for key in table)
        for mode in _ORDER
        if any((dataset, mode.name, delay) in table for delay in delays)
    ]
    return header, rows


def _cell(cell: Cell | None, show: Any) -> str:
    return "" if cell is None else str(show(cell))


def _auc(cell: Cell) -> str:
    spread = cell.auc_spread
    return f"{cell.auc:.5f}" + ("" if spread is None else f" ± {spread:.5f}")


def _rate(cell: Cell) -> str:
    return f"{cell.rate:,.0f} ({min(cell.rates):,.0f} to {max(cell.rates):,.0f})"


def _staleness_grid(results: Sequence[Result]) -> tuple[list[str], Rows]:
    values: dict[Key, list[float]] = {}
    for result in results:
        if result.measured_staleness is not None:
            key = (result.dataset, result.mode, result.delay_ms)
            values.setdefault(key, []).append(result.measured_staleness)
    delays = sorted({key[2] for key in values})
    rows = [
        [
            dataset,
            mode.name,
            *(_mean(values.get((dataset, mode.name, delay), [])) for delay in delays),
        ]
        for dataset in dict.fromkeys(key[0] for key in values)
        for mode in MODES
    ]
    return ["data", "mode", *(f"{delay:g} ms" for delay in delays)], rows


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1f}" if values else ""


def _verdict_rows(judged: Sequence[Verdict]) -> tuple[list[str], Rows]:
    rows = [[one.dataset, one.mode, one.promise, one.figure, _JUDGED[one.kept]] for one in judged]
    return ["data", "mode", "floor", "figure", "verdict"], rows


def _rich(title: str, header: Sequence[str], rows: Rows) -> Table:
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(header: Sequence[str], rows: Rows) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
