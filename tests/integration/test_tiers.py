"""Jobs whose rows are in pools, with much smaller caches: servers are killed and started again."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia import pmem
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import find_servers
from persia.config import parse_embedding_config
from persia.embedding.optim import Adagrad
from persia.errors import InvalidArgumentError, UnavailableError
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.nn import EmbeddingBagCollection
from persia.rows.reader import RowReader
from persia.security import http_token
from persia.testing import LocalCluster

SLOTS = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 8}, "items": {"dim": 8}}}
NUM_BATCHES, DUMP_AFTER, KILL_AFTER = 40, 20, 25
KINDS = [
    "file",
    pytest.param("pmem", marks=pytest.mark.skipif(not pmem.HAS_PMEM, reason="built without libpmem")),
]


def global_config(path: Path, kind: str = "file", cache_rows: int = 32) -> dict[str, Any]:
    storage = {"kind": kind, "path": str(path), "size_bytes": 1 << 30, "cache_rows": cache_rows}
    section = {"num_hashmap_internal_shards": 4, "storage": storage}
    return {"embedding_parameter_server_config": section}


def rows_of(url: Any) -> list[tuple[int, int, bytes]]:
    """All rows bit for bit, by sign: (sign, step of the row, embedding and state)."""
    found = []
    for block in RowReader(url).blocks():
        scalars = block.scalars if len(block.scalars) else np.zeros(len(block.signs), np.uint32)
        values = np.concatenate([block.embeddings, block.state], axis=1)
        found += [(int(s), int(c), v.tobytes()) for s, c, v in zip(block.signs, scalars, values, strict=True)]
    return sorted(found)


def checkpoints_of(cluster: LocalCluster, deadline_s: float = 60.0) -> Checkpoints:
    return Checkpoints(lambda: find_servers(cluster.session, 60), deadline_s=deadline_s)


def ask(url: str) -> Any:
    return urllib.request.urlopen(
        urllib.request.Request(url, headers={"Authorization": f"Bearer {http_token()}"}), timeout=60
    )


def status_of(cluster: LocalCluster, index: int) -> dict[str, Any]:
    """What a server says of its tier, as `persia-launcher status` reads it."""
    info = Directory(cluster.session).probe(EMBEDDING_PARAMETER_SERVER, index, 60.0)
    assert info is not None
    with ask(f"http://{info.status_address}/status") as reply:
        tier: dict[str, Any] = json.load(reply)["stats"]["tier"]
    with ask(f"http://{info.status_address}/metrics") as reply:
        metrics = reply.read()
    assert b"persia_tier_cached_rows" in metrics
    assert b"persia_tier_memory_bytes" in metrics
    assert tier["memory_bytes"] > 0
    return tier


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_goes_on_from_its_pools_as_if_nothing_had_happened(
    kind: str, start_job: Any, tmp_path: Path
) -> None:
    """Model, optimizer and rows are those of one step, and equal those of a job in memory to the last bit."""
    script, pools = {"script": "checkpointed.py"}, tmp_path / "pools"
    pools.mkdir()
    tiered = {"parameter_servers": 2, "global_config": global_config(pools, kind), **script}
    whole = start_job(
        *("--final", str(tmp_path / "whole")), loaders=[["--batches", str(NUM_BATCHES)]], **script
    )
    assert whole.finish_nn_worker() == 0, whole.nn_worker.output
    killed = start_job(
        *("--dump", str(tmp_path / "root"), "--dump-after", str(DUMP_AFTER), "--in-place"),
        loaders=[["--batches", str(NUM_BATCHES), "--hang-after", str(KILL_AFTER)]],
        **tiered,
    )
    deadline = time.monotonic() + 240
    while f"trained {KILL_AFTER}" not in killed.nn_worker.output or not (tmp_path / "root/latest").exists():
        assert time.monotonic() < deadline, killed.nn_worker.output
        time.sleep(0.1)
    tier = status_of(killed.cluster, 0)
    assert tier["num_rows"] > 2 * tier["num_hot"]
    assert tier["num_promoted"] > 0
    # Nobody but the embedding worker asks for that, where rows are read from a file.
    assert (tier["num_prefetched"] > 0) == (kind == "file")
    for name in ("embedding-parameter-server-0", "embedding-parameter-server-1", "nn-worker"):
        killed.cluster.kill(name)

    resumed = start_job(
        *("--load", str(tmp_path / "root"), "--final", str(tmp_path / "resumed")),
        loaders=[["--batches", str(NUM_BATCHES - DUMP_AFTER), "--first", str(DUMP_AFTER)]],
        **tiered,
    )
    assert resumed.finish_nn_worker() == 0, resumed.nn_worker.output
    assert f"at step {DUMP_AFTER}" in resumed.nn_worker.output
    assert f"(step {DUMP_AFTER}) of" in resumed.cluster.logs("embedding-parameter-server-1")
    (expected,), (report,) = whole.reports, resumed.reports
    assert report["losses"] == expected["losses"][DUMP_AFTER:]
    assert report["digest"] == expected["digest"]
    assert rows_of(tmp_path / "resumed") == rows_of(tmp_path / "whole")


def dump_some_rows(directory: Path) -> None:
    bags = EmbeddingBagCollection(parse_embedding_config(SLOTS), optimizer=Adagrad(lr=0.1), num_threads=1)
    ids = torch.arange(4000) % 1000
    bags(ids, torch.ones(2, 2000, dtype=torch.int64)).square().sum().backward()
    bags.dump(directory)


def test_servers_killed_during_a_dump_go_back_to_one_step(local_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "pools").mkdir()
    config = global_config(tmp_path / "pools")
    cluster = local_cluster(embedding_config=SLOTS, global_config=config, parameter_servers=2)
    names = [f"embedding-parameter-server-{index}" for index in range(2)]
    dump_some_rows(tmp_path / "rows")
    checkpoints_of(cluster).load(Source(tmp_path / "rows"))
    checkpoints_of(cluster).dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    for step, delay_s in ((2, 0.0), (3, 0.02), (4, 0.06)):
        checkpoints = checkpoints_of(cluster, deadline_s=2)
        checkpoints.dump(DumpRequest(tmp_path / "c", step=step, in_place=True, blocking=False))
        time.sleep(delay_s)
        cluster.kill(names[step % 2])
        with contextlib.suppress(UnavailableError):
            checkpoints.wait_for_dump()
        for name in (names[step % 2], names[1 - step % 2]):
            cluster.restart(name)  # kills the other one, too
        source = Source(tmp_path / "c")
        assert {status_of(cluster, index)["step"] for index in range(2)} == {source.manifest.step}
        checkpoints_of(cluster).load(source)


def test_one_server_that_is_killed_comes_back_with_its_rows(local_cluster: Any, tmp_path: Path) -> None:
    dump_some_rows(tmp_path / "rows")
    (tmp_path / "pools").mkdir()
    config = global_config(tmp_path / "pools", cache_rows=100)
    cluster = local_cluster(embedding_config=SLOTS, global_config=config, parameter_servers=2)
    checkpoints = checkpoints_of(cluster)
    checkpoints.load(Source(tmp_path / "rows"))
    checkpoints.dump(DumpRequest(tmp_path / "c", step=3, in_place=True))
    cluster.kill("embedding-parameter-server-1")
    cluster.restart("embedding-parameter-server-1")
    assert [status_of(cluster, index)["step"] for index in range(2)] == [3, 3]
    checkpoints.load(Source(tmp_path / "c"))
    checkpoints.dump(DumpRequest(tmp_path / "after"))
    assert rows_of(tmp_path / "after") == rows_of(tmp_path / "rows")


def test_servers_say_why_they_do_not_start(local_cluster: Any, tmp_path: Path) -> None:
    config = global_config(tmp_path / "missing")
    with pytest.raises(Exception, match=r"storage\.path=.*missing is no directory of this machine"):
        local_cluster(embedding_config=SLOTS, global_config=config)


def test_rows_in_memory_cannot_be_dumped_in_place(local_cluster: Any, tmp_path: Path) -> None:
    cluster = local_cluster(embedding_config=SLOTS)
    with pytest.raises(InvalidArgumentError, match=r"server 0 of 1 .*in memory alone"):
        checkpoints_of(cluster).dump(DumpRequest(tmp_path / "c", in_place=True))
