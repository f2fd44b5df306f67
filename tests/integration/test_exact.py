"""consistency="exact" in a cluster: the results of synchronous training with batches in flight."""

from __future__ import annotations

from typing import Any

PATIENT = {"PERSIA_DEADLINE_SEC": "100"}
BATCHES = 24
EXACT = ("--consistency", "exact")


def trained(run_job: Any, *options: str, **servers: Any) -> dict[str, Any]:
    servers = {"loaders": [BATCHES], "parameter_servers": 2, "env": PATIENT, **servers}
    (report,) = run_job("--reproducible", *options, **servers).reports
    assert report["counters"]["batches_trained"] == BATCHES
    return dict(report)


def test_results_equal_synchronous_ones_to_the_last_bit(run_job: Any) -> None:
    expected = trained(run_job, "--consistency", "synchronous")
    # Batches wait before the first step, so that lookups miss the updates of all of them.
    for options, workers in ((["4", "--ahead", "4"], 1), (["16"], 2)):
        report = trained(run_job, *EXACT, "--staleness", *options, embedding_workers=workers)
        for result in ("batch_ids", "losses", "digest"):
            assert report[result] == expected[result], (options, result)
        assert set(report["staleness"]["by_mode"]) == {"exact"}
    hybrid = trained(run_job, "--staleness", "4", "--ahead", "4")
    assert hybrid["losses"] != expected["losses"], "the servers' rows are stale"
