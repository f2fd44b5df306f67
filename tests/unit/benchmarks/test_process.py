"""Real children: they measure, refuse and fail as the runner expects."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.cases import Case, Comparison
from benchmarks.process import ChildError, ChildProcess, Interpreters
from benchmarks.runner import BatchFiles, Settings, measure
from benchmarks.workload import Workload

WORKLOAD = Workload(cardinalities=(10, 2000), batch_size=32, num_batches=2)
CORE = min(os.sched_getaffinity(0))


def case(system: str = "torch-tables", optimizer: str = "adagrad") -> Case:
    return Case(system, "train", optimizer, 4, WORKLOAD, (10, 2000))  # type: ignore[arg-type]


def settings(tfra: str | None = None) -> Settings:
    return Settings(1, 3, 1e-3, (CORE,), Interpreters(sys.executable, tfra))


def test_a_comparison_gives_paired_samples_of_both_sides() -> None:
    comparison = Comparison("test/pair", case("torch-fused"), case("torch-tables"))
    with BatchFiles() as files:
        result = measure(comparison, "tuned", settings(), files)
    for side in (result.ours, result.theirs):
        assert side.unavailable is None
        assert len(side.samples) == 3
        assert min(side.samples) > 0
        assert "torch" in side.versions


def test_the_new_ids_of_a_workload_reach_the_child() -> None:
    growing = Workload(cardinalities=(10, 2000), batch_size=32, num_batches=2, new_share=0.5)
    one = Case("torch-tables", "train", "sgd", 4, growing, (10, 2000))
    with BatchFiles() as files, ChildProcess(sys.executable, one, [CORE], "default") as child:
        child.open(files.folder(growing))
        reply = child.run(5)
    assert reply["ids"] == 5 * 2 * 32
    assert reply["samples"] == 5 * 32
    assert reply["seconds"] > 0


def test_what_a_system_lacks_is_its_reason() -> None:
    comparison = Comparison("test/lack", case(optimizer="rowwise_adagrad"), case("tfra"))
    with BatchFiles() as files:
        result = measure(comparison, "default", settings(tfra=sys.executable), files)
        without = measure(comparison, "default", settings(), files)
    assert result.ours.unavailable == "torch.optim has no sparse rowwise_adagrad"
    assert result.theirs.unavailable is not None
    assert "tensorflow" in result.theirs.unavailable
    assert without.theirs.unavailable == "no interpreter: give --tfra-python"
    assert result.ours.samples == result.theirs.samples == []


def test_one_side_runs_without_the_other() -> None:
    with BatchFiles() as files:
        result = measure(Comparison("test/one", case(), case("tfra")), "default", settings(), files)
    assert len(result.ours.samples) == 3


def test_two_threads_need_two_cores() -> None:
    one = case()
    two = Case(**{**one.__dict__, "threads": 2})
    with BatchFiles() as files:
        result = measure(Comparison("test/cores", two, one), "default", settings(), files)
    assert result.ours.unavailable == "needs 2 cores, --cores has 1"


def test_a_failing_child_shows_its_error(tmp_path: Path) -> None:
    with (
        ChildProcess(sys.executable, case(), [CORE], "default") as child,
        pytest.raises(ChildError, match="holds no batches"),
    ):
        child.open(tmp_path)


def test_a_request_before_open_is_refused() -> None:
    with (
        ChildProcess(sys.executable, case(), [CORE], "default") as child,
        pytest.raises(ChildError, match="open must come next"),
    ):
        child.run(1)
