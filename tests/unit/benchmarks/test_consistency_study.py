"""The study's plan, its results on the disk, and how it judges them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.consistency.plan import MODES, PLAIN, planned
from benchmarks.consistency.plots import draw
from benchmarks.consistency.report import figures_section, write_section
from benchmarks.consistency.results import Result, Store, load_results, save_results
from benchmarks.consistency.verdicts import Verdict, cells, verdicts

PAGE = Path(__file__).parents[3] / "docs" / "consistency.md"
ABOUT = {
    "command": "python -m benchmarks.consistency",
    "started": "2025-01-02T03:04:05+00:00",
    "machine": {"processor": "abacus", "cores": [0, 1]},
}


def study(auc: dict[str, float], rate: dict[str, float], seeds: int = 3) -> list[Result]:
    """Results of modes at 0 and 10 ms; AUCs of the seeds are 0.0002 apart."""
    return [
        Result(
            dataset="adult",
            mode=mode,
            delay_ms=delay,
            seed=seed,
            test_auc=mean + 0.0002 * (seed - (seeds - 1) / 2),
            samples_per_second=rate.get(mode, 100.0),
            measured_staleness=None if mode == PLAIN.name else 1.5,
        )
        for mode, mean in auc.items()
        for delay in ((0.0,) if mode == PLAIN.name else (0.0, 10.0))
        for seed in range(seeds)
    ]


def judged(results: list[Result], mode: str, promise: str) -> Verdict:
    (found,) = (one for one in verdicts(cells(results)) if one.mode == mode and promise in one.promise)
    return found


def test_every_run_once_with_its_own_name() -> None:
    runs = list(planned(["adult", "kuairand"], MODES, [0.0, 2.0, 10.0], 5))
    assert len(runs) == 2 * 5 * (1 + 3 * len(MODES)) == len({run.name for run in runs})
    one = {run.mode.name for run in runs[1 : 1 + len(MODES)]}
    assert one == {mode.name for mode in MODES}  # what is compared ran one after the other


@pytest.mark.parametrize(("auc", "kept"), [(0.8951, True), (0.8941, True), (0.8939, False)])
def test_hybrid_may_be_a_thousandth_below_synchronous(auc: float, kept: bool) -> None:
    results = study({"synchronous": 0.8950, "hybrid 8": auc}, {})
    assert judged(results, "hybrid 8", "of synchronous").kept is kept


@pytest.mark.parametrize(("auc", "kept"), [(0.89481, True), (0.89479, False)])
def test_several_ranks_may_be_below_synchronous_by_its_spread(auc: float, kept: bool) -> None:
    results = study({"synchronous": 0.8950, "hybrid 64": auc}, {})  # the spread is 0.0002
    verdict = judged([replace(one, ranks=2) for one in results], "hybrid 64", "within 0.0002 of synchronous")
    assert verdict.kept is kept


def test_runs_of_several_ranks_have_their_own_names() -> None:
    one, two = ({run.name for run in planned(["adult"], MODES[:2], [0.0], 1, ranks)} for ranks in (1, 2))
    assert len(two) == 2  # plain PyTorch has one process
    assert not one & two


def test_the_delay_where_it_is_worst_counts() -> None:
    results = study({"synchronous": 0.8950, "hybrid 8": 0.8950}, {})
    late = [replace(one, test_auc=0.8) if one.mode == "hybrid 8" and one.delay_ms else one for one in results]
    verdict = judged(late, "hybrid 8", "of synchronous")
    assert verdict.kept is False
    assert "at 10 ms" in verdict.figure


@pytest.mark.parametrize(("rate", "kept"), [(260.0, True), (259.0, False)])
def test_hybrid_must_be_faster_where_the_network_is_slow(rate: float, kept: bool) -> None:
    auc = {"synchronous": 0.8950, "hybrid 8": 0.8950, "hybrid 1": 0.8950}
    results = study(auc, {"hybrid 8": rate})
    assert judged(results, "hybrid 8", "times synchronous").kept is kept
    # One batch in flight is synchronous: it is not asked to be faster.
    assert not [one for one in verdicts(cells(results)) if one.mode == "hybrid 1" and "times" in one.promise]


def test_without_the_slow_network_speed_is_not_judged() -> None:
    results = [one for one in study({"synchronous": 0.9, "hybrid 8": 0.9}, {}) if one.delay_ms == 0]
    assert judged(results, "hybrid 8", "times synchronous").kept is None


@pytest.mark.parametrize(("auc", "kept"), [(0.8949, True), (0.8947, False), (0.9, True)])
def test_the_spread_of_plain_torch_is_allowed(auc: float, kept: bool) -> None:
    results = study({PLAIN.name: 0.8950, "synchronous": auc}, {})  # the spread is 0.0002
    assert judged(results, "synchronous", "plain PyTorch").kept is kept


def test_one_seed_has_no_spread_to_judge_by() -> None:
    results = study({PLAIN.name: 0.8950, "synchronous": 0.1}, {}, seeds=1)
    assert judged(results, "synchronous", "plain PyTorch").kept is None


def test_finished_runs_are_found_again_and_settings_do_not_mix(tmp_path: Path) -> None:
    run, other = list(planned(["adult"], MODES[:1], [2.0], 1))
    result = Result.of(run, {"test_auc": 0.8, "samples_per_second": 10, "more": "is ignored"})
    Store(tmp_path, {"max_rows": None}).add(run, result)
    again = Store(tmp_path, {"max_rows": None})
    assert again.find(run) == result
    assert again.find(other) is None
    with pytest.raises(ValueError, match="choose another --output"):
        Store(tmp_path, {"max_rows": 10})


def test_results_travel_by_file(tmp_path: Path) -> None:
    results = study({PLAIN.name: 0.9, "hybrid 8": 0.9}, {})
    save_results(tmp_path / "results.json", ABOUT, results)
    assert load_results(tmp_path / "results.json") == (ABOUT, results)
    (tmp_path / "results.json").write_text('{"about": {}}')
    with pytest.raises(ValueError, match="has no results of this study"):
        load_results(tmp_path / "results.json")


def test_a_page_gets_the_figures_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    results = study({PLAIN.name: 0.895, "synchronous": 0.895, "hybrid 8": 0.895}, {"hybrid 8": 1234.0})
    for _ in range(2):  # again changes nothing
        write_section(page, figures_section(ABOUT, results))
        text = page.read_text()
        assert "old" not in text
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "| adult | hybrid 8 | 0.89500 ± 0.00020 | 0.89500 ± 0.00020 |" in text
        assert text.count("1,234 (1,234 to 1,234)") == 2
        assert "| adult | hybrid 8 | at 10 ms at least 2.6 times synchronous | 12.34" in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="between which the figures go"):
        write_section(page, "")
    assert page.read_text() == "no marks"


def test_the_document_has_the_tables_that_the_study_writes() -> None:
    between = PAGE.read_text().split("<!-- figures: begin -->")[1].split("<!-- figures: end -->")[0]
    lines = figures_section(ABOUT, study({PLAIN.name: 0.895}, {})).splitlines()
    assert [line for line in between.splitlines() if line.startswith("#")] == [
        line for line in lines if line.startswith("#")
    ]
    # Exact runs were made apart from the others: the page has them in a section of their own.
    assert all(f"| {mode.name} |" in between for mode in MODES if not mode.is_exact)


def test_pictures(tmp_path: Path) -> None:
    results = study({PLAIN.name: 0.895, "synchronous": 0.895, "hybrid 8": 0.895}, {})
    (path,) = draw(results, tmp_path)
    assert path.name == "adult.png"
    assert path.read_bytes().startswith(b"\x89PNG")
