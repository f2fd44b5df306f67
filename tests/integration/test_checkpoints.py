"""Checkpoints of real jobs: killed and resumed elsewhere, servers that die, disks that are full, S3."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import find_servers
from persia.config import parse_embedding_config
from persia.embedding.optim import Adagrad
from persia.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PersiaError,
    StorageError,
    UnavailableError,
)
from persia.nn import EmbeddingBagCollection
from persia.rows.reader import RowReader
from persia.testing import LocalCluster

SLOTS = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 8}, "items": {"dim": 8}}}
NUM_BATCHES, DUMP_AFTER, KILL_AFTER = 40, 20, 25


def rows_of(url: Any) -> list[tuple[int, int, bytes]]:
    """All rows bit for bit, by sign: (sign, step of the row, embedding and state)."""
    found = []
    for block in RowReader(url).blocks():
        scalars = block.scalars if len(block.scalars) else np.zeros(len(block.signs), np.uint32)
        values = np.concatenate([block.embeddings, block.state], axis=1)
        found += [(int(s), int(c), v.tobytes()) for s, c, v in zip(block.signs, scalars, values, strict=True)]
    return sorted(found)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A checkpoint of some thousand rows with the slots of the clusters here."""
    bags = EmbeddingBagCollection(parse_embedding_config(SLOTS), optimizer=Adagrad(lr=0.1), num_threads=1)
    ids = torch.arange(20_000) % 5000
    bags(ids, torch.ones(2, 10_000, dtype=torch.int64)).square().sum().backward()
    bags.dump(tmp_path / "rows")
    return tmp_path / "rows"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def checkpoints_of(cluster: LocalCluster, deadline_s: float = 20.0) -> Checkpoints:
    """Its servers, coordinated by this process."""
    return Checkpoints(lambda: find_servers(cluster.session, deadline_s), deadline_s=deadline_s)


def test_killed_job_goes_on_elsewhere_as_if_nothing_had_happened(start_job: Any, tmp_path: Path) -> None:
    script = {"script": "checkpointed.py"}
    loader = [["--batches", str(NUM_BATCHES)]]
    whole = start_job("--final", str(tmp_path / "whole"), loaders=loader, **script)
    killed = start_job(
        *("--dump", str(tmp_path / "root"), "--dump-after", str(DUMP_AFTER)),
        loaders=[["--batches", str(NUM_BATCHES), "--hang-after", str(KILL_AFTER)]],
        parameter_servers=3,
        **script,
    )
    assert whole.finish_nn_worker() == 0, whole.nn_worker.output
    deadline = time.monotonic() + 240
    while f"trained {KILL_AFTER}" not in killed.nn_worker.output or not (tmp_path / "root/latest").exists():
        assert time.monotonic() < deadline, killed.nn_worker.output
        time.sleep(0.1)
    killed.cluster.kill("nn-worker")
    for index in range(3):
        killed.cluster.kill(f"embedding-parameter-server-{index}")

    resumed = start_job(
        *("--load", str(tmp_path / "root"), "--final", str(tmp_path / "resumed")),
        loaders=[["--batches", str(NUM_BATCHES - DUMP_AFTER), "--first", str(DUMP_AFTER)]],
        parameter_servers=2,
        **script,
    )
    assert resumed.finish_nn_worker() == 0, resumed.nn_worker.output
    assert f"at step {DUMP_AFTER}" in resumed.nn_worker.output
    (expected,), (report,) = whole.reports, resumed.reports
    assert report["losses"] == expected["losses"][DUMP_AFTER:]
    assert report["digest"] == expected["digest"]
    assert report["step"] == expected["step"] == NUM_BATCHES
    assert rows_of(tmp_path / "resumed") == rows_of(tmp_path / "whole")


def test_ranks_wait_while_rank_0_loads(start_job: Any, tmp_path: Path) -> None:
    # Two ranks start slowly on a loaded machine.
    options = {"nproc": 2, "script": "checkpointed.py", "env": {"PERSIA_DEADLINE_SEC": "120"}}
    first = start_job(*("--final", str(tmp_path / "c")), loaders=[["--batches", "20"]], **options)
    assert first.finish_nn_worker() == 0, first.nn_worker.output
    shutil.copytree(tmp_path / "c", tmp_path / "damaged")
    damage(next((tmp_path / "damaged").glob("dump-*/embeddings-0-0.emb")))
    second = start_job(
        *("--refused", str(tmp_path / "damaged"), "--load", str(tmp_path / "c")),
        loaders=[["--batches", "20"]],
        **options,
    )
    assert second.finish_nn_worker() == 0, second.nn_worker.output
    assert len(re.findall("at step 10", second.nn_worker.output)) == 2
    digests = {report["digest"] for report in second.reports}
    assert len(digests) == 1
    for rank, report in enumerate(second.reports):
        refusal = report["refusal"]
        assert refusal["kind"] == "CorruptionError", "all ranks are told what rank 0 found"
        assert re.match(r"(rank 0: )?embedding-parameter-server.*embeddings-0-0\.emb, bytes", refusal["text"])
        assert refusal["text"].startswith("rank 0: ") == (rank != 0)
        assert refusal["unchanged"]


