"""Slots with a consistency of their own, in a cluster."""

from __future__ import annotations

from typing import Any

PATIENT = {"PERSIA_DEADLINE_SEC": "100"}


def config(*synchronous: str) -> dict[str, Any]:
    mode = {"consistency": "synchronous"}
    return {"slots_config": {n: {"dim": 8, **(mode if n in synchronous else {})} for n in ("user", "items")}}


def test_all_slots_synchronous_are_a_synchronous_job(run_job: Any) -> None:
    servers = {"loaders": [20], "parameter_servers": 2, "embedding_workers": 2, "env": PATIENT}
    (sequential,) = run_job("--reproducible", "--consistency", "synchronous", **servers).reports
    options = ("--reproducible", "--staleness", "6", "--pace", "0.02")
    (report,) = run_job(*options, embedding_config=config("user", "items"), **servers).reports
    assert report["staleness"]["by_mode"] == {"synchronous": {"max": 0, "mean": 0}}
    assert report["losses"] == sequential["losses"]
    assert report["digest"] == sequential["digest"]


def test_ranks_meet_after_each_step(run_job: Any) -> None:
    servers = {"nproc": 2, "parameter_servers": 2, "embedding_config": config("user"), "env": PATIENT}
    reports = run_job("--staleness", "4", "--pace", "0.02", loaders=[18, 9], **servers).reports
    assert sum(report["counters"]["batches_trained"] for report in reports) == 27
    # The updates of one step come one after the other: only the other rank's may be between.
    assert all(report["staleness"]["by_mode"]["synchronous"]["max"] <= 1 for report in reports)
    assert max(report["staleness"]["max"] for report in reports) > 1  # of the other slot
    assert reports[0]["digest"] == reports[1]["digest"]


def test_each_slot_keeps_its_own_bound(run_job: Any) -> None:
    modes = {"user": {"consistency": "asynchronous"}, "items": {"embedding_staleness": 2}}
    slots = {"slots_config": {name: {"dim": 8, **mode} for name, mode in modes.items()}}
    servers = {"loaders": [20], "parameter_servers": 2, "embedding_workers": 2, "env": PATIENT}
    options = ("--staleness", "4", "--pace", "0.05", "--ahead", "6")
    (report,) = run_job(*options, embedding_config=slots, **servers).reports
    assert report["counters"]["batches_trained"] == 20
    measured = report["staleness"]["by_mode"]
    assert set(measured) == {"asynchronous", "hybrid 2"}
    # 1 in order; the update of the batch after it may overtake its own, and that of no other.
    assert measured["hybrid 2"]["max"] <= 2 < measured["asynchronous"]["max"]
