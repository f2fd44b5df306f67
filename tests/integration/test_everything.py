"""One job with every feature switched on in some slot: 2 ranks, 2 loaders, 2 workers, 3 servers, a broker.

Its numbers are read at the real /metrics pages, and have to add up.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persia.checkpoint.checkpoints import Source
from persia.messaging.subjects import DATA_LOADER, EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER
from persia.rows.reader import RowGroups, RowReader
from persia.testing import LocalCluster

from .conftest import JOBS
from .watching import Pages, wait_until

NUM_BATCHES = 120  # of each loader
CAPACITY = 1200  # of each server: less than the slot `crowd` alone has IDs
VISITS_CAPACITY = 40  # rows of the slot `visits` on each server, of 10,000 IDs
PACE_S = 0.03


class Everything:
    """What a finished job has left."""

    def __init__(self, sent: Pages, ended: Pages, reports: list[dict[str, Any]], checkpoint: Path) -> None:
        self.sent, self.ended, self.reports, self.checkpoint = sent, ended, reports, checkpoint

    def counted(self, name: str) -> int:
        return sum(report["counters"][name] for report in self.reports)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everything]:
    folder = tmp_path_factory.mktemp("everything")
    env = {"OMP_NUM_THREADS": "1", "PERSIA_DEADLINE_SEC": "240", "PERSIA_WIRE_DTYPE": "bfloat16"}
    server = {"capacity": CAPACITY, "num_hashmap_internal_shards": 2}
    with LocalCluster(
        embedding_config=JOBS / "everything_slots.yml",
        global_config={"embedding_parameter_server_config": server},
        parameter_servers=3,
        embedding_workers=2,
        env=env,
    ) as cluster:
        options = ("--output", str(folder / "report"), "--checkpoint", str(folder / "checkpoint"))
        options += ("--leave", str(folder / "leave ranks"), "--pace", str(PACE_S))
        ranks = cluster.start_nn_worker(JOBS / "everything_train.py", *options, nproc=2)
        options = ("--batches", str(NUM_BATCHES), "--leave", str(folder / "leave loaders"))
        loaders = [
            cluster.start_loader(JOBS / "everything_loader.py", *options, replica_index=i, replica_size=2)
            for i in range(2)
        ]

        def printed(text: str, *processes: Any) -> bool:
            for process in (ranks, *loaders):
                assert process.exit_code in (None, 0), process.output
            return sum(process.output.count(text) for process in processes) == 2

        wait_until(lambda: printed(f"sent {NUM_BATCHES} batches", *loaders), "loaders have sent all")
        sent = Pages(cluster, 9)
        (folder / "leave loaders").touch()
        wait_until(lambda: printed("rank done.", ranks), "ranks have trained all")
        ended = Pages(cluster, 7, without=DATA_LOADER)
        (folder / "leave ranks").touch()
        assert [cluster.wait(process) for process in (ranks, *loaders)] == [0, 0, 0], ranks.output
        reports = [json.loads((folder / f"report.rank{rank}.json").read_text()) for rank in range(2)]
        yield Everything(sent, ended, reports, folder / "checkpoint")


def test_ids_sent_are_ids_looked_up(job: Everything) -> None:
    assert job.sent.count(DATA_LOADER) == job.ended.count(EMBEDDING_WORKER) == job.ended.count(NN_WORKER) == 2
    assert job.ended.count(EMBEDDING_PARAMETER_SERVER) == 3
    num_ids = job.sent.sum(DATA_LOADER, "persia_loader_ids_sent")
    assert num_ids > 100_000
    assert job.ended.sum(EMBEDDING_WORKER, "persia_ids") == num_ids
    assert min(job.ended.each(EMBEDDING_WORKER, "persia_ids")) > 0


def test_batches_sent_are_batches_trained_evaluated_or_skipped(job: Everything) -> None:
    num_batches = 2 * NUM_BATCHES
    assert job.sent.sum(DATA_LOADER, "persia_loader_batches_sent") == num_batches
    workers, ranks = job.ended, job.ended
    assert workers.sum(EMBEDDING_WORKER, "persia_batches_registered") == num_batches
    assert workers.sum(EMBEDDING_WORKER, "persia_batches_looked_up") == num_batches
    assert workers.sum(EMBEDDING_WORKER, "persia_batches_expired") == 0
    assert ranks.sum(NN_WORKER, "persia_nn_batches_received") == num_batches
    trained = ranks.sum(NN_WORKER, "persia_nn_batches_trained")
    evaluated = ranks.sum(NN_WORKER, "persia_nn_batches_evaluated")
    skipped = ranks.sum(NN_WORKER, "persia_nn_batches_released")
    assert trained + evaluated + skipped == num_batches
    assert evaluated == num_batches / 8
    assert skipped == sum(report["num_skipped"] for report in job.reports) > 0
    assert workers.sum(EMBEDDING_WORKER, "persia_batches_returned") == trained
    assert workers.sum(EMBEDDING_WORKER, "persia_batches_released") == evaluated + skipped
    assert ranks.sum(NN_WORKER, "persia_nn_batches_failed") == 0


def test_gradients_returned_are_gradients_applied_and_counted_skips(job: Everything) -> None:
    pages = job.ended
    gradients = pages.sum(EMBEDDING_WORKER, "persia_gradients")
    left_out = pages.sum(EMBEDDING_WORKER, "persia_gradients_left_out")
    applied = pages.sum(EMBEDDING_PARAMETER_SERVER, "persia_updated_rows")
    missing = pages.sum(EMBEDDING_PARAMETER_SERVER, "gradient_id_miss_count")
    nonfinite = pages.sum(EMBEDDING_PARAMETER_SERVER, "persia_nonfinite_rows")
    assert gradients == applied + missing + nonfinite + left_out
    assert min(applied, missing, left_out) > 0
    assert (job.counted("rows_updated"), job.counted("rows_missing")) == (applied, missing)
    # One slot is not used, another one is broken at times.
    trained = job.counted("batches_trained")
    assert pages.sum(EMBEDDING_WORKER, "nan_grad_skipped") == job.counted("skipped_slots") == trained
    assert 0 < pages.sum(EMBEDDING_WORKER, "nan_count") == job.counted("nonfinite_slots") < trained


def test_rows_made_are_rows_held_and_rows_that_went(job: Everything) -> None:
    def servers(name: str) -> float:
        return job.ended.sum(EMBEDDING_PARAMETER_SERVER, name)

    gone = [servers(f"persia_{why}_rows") for why in ("evicted", "expired", "small")]
    assert servers("persia_inserted_rows") == servers("persia_rows") + sum(gone)
    assert min(gone) > 0
    assert servers("persia_unadmitted_rows") > 0
    assert max(job.ended.each(EMBEDDING_PARAMETER_SERVER, "persia_rows")) <= CAPACITY


def test_staleness_is_bounded_and_exported(job: Everything) -> None:
    assert max(report["max_in_flight"] for report in job.reports) >= 1
    for report in job.reports:
        assert set(report["staleness"]["by_mode"]) == {"hybrid", "hybrid 2", "asynchronous", "synchronous"}
    measured = max(report["staleness"]["max"] for report in job.reports)
    assert max(job.ended.each(EMBEDDING_PARAMETER_SERVER, "persia_update_staleness_max")) == measured > 0
    assert job.ended.each(NN_WORKER, "persia_nn_in_flight") == [0, 0]
    # Of the updates before it, the synchronous slot can miss the other rank's of the same step.
    assert max(report["staleness"]["by_mode"]["synchronous"]["max"] for report in job.reports) <= 1


def test_ranks_agree_and_learn(job: Everything) -> None:
    first, second = job.reports
    assert first["weights"] == second["weights"]
    for report in job.reports:
        assert sum(report["losses"][-20:]) < 0.9 * sum(report["losses"][:20])
    assert first["lr"] == pytest.approx(0.05)  # of rank 0, whose warm-up has ended


def test_the_checkpoint_has_the_rows_held(job: Everything) -> None:
    embeddings = Source(str(job.checkpoint)).manifest.embeddings
    assert embeddings is not None
    assert embeddings.num_rows == job.ended.sum(EMBEDDING_PARAMETER_SERVER, "persia_rows")


def test_a_slot_has_the_room_that_it_was_given(job: Everything) -> None:
    reader = RowReader(str(job.checkpoint))
    groups, counts = RowGroups(reader.section.schema), Counter[str]()
    for block in reader.blocks():
        counts.update({name: len(rows) for name, rows in groups.split(block.signs)})
    assert VISITS_CAPACITY < counts["visits"] <= 3 * VISITS_CAPACITY
    assert counts["crowd"] > 3 * VISITS_CAPACITY
