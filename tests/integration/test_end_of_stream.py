"""Streams end because loaders say so: unequal lengths, empty loaders, late loaders."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("lengths", [[40, 7], [0, 5], [3, 3, 11]], ids=str)
def test_loaders_of_unequal_length(run_job: Any, lengths: list[int]) -> None:
    (report,) = run_job(loaders=lengths).reports
    ids = [s * len(lengths) + i for i, length in enumerate(lengths) for s in range(length)]
    assert sorted(report["batch_ids"]) == sorted(ids)
    assert report["counters"]["batches_trained"] == sum(lengths)


def test_reproducible_order_across_loaders(run_job: Any) -> None:
    (report,) = run_job("--reproducible", loaders=[25, 9]).reports
    assert report["batch_ids"] == sorted(report["batch_ids"])
    assert len(report["batch_ids"]) == 34


def test_no_data_at_all(run_job: Any) -> None:
    (report,) = run_job(loaders=[0]).reports
    assert report["batch_ids"] == []
    assert report["error"] is None


def test_loop_left_early_ends_loader_and_rank(run_job: Any) -> None:
    job = run_job("--stop-after", "5", loaders=[500])
    (report,) = job.reports
    counters = report["counters"]
    assert counters["batches_trained"] == 5
    assert counters["batches_received"] == 5 + counters["batches_released"]
    assert report["threads"] == []
    # The training script decided so: its loader ends quietly, and says why.
    assert "stopped sending after" in job.loader_output(0)
    assert "Traceback" not in job.loader_output(0)
