"""What the table says and what the JSON keeps."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

from benchmarks import __main__ as main
from benchmarks.cases import Comparison, comparisons, select
from benchmarks.limits import Limit, memory_limits, parse_rpc_bench, rpc_limits
from benchmarks.plots import draw_curves
from benchmarks.report import limit_table, missed, read_json, reasons, result_table, verdict, write_json
from benchmarks.runner import Result, Side

RPC_OUTPUT = """\
    bytes  placement    bare us     rpc us  time ratio  speed ratio
       64  free            10.0       15.0        1.50         0.67
     4096  free            20.0       25.0        1.25         0.80
  1048576  two cores      100.0      200.0        2.00         0.50
"""


def row(name: str = "train/adagrad/fbgemm/16") -> Comparison:
    return dataclasses.replace(select(comparisons(), [name])[0], floor=1.5)


def result(ours: list[float], theirs: list[float], comparison: Comparison | None = None) -> Result:
    comparison = comparison or row()
    return Result(
        comparison,
        "tuned",
        Side(comparison.ours.system, samples=ours),
        Side(comparison.theirs.system, samples=theirs),
    )


def printed(table: Table) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_verdicts() -> None:
    assert verdict(result([15e6, 16e6], [10e6, 10e6])) == "pass"
    assert verdict(result([14e6, 14.5e6], [10e6, 10e6])) == "miss"
    assert verdict(result([], [10e6])) == "not run"
    no_floor = dataclasses.replace(row(), floor=None)
    assert verdict(result([1e6], [10e6], no_floor)) == "no floor"


def test_only_misses_fail_the_run() -> None:
    miss = result([1e6], [1e6])
    assert missed([result([2e6], [1e6]), miss, result([], [])]) == [miss]


def test_the_table_has_figures_ratio_and_verdict() -> None:
    text = printed(result_table([result([15e6, 18e6, 16e6], [10e6, 10e6, 10e6])]))
    for part in (
        "train/adagrad/fbgemm/16",
        "tuned",
        "16 M ±9%",
        "10 M ±0%",
        "1.60",
        "1.50-1.80",
        "1.5",
        "pass",
    ):
        assert part in text


def test_samples_a_second_are_in_thousands() -> None:
    assert "54.3 k ±0%" in printed(result_table([result([54_321.0], [54_321.0], row("mlp/fbgemm/16"))]))


def test_reasons_are_listed_once() -> None:
    absent = result([], [1e6])
    absent.ours.unavailable = "not installed"
    assert reasons([absent, absent]) == {"persia": {"not installed"}}


def test_json_keeps_samples_versions_and_verdicts(tmp_path: Path) -> None:
    measured = result([15e6, 16e6, 17e6], [10e6, 10e6, 10e6])
    measured.theirs.versions = {"fbgemm-gpu-cpu": "1.8.0"}
    path = tmp_path / "new" / "results.json"
    write_json(path, {"command": "python -m benchmarks"}, [measured], [Limit("rss", 33.0, 32.0, True)])
    document = json.loads(path.read_text())
    assert document["command"] == "python -m benchmarks"
    (written,) = document["results"]
    assert written["ours"]["samples"] == [15e6, 16e6, 17e6]
    assert written["theirs"]["versions"] == {"fbgemm-gpu-cpu": "1.8.0"}
    assert written["ratio"] == {"median": 1.6, "least": 1.5, "most": 1.7}
    assert written["verdict"] == "pass"
    assert written["comparison"]["ours"]["workload"]["batch_size"] == 4096
    (limit,) = document["limits"]
    assert limit["is_kept"] is False


def test_memory_is_judged_by_what_a_row_needs() -> None:
    measured = result([1e6], [1e6])
    rows = 2_000_000
    needed = 16 * 4 * 2  # dim 16, embedding and Adagrad's accumulator
    measured.ours.counters = {
        "filled_rows": rows,
        "rss_growth_bytes": rows * (needed + 24),
        "reported_bytes": rows * (needed + 24) * 0.9,
    }
    overhead, report = memory_limits([measured])
    assert overhead.figure == pytest.approx(24.0)
    assert overhead.is_kept
    assert report.figure == pytest.approx(0.1)
    assert not report.is_kept
    assert "miss" in printed(limit_table([overhead, report]))


def test_small_tables_are_not_judged_for_memory() -> None:
    measured = result([1e6], [1e6])
    measured.ours.counters = {"filled_rows": 1000, "rss_growth_bytes": 50_000_000}
    assert memory_limits([measured]) == []


def test_rpc_figures_are_parsed_and_judged() -> None:
    lines = parse_rpc_bench(RPC_OUTPUT)
    assert lines == [
        (64, "free", 10.0, 15.0),
        (4096, "free", 20.0, 25.0),
        (1048576, "two cores", 100.0, 200.0),
    ]
    small, large = rpc_limits(lines)
    assert (small.figure, small.is_kept) == (1.5, True)
    assert (large.figure, large.is_kept) == (0.5, False)


def test_other_output_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to see"):
        parse_rpc_bench("nothing to see")


def test_curves_are_drawn_for_what_was_measured(tmp_path: Path) -> None:
    results = [
        result([2e6, 2.1e6], [1e6, 1.1e6], row(name))
        for name in (
            "train/adagrad/fbgemm/16",
            "train/adagrad/fbgemm/64",
            "threads/1-to-2/16",
            "rows/1M-to/10M",
        )
    ]
    names = {path.name for path in draw_curves(results, tmp_path)}
    assert names == {"dim_adagrad.png", "threads.png", "rows.png"}
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_no_curve_without_figures(tmp_path: Path) -> None:
    assert draw_curves([result([], [])], tmp_path) == []


def test_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    results = [result([2e6, 3e6], [1e6, 2e6]), result([], [1e6], row("eviction/30%-new/16"))]
    results[1].ours.unavailable = "not here"
    limits = [Limit("RPC", 0.9, 0.6, at_most=False)]
    write_json(tmp_path / "results.json", {"command": "x"}, results, limits)
    assert read_json(tmp_path / "results.json") == ({"command": "x"}, results, limits)


def test_portions_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, ours: float, malloc: str = "tuned") -> None:
        def canned(comparison: Comparison, malloc: str, *_: object) -> Result:
            return dataclasses.replace(result([ours], [1e6], comparison), malloc=malloc)

        monkeypatch.setattr(main, "measure", canned)
        arguments = ["--only", name, "--malloc", malloc, "--add", "--output", str(tmp_path)]
        done = CliRunner().invoke(main.main, arguments)
        assert done.exit_code in (0, 1), done.output

    run("lookup/fbgemm/16", 1e6)
    run("lookup/fbgemm/16", 4e6, "default")
    run("lookup/tfra/16", 2e6)
    run("lookup/fbgemm/16", 3e6)
    about, results, _ = read_json(tmp_path / "results.json")
    assert len(about["earlier_runs"]) == 3
    assert [(r.comparison.name, r.malloc, r.ours.samples) for r in results] == [
        ("lookup/fbgemm/16", "default", [4e6]),
        ("lookup/tfra/16", "tuned", [2e6]),
        ("lookup/fbgemm/16", "tuned", [3e6]),
    ]


def test_a_portion_that_is_stopped_loses_no_earlier_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(names: list[str], ours: dict[str, float]) -> int:
        def canned(comparison: Comparison, malloc: str, *_: object) -> Result:
            if comparison.name not in ours:
                raise KeyboardInterrupt
            return dataclasses.replace(result([ours[comparison.name]], [1e6], comparison), malloc=malloc)

        monkeypatch.setattr(main, "measure", canned)
        only = [word for name in names for word in ("--only", name)]
        arguments = [*only, "--malloc", "tuned", "--add", "--output", str(tmp_path)]
        return CliRunner().invoke(main.main, arguments).exit_code

    names = [c.name for c in comparisons() if c.name in ("lookup/fbgemm/16", "lookup/tfra/16")]
    assert run(names, dict.fromkeys(names, 1e6)) in (0, 1)
    run(names, {names[0]: 2e6})
    _, results, _ = read_json(tmp_path / "results.json")
    assert {r.comparison.name: r.ours.samples for r in results} == {names[0]: [2e6], names[1]: [1e6]}


def test_portions_are_not_added_to_something_else(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    done = CliRunner().invoke(main.main, ["--only", "lookup/*", "--add", "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert "--add" in done.output
