"""The table has the rows it promises, and cases cross the process boundary unchanged."""

from __future__ import annotations

import json

import pytest

from benchmarks.cases import Case, comparisons, quick, select
from benchmarks.systems import SYSTEMS
from benchmarks.workload import CRITEO_KAGGLE_CARDINALITIES

FLOORS = {
    "train/adagrad/fbgemm/16": 2.5,
    "train/adagrad/fbgemm/64": 1.7,
    "train/adagrad/fbgemm/128": 1.6,
    "train/rowwise_adagrad/fbgemm/16": 1.1,
    "train/rowwise_adagrad/fbgemm/64": 1.0,
    "train/rowwise_adagrad/fbgemm/128": 1.0,
    "train/adam/torch-fused/64": 4.0,
    "train/adagrad/tfra/16": 4.0,
    "train/adam/tfra/128": 3.0,
    "threads/1-to-2/16": 1.7,
    "multi-hot/adagrad/fbgemm/64": 1.7,
    "lookup/fbgemm/16": 0.6,
    "lookup/tfra/16": 4.0,
    "mlp/fbgemm/16": 1.1,
    "eviction/30%-new/16": 0.7,
    "cluster/worker-and-2-servers/16": 0.5,
    "cluster/2-in-flight/16": 0.5,
}


def test_names_are_unique_and_systems_known() -> None:
    rows = comparisons()
    assert len({row.name for row in rows}) == len(rows)
    assert {case.system for row in rows for case in (row.ours, row.theirs)} == set(SYSTEMS)


def test_floors() -> None:
    floors = {row.name: row.floor for row in comparisons()}
    assert {name: floors[name] for name in FLOORS} == FLOORS


def test_both_sides_do_the_same_work() -> None:
    for row in comparisons():
        assert (row.ours.work, row.ours.optimizer, row.ours.dim) == (
            row.theirs.work,
            row.theirs.optimizer,
            row.theirs.dim,
        )
        if row.name != "eviction/30%-new-to-none/16":
            assert row.ours.workload == row.theirs.workload


def test_large_dims_have_capped_tables() -> None:
    rows = {row.name: sum(row.ours.table_rows) for row in comparisons()}
    assert rows["train/adagrad/fbgemm/16"] == sum(CRITEO_KAGGLE_CARDINALITIES)
    assert rows["train/adagrad/fbgemm/64"] == pytest.approx(10.6e6, rel=0.01)
    assert rows["train/adagrad/fbgemm/128"] == pytest.approx(5.6e6, rel=0.01)


def test_the_size_curve_has_one_traffic() -> None:
    curve = [row for row in comparisons() if row.name.startswith("rows/")]
    assert len({row.ours.workload for row in curve}) == 1
    assert sum(curve[-1].ours.table_rows) == pytest.approx(5e7, rel=1e-5)
    assert sum(curve[0].theirs.table_rows) == pytest.approx(1e6, rel=1e-4)


def test_a_case_survives_json() -> None:
    for row in comparisons():
        assert Case.from_json(json.loads(json.dumps(row.ours.to_json()))) == row.ours


def test_select_matches_globs_and_refuses_those_that_match_nothing() -> None:
    rows = comparisons()
    assert select(rows, []) == rows
    assert [row.name for row in select(rows, ["lookup/*/16"])] == ["lookup/fbgemm/16", "lookup/tfra/16"]
    with pytest.raises(ValueError, match="lookups"):
        select(rows, ["lookup/*", "lookups/*"])


def test_quick_runs_every_kind_of_peer_small_and_unjudged() -> None:
    rows = quick(comparisons())
    assert {row.theirs.system for row in rows} == {
        "fbgemm",
        "torch-tables",
        "torch-fused",
        "torchrec",
        "tfra",
        "persia",
    }
    for row in rows:
        assert row.floor is None
        assert row.ours.workload.num_batches == 2
        assert sum(row.ours.table_rows) < sum(CRITEO_KAGGLE_CARDINALITIES) / 50
