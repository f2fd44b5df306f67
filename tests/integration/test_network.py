"""A job on hosts of its own, whose network is cut, loses packets, and loses hosts without an RST."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.chaos.job import Settings, differences, undisturbed
from benchmarks.network.hosts import why_no_network
from benchmarks.network.job import Shape, started

# Longer than a broken connection is waited for, by the channel of RPC (3 to 5 s) and by the client of NATS.
CUT_S = 6.0


@pytest.fixture(autouse=True)
def network() -> None:
    if why := why_no_network():
        pytest.skip(why)


@pytest.mark.timeout(600)
def test_each_batch_is_trained_once_with_an_equal_result_whatever_the_network_does(tmp_path: Path) -> None:
    # So many that training lasts, at its pace, while this process waits for the processor.
    settings = Settings(batches=300)
    shape = Shape(batches=settings.batches, workers=2, standby_deadline_s=3)
    with started(tmp_path / "met", shape) as job:
        job.await_log("server0", "has every row and change")
        job.await_step(10)
        job.network.cut("nats")
        job.network.cut("worker0", "server0")
        time.sleep(CUT_S)
        job.network.mend()
        job.await_step(len(job.steps) + 10)
        job.network.lose(0.02)
        job.await_step(len(job.steps) + 10)
        job.network.cut("worker1")
        # More than there may be of batches that it had no part in.
        job.await_step(len(job.steps) + 60)
        job.network.cut("server0")
        job.await_log("standby0", "its standby takes over")
        outcome = job.finish()
    assert outcome.exit_code == 0, outcome.output
    assert outcome.trained == list(range(settings.batches))
    assert outcome.wasted == 0
    assert differences(undisturbed(tmp_path / "undisturbed", settings), outcome) == []


@pytest.mark.timeout(900)
def test_ranks_that_do_not_reach_each_other_end_and_continue_after_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    shape = Shape(batches=1000, ranks=2, every_steps=10, deadline_s=30)
    with started(tmp_path, shape) as job:
        job.await_step(25)
        job.network.cut("rank0", "rank1")
        job.await_failure_of_ranks()
        job.network.mend()
        job.start_again()
        outcome = job.finish()
    assert outcome.exit_code == 0, outcome.output
    assert "continues after step" in outcome.output
    assert sorted(outcome.trained) == list(range(shape.batches)), "each batch exactly once"
