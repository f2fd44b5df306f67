"""A trainer whose packets a follower of this process reads: real stores, real files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import _native
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import LocalPeer, Peer
from persia.packets.changes import IncrementalSettings
from persia.packets.log import PacketLog
from persia.packets.packet import Packet
from persia.packets.writer import PacketWriter
from persia.storage.manifest import Manifest
from persia.storage.versions import resolve
from tests import packet_follower
from tests.unit.checkpoint.conftest import (
    checkpoints_of,
    make_bags,
    rows_of,
    services,
    train,
    without_ages,
)

DEADLINE_S = 60.0
NEVER_MS = 10_000.0


class Job:
    """A trainer: a store, its server, what writes its packets, and its dumps."""

    def __init__(
        self, url: Any, bags: _native.EmbeddingBags | None = None, num_servers: int = 1, **settings: Any
    ) -> None:
        defaults = {"buffer_size": 100_000, "interval_s": 0.02, "dense_interval_s": 1e6, "keep_packets": 1000}
        self.settings = IncrementalSettings(directory=str(url), **{**defaults, **settings})
        self.log = PacketLog(url)
        self.bags = bags or make_bags()
        self.others = [make_bags() for _ in range(num_servers - 1)]  # rows of other servers
        servers = services([self.bags, *self.others], incremental=self.settings)
        self.peers: list[Peer] = [LocalPeer(server) for server in servers]
        self.checkpoints = Checkpoints(lambda: self.peers, deadline_s=DEADLINE_S)
        self.step = 0
        self.writer = self.make_writer()

    def make_writer(self) -> PacketWriter:
        writer = PacketWriter(lambda: self.peers, deadline_s=DEADLINE_S, step=lambda: self.step)
        self.checkpoints.hook = writer.stream
        writer.start()
        return writer

    def train(self, **options: Any) -> None:
        train(self.bags, **{"num_ids": 300, **options})
        self.step += 1

    def packets(self) -> list[Packet]:
        return [
            self.log.read(position) for position in self.log.positions(self.writer.stream.position.stream)
        ]

    def restart_trainer(self) -> None:
        """As after `kill -9`: its servers live on, and it comes to nothing else."""
        self.writer._stop.set()
        self.writer._finish = lambda: None  # type: ignore[method-assign]  # a process that is gone does not
        self.writer.close(None)
        self.writer = self.make_writer()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "log")
    yield job
    job.writer.close(None)


def eventually(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come to that"
        time.sleep(0.01)


def wait_for(job: Job, number: int) -> None:
    eventually(lambda: job.writer.stream.position.number >= number)


class Follower(packet_follower.Follower):
    """With a store like the job's."""

    def __init__(self, log: PacketLog) -> None:
        super().__init__(log, make_bags())

    def load(self, url: Any) -> None:
        checkpoints_of(self.bags).load(Source(url))
        section = Manifest.read(resolve(Source(url).location))[0].embeddings
        assert section is not None
        self.position, self.dump_id = section.packets, section.dump_id


def assert_equal(follower: Follower, job: Job, tmp_path: Path) -> None:
    for name, stores in (("trainer", [job.bags, *job.others]), ("follower", [follower.bags])):
        checkpoints_of(*stores).dump(DumpRequest(tmp_path / name))
    expected, found = rows_of(tmp_path / "trainer"), rows_of(tmp_path / "follower")
    assert np.array_equal(without_ages(expected), without_ages(found))
