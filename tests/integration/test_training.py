"""One rank, one loader, real servers: everything sent is trained, and reproducible mode is bit-exact."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import jobs, run_to_end

NUM_BATCHES = 254


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a reproducible job of 40 batches: what others are compared with."""
    with jobs(tmp_path_factory.mktemp("exact")) as start:
        report: dict[str, Any] = run_to_end(start, "--reproducible", loaders=[40]).reports[0]
    return report


def test_every_batch_is_trained_once(run_job: Any) -> None:
    (report,) = run_job(loaders=[NUM_BATCHES], parameter_servers=2).reports
    counters = report["counters"]
    assert sorted(report["batch_ids"]) == list(range(NUM_BATCHES))
    assert counters["batches_received"] == counters["batches_trained"] == NUM_BATCHES
    assert counters["rows_missing"] == counters["nonfinite_slots"] == counters["skipped_slots"] == 0
    assert report["staleness"]["in_flight"] == 0
    assert sum(report["sizes"]) == 50 + 200
    assert min(report["sizes"]) > 0
    assert report["threads"] == []
    first, last = report["losses"][:20], report["losses"][-20:]
    assert sum(last) < 0.7 * sum(first)


@pytest.mark.parametrize("bound", [1, 3])
def test_staleness_stays_within_its_bound(run_job: Any, bound: int) -> None:
    (report,) = run_job("--staleness", str(bound), loaders=[60]).reports
    assert report["counters"]["batches_trained"] == 60
    assert 1 <= report["max_in_flight"] <= bound
    if bound == 1:
        assert report["staleness"]["max"] == 0


def test_skipped_batches_are_counted_and_stop_nothing(run_job: Any) -> None:
    (report,) = run_job("--staleness", "1", "--skip-every", "3", loaders=[30]).reports
    assert (report["counters"]["batches_trained"], report["counters"]["batches_released"]) == (20, 10)
    assert report["counters"]["batches_received"] == 30


def test_bug_22_reproducible_mode_is_bit_exact_for_any_number_of_servers(
    run_job: Any, exact: dict[str, Any]
) -> None:
    runs = [
        run_job("--reproducible", loaders=[40], parameter_servers=servers, embedding_workers=workers).reports[
            0
        ]
        for servers, workers in ((1, 1), (3, 1), (1, 2))
    ]
    for other in runs:
        assert other["losses"] == exact["losses"]
        assert other["digest"] == exact["digest"]
    assert exact["batch_ids"] == list(range(40))
    assert exact["staleness"]["max"] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_on_the_wire_train_nearly_the_same(
    run_job: Any, exact: dict[str, Any], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setenv("PERSIA_WIRE_DTYPE", dtype)
    (report,) = run_job("--reproducible", loaders=[40]).reports
    assert report["losses"] != exact["losses"]
    assert report["losses"] == pytest.approx(exact["losses"], rel=0.01, abs=1e-3)
    assert report["counters"]["nonfinite_slots"] == 0
