"""Two ranks under gloo: every batch trained, equal dense models and optimizers, both ranks end."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("lengths", [[31, 12], [5, 40], [1]], ids=str)
def test_ranks_with_unequal_numbers_of_batches_end_together(run_job: Any, lengths: list[int]) -> None:
    reports = run_job(loaders=lengths, nproc=2, parameter_servers=2, embedding_workers=2).reports
    ids = [s * len(lengths) + i for i, length in enumerate(lengths) for s in range(length)]
    for rank, report in enumerate(reports):
        assert report["error"] is None
        assert sorted(report["batch_ids"]) == sorted(i for i in ids if i % 2 == rank)
        assert report["counters"]["batches_trained"] == report["counters"]["batches_received"]
        assert report["threads"] == []
    assert reports[0]["digest"] == reports[1]["digest"]
    assert reports[0]["optimizer_digest"] == reports[1]["optimizer_digest"]


def test_bounded_staleness_per_rank(run_job: Any) -> None:
    reports = run_job("--staleness", "1", loaders=[30, 30], nproc=2).reports
    assert [report["counters"]["batches_trained"] for report in reports] == [30, 30]
    # The own bound is 1; between a lookup and its update the other rank may update.
    assert all(report["staleness"]["max"] <= 2 for report in reports)


@pytest.mark.parametrize("lengths", [[20, 20], [25, 9]], ids=str)
def test_synchronous_ranks_see_every_update_of_the_step_before(run_job: Any, lengths: list[int]) -> None:
    reports = run_job("--consistency", "synchronous", loaders=lengths, nproc=2).reports
    assert sum(report["counters"]["batches_trained"] for report in reports) == sum(lengths)
    # The updates of one step come one after the other: only the other rank's may be between.
    assert all(report["staleness"]["max"] <= 1 for report in reports)
    assert all(report["max_in_flight"] <= 1 for report in reports)
    assert reports[0]["digest"] == reports[1]["digest"]