def test_a_server_restarted_empty_is_filled_from_the_checkpoint(
    local_cluster: Any, rows: Path, tmp_path: Path
) -> None:
    cluster = local_cluster(embedding_config=SLOTS, parameter_servers=2)
    checkpoints = checkpoints_of(cluster)
    checkpoints.load(Source(rows))
    cluster.restart("embedding-parameter-server-1")
    with pytest.raises(FailedPreconditionError, match=r"server 1 of 2 .*no optimizer yet"):
        checkpoints.dump(
            DumpRequest(tmp_path / "half")
        )  # would replace a whole checkpoint by half of the rows
    checkpoints.load(Source(rows))
    checkpoints.dump(DumpRequest(tmp_path / "filled"))
    assert rows_of(tmp_path / "filled") == rows_of(rows)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_that_dies_is_named_and_the_old_checkpoint_stays(
    how: str, local_cluster: Any, rows: Path
) -> None:
    cluster = local_cluster(embedding_config=SLOTS, parameter_servers=3)
    checkpoints_of(cluster).load(Source(rows))
    servers = find_servers(cluster.session, 10)
    checkpoints = Checkpoints(lambda: servers, deadline_s=2)
    before = rows_of(rows)
    (victim,) = (p for p in cluster.processes if p.name == "embedding-parameter-server-1")
    victim.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    try:
        with pytest.raises(
            UnavailableError, match="embedding-parameter-server 1 of 3 at .* has not answered"
        ):
            checkpoints.dump(DumpRequest(rows))
        with pytest.raises(UnavailableError, match="embedding-parameter-server 1 of 3"):
            checkpoints.load(Source(rows))
    finally:
        victim.send_signal(signal.SIGCONT)
    assert rows_of(rows) == before
    if how == "killed":
        cluster.restart("embedding-parameter-server-1")
    again = checkpoints_of(cluster)
    again.load(Source(rows))
    again.dump(DumpRequest(rows))
    assert rows_of(rows) == before
    assert len(list(rows.glob("dump-*"))) == 1


def test_a_full_disk_is_a_typed_error_naming_server_and_file(
    local_cluster: Any, rows: Path, tmp_path: Path
) -> None:
    # What files of these servers may grow to: what a full disk looks like, for them alone.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, hard))
    try:
        cluster = local_cluster(embedding_config=SLOTS, parameter_servers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints = checkpoints_of(cluster)
    checkpoints.load(Source(rows))
    message = (
        r"embedding-parameter-server \d of 2.*embeddings-\d-\d\.emb could not be written.*File too large"
    )
    with pytest.raises(StorageError, match=message):
        checkpoints.dump(DumpRequest(tmp_path / "c"))
    assert not list((tmp_path / "c").glob("*"))


def test_damage_is_found_by_the_server_that_reads_it(local_cluster: Any, rows: Path, tmp_path: Path) -> None:
    cluster = local_cluster(embedding_config=SLOTS, parameter_servers=2)
    checkpoints = checkpoints_of(cluster)
    checkpoints.load(Source(rows))
    checkpoints.dump(DumpRequest(tmp_path / "c"))
    damage(next((tmp_path / "c").glob("dump-*/embeddings-1-0.emb")))
    with pytest.raises(PersiaError, match=r"embedding-parameter-server 1 of 2.*embeddings-1-0\.emb, bytes"):
        checkpoints.load(Source(tmp_path / "c"))
    checkpoints.dump(DumpRequest(tmp_path / "unharmed"))
    assert rows_of(tmp_path / "unharmed") == rows_of(rows)


def test_memory_of_this_process_is_no_place_for_servers(local_cluster: Any) -> None:
    cluster = local_cluster(embedding_config=SLOTS)
    with pytest.raises(InvalidArgumentError, match="exists in this process only"):
        checkpoints_of(cluster).dump(DumpRequest("memory://c"))
