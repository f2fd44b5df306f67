"""Packets of real jobs, embedded and in a cluster, killed at bad moments, and what a follower has of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from persia.checkpoint.checkpoints import Checkpoints
from persia.checkpoint.peers import find_servers
from persia.checkpoint.rows import RowReader
from persia.config import parse_embedding_config
from persia.embedding.optim import Adagrad
from persia.nn import EmbeddingBagCollection
from persia.packets.log import PacketLog
from persia.packets.packet import BaseKind
from tests.packet_follower import Follower

JOBS = Path(__file__).parent / "jobs"
SLOTS = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 8}, "items": {"dim": 8}}}
NUM_BATCHES = 40
SLOW_MACHINE = {"PERSIA_DEADLINE_SEC": "120"}  # six processes begin at once
_OTHER_JOBS = ("PERSIA_NATS_URL", "RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_EMBEDDED")


def settings(directory: Path, interval_ms: int = 20) -> dict[str, Any]:
    return {
        "embedding_parameter_server_config": {
            "enable_incremental_update": True,
            "incremental_dir": str(directory),
            "incremental_interval_ms": interval_ms,
            "incremental_dense_interval_sec": 0,
        }
    }


def rows_of(url: Any) -> list[tuple[int, bytes]]:
    """All rows bit for bit, by sign: (sign, embedding and state)."""
    found = []
    for block in RowReader(url).blocks():
        values = np.concatenate([block.embeddings, block.state], axis=1)
        found += [(int(sign), row.tobytes()) for sign, row in zip(block.signs, values, strict=True)]
    return sorted(found)


def followed(directory: Path, checkpoint: Path | None = None) -> list[tuple[int, bytes]]:
    """The rows of a follower that has come to the end."""
    rows = EmbeddingBagCollection(parse_embedding_config(SLOTS), optimizer=Adagrad(lr=0.05), num_threads=1)
    follower = Follower(PacketLog(directory), rows._bags)
    if checkpoint is not None:
        rows.load(checkpoint)
        section = RowReader(checkpoint).section
        follower.position, follower.dump_id = section.packets, section.dump_id
    follower.follow()
    rows.dump(directory / "followed")
    return rows_of(directory / "followed")


def test_embedded_and_clustered_jobs_are_followed_to_the_same_rows(run_job: Any, tmp_path: Path) -> None:
    arguments = ("--reproducible", "--pace", "0.03")
    environment = {name: value for name, value in os.environ.items() if name not in _OTHER_JOBS}
    for name, config in (("EMBEDDING", SLOTS), ("GLOBAL", settings(tmp_path / "embedded"))):
        path = tmp_path / f"{name}.yml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        environment[f"PERSIA_{name}_CONFIG"] = str(path)
    command = [sys.executable, str(JOBS / "train.py"), "--output", str(tmp_path / "report"), *arguments]
    command += ["--embedded-loader", str(NUM_BATCHES)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "report.rank0.json").read_text())
    assert report["threads"] == []

    config = settings(tmp_path / "cluster")
    run_job(*arguments, loaders=[NUM_BATCHES], parameter_servers=2, global_config=config, env=SLOW_MACHINE)

    rows = followed(tmp_path / "embedded")
    assert len(rows) == sum(report["sizes"])
    assert followed(tmp_path / "cluster") == rows
    for name, servers in (("embedded", 1), ("cluster", 2)):
        log = PacketLog(tmp_path / name)
        packets = [log.read(position) for position in log.positions()]
        assert len(packets) >= 2, "most often many; the last one comes at the end, however slow the machine"
        assert {len(packet.servers) for packet in packets[1:]} == {servers}
        last = [packet for packet in packets if packet.dense][-1]
        assert (last.dense_step, last.step) == (NUM_BATCHES, NUM_BATCHES)


@pytest.mark.parametrize("victim", ["nn-worker", "embedding-parameter-server-1"])
def test_killed_while_a_packet_is_written(victim: str, start_job: Any, tmp_path: Path) -> None:
    directory, final = tmp_path / "packets", tmp_path / "final"
    job = start_job(
        *("--pace", "0.01"),
        loaders=[["--batches", "5000"]],
        parameter_servers=2,
        global_config=settings(directory, interval_ms=10),
        env=SLOW_MACHINE,
    )
    log = PacketLog(directory)
    deadline = time.monotonic() + 150
    while len(before := {folder.name for folder in log.files.children()}) < 5:
        assert time.monotonic() < deadline, job.nn_worker.output
        time.sleep(0.01)
    while {folder.name for folder in log.files.children()} <= before:
        assert time.monotonic() < deadline, job.nn_worker.output
        time.sleep(0.001)
    job.cluster.kill(victim)
    assert followed(directory), "every packet that is there is whole"
    if victim != "nn-worker":
        return

    # The servers live on. Another trainer goes on with what they have, and writes a stream of its own.
    first = log.newest()
    assert first is not None
    job.cluster.kill("data-loader-0")
    job.start([["--batches", "20"]], ["--pace", "0.05"], "train.py")
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    Checkpoints(lambda: find_servers(job.cluster.session, 20), deadline_s=20).dump(final)
    newest = log.newest()
    assert newest is not None
    assert newest.stream > first.stream
    base = log.read(min(log.positions(newest.stream))).base
    assert base is not None
    assert base.kind is BaseKind.POSITION
    assert followed(directory, checkpoint=log.checkpoints.path) == rows_of(final)
