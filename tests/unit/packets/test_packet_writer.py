"""Packets of real stores of this process, written and read back; every failure on the way is a real one."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from persia import _native
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import LocalPeer, Peer
from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.embedding import EmbeddingConfig
from persia.errors import CorruptionError, UntrustedError
from persia.packets.packet import BaseKind
from persia.packets.writer import DENSE_FILE, PacketWriter
from persia.rows.reader import Span
from persia.storage.manifest import Manifest
from persia.storage.position import Position
from persia.storage.shard_file import ShardFile
from persia.storage.signing import create_key
from tests.unit.checkpoint.conftest import (
    checkpoints_of,
    make_bags,
    rows_of,
    sealed,
    services,
    train,
)

from .conftest import DEADLINE_S, NEVER_MS, Follower, Job, assert_equal, eventually, wait_for


def test_a_follower_from_nothing_is_equal(job: Job, tmp_path: Path) -> None:
    before = time.time() - 5  # the writer has asked for the first time just now
    for seed in range(3):
        job.train(seed=seed, num_ids=500)
        wait_for(job, 2 + seed)
    job.writer.close(None)
    packets = job.packets()
    assert [packet.position.number for packet in packets] == list(range(1, len(packets) + 1))
    assert packets[0].base is not None
    assert packets[0].base.kind is BaseKind.NOTHING
    for packet, next_packet in itertools.pairwise(packets):
        assert before <= packet.changed_after <= packet.cut_at <= time.time()
        assert packet.changed_after <= next_packet.changed_after
    follower = Follower(job.log)
    follower.follow()
    assert_equal(follower, job, tmp_path)
    counts = job.writer.stream.current_counts()
    assert (counts.packets, counts.number) == (len(packets) - 1, len(packets))
    assert counts.rows == sum(packet.num_rows for packet in packets)
    assert counts.bytes == sum(packet.num_bytes for packet in packets)
    assert (counts.restarts, counts.failures, counts.lag_s) == (1, 0, 0.0)


def test_signed_packets_are_bound_to_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = create_key(tmp_path / "job.key")
    monkeypatch.setenv("PERSIA_SIGN_KEY", str(private))
    monkeypatch.setenv("PERSIA_VERIFY_KEY", str(public))
    job = Job(tmp_path / "log")
    for seed in range(2):
        job.train(seed=seed)
        wait_for(job, 2 + seed)
    job.writer.close(None)
    follower = Follower(job.log)
    follower.follow()
    assert_equal(follower, job, tmp_path)
    restart, packet = job.packets()[:2]
    assert all(file.pages is not None for file in packet.files)
    paths = [tmp_path / "log" / "manifests" / f"{p.position.name}.json" for p in (restart, packet)]
    honest = paths[1].read_bytes()
    paths[1].write_bytes(paths[0].read_bytes())  # signed, and of another number
    with pytest.raises(CorruptionError, match="is of packet"):
        job.log.read(packet.position)
    values = json.loads(honest)
    del values["signed_by"], values["checksum"]
    paths[1].write_bytes(sealed(values))
    with pytest.raises(UntrustedError, match=f"{packet.position.name}.json is not signed"):
        job.log.read(packet.position)
    monkeypatch.delenv("PERSIA_VERIFY_KEY")  # without a key it is a packet as any other
    assert job.log.read(packet.position) == packet


def test_bug_9_evicted_rows_are_removals(tmp_path: Path) -> None:
    job = Job(tmp_path / "log", make_bags(capacity=400))
    for seed in range(4):
        train(job.bags, num_ids=100, seed=seed, steps=1)
        ids = np.arange(1000 * seed, 1000 * seed + 200, dtype=np.uint64)
        _, batch = job.bags.lookup(ids, np.ones((2, 100), np.int64), train=True)
        job.bags.update(batch, np.ones((100, 12), np.float32))
        wait_for(job, 2 + seed)
    job.writer.close(None)
    assert job.bags.stats().num_evicted > 0
    files = [file for packet in job.packets() for file in packet.files]
    blocks = [
        block
        for entry in files
        for file in [ShardFile(job.log.files, entry)]
        for chunk in file.chunks_of(Span())
        for block in _native.decode_checkpoint_blocks(file.read(chunk))
    ]
    assert sum(len(block.signs) for block in blocks if block.is_removal) > 0
    follower = Follower(job.log)
    follower.follow()
    assert follower.bags.stats().num_rows == job.bags.stats().num_rows
    assert_equal(follower, job, tmp_path)


def test_bug_9_size_brings_a_packet_before_its_time_and_the_end_the_last_one(tmp_path: Path) -> None:
    job = Job(tmp_path / "log", buffer_size=900, interval_s=NEVER_MS)
    job.train(num_ids=100, steps=1)
    time.sleep(0.3)
    assert job.writer.stream.position.number == 0
    assert 0.1 < job.writer.stream.current_counts().lag_s < 20
    job.train(num_ids=1000, steps=1)
    wait_for(job, 2)
    job.train(num_ids=100, steps=1)
    job.writer.close(None)
    assert [packet.num_rows > 0 for packet in job.packets()] == [False, True, True], "the last one at exit"


def test_cleared_rows(job: Job, tmp_path: Path) -> None:
    job.train()
    wait_for(job, 2)
    job.bags.clear()
    job.train(num_ids=50)
    job.writer.close(None)
    assert job.packets()[-1].is_from_nothing
    follower = Follower(job.log)
    follower.follow()
    assert_equal(follower, job, tmp_path)


def test_a_dump_knows_its_position_and_a_follower_goes_on_from_it(job: Job, tmp_path: Path) -> None:
    job.train(seed=1)
    wait_for(job, 2)
    job.train(seed=2)
    job.checkpoints.dump(
        DumpRequest(tmp_path / "model", dense={DENSE_FILE: b"dense"}, step=2, blocking=False)
    )
    job.train(seed=3)
    job.checkpoints.wait_for_dump()
    section = Manifest.read(Source(tmp_path / "model").location)[0].embeddings
    assert section is not None
    assert section.packets is not None
    assert section.packets.number >= 2
    job.train(seed=4)
    job.writer.close(None)
    assert job.packets()[-1].checkpoint is not None
    follower = Follower(job.log)
    follower.load(tmp_path / "model")
    assert follower.position == section.packets
    follower.follow()
    assert_equal(follower, job, tmp_path)


def test_what_follows_a_loaded_checkpoint_names_it(job: Job, tmp_path: Path) -> None:
    earlier = make_bags()
    train(earlier, seed=9)
    checkpoints_of(earlier).dump(DumpRequest(tmp_path / "model"))
    job.train()
    wait_for(job, 2)
    job.checkpoints.load(Source(tmp_path / "model"))
    job.train(seed=1)
    job.writer.close(None)
    bases = [packet.base for packet in job.packets() if packet.base is not None]
    assert [base.kind for base in bases] == [BaseKind.NOTHING, BaseKind.CHECKPOINT]
    follower = Follower(job.log)
    follower.load(tmp_path / "model")
    follower.position = Position(job.writer.stream.position.stream, 2)
    while (restart := follower.log.read(follower.position.next)).base is None:
        follower.position = restart.position
    follower.follow()
    assert_equal(follower, job, tmp_path)
    assert job.writer.stream.current_counts().checkpoints == 0


def test_what_follows_a_checkpoint_that_was_loaded_meanwhile_needs_another(job: Job, tmp_path: Path) -> None:
    job.train()
    wait_for(job, 2)
    job.checkpoints.dump(DumpRequest(tmp_path / "model"))
    begin_anew = job.writer.stream._begin_anew

    def train_first() -> None:
        job.train(seed=5)  # training did not wait
        begin_anew()

    job.writer.stream._begin_anew = train_first  # type: ignore[method-assign]
    job.checkpoints.load(Source(tmp_path / "model"), blocking=False)
    job.checkpoints.wait_for_load()
    job.writer.stream._begin_anew = begin_anew  # type: ignore[method-assign]
    job.writer.offer_dense(1, lambda: b"dense")
    job.train(seed=1, num_ids=50)
    eventually(lambda: job.writer.stream.current_counts().checkpoints == 1)
    job.train(seed=2, num_ids=50)
    job.writer.close(None)
    follower = Follower(job.log)
    follower.load(job.log.checkpoints)
    follower.follow()
    assert_equal(follower, job, tmp_path)


def test_more_changes_than_are_remembered_bring_a_restart_and_a_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path / "log", buffer_size=1000)
    job.writer.offer_dense(1, lambda: b"dense")
    job.train(steps=1)
    wait_for(job, 2)
    job.writer.stream.pause()  # as a long dump would
    job.train(num_ids=3000)
    job.writer.stream.resume()
    job.train(steps=1)
    eventually(lambda: job.writer.stream.current_counts().checkpoints == 1)
    job.train(steps=1)
    job.writer.close(None)
    base = [packet.base for packet in job.packets() if packet.base is not None][1]
    assert base.kind is BaseKind.POSITION
    follower = Follower(job.log)
    follower.load(job.log.checkpoints)
    assert Source(job.log.checkpoints).dense(DENSE_FILE) == b"dense"
    follower.follow()
    assert_equal(follower, job, tmp_path)


def test_rows_alone_are_not_the_checkpoint_that_followers_need(job: Job, tmp_path: Path) -> None:
    job.train()
    wait_for(job, 2)
    job.restart_trainer()
    job.train(seed=1)
    wait_for(job, 2)
    job.checkpoints.dump(DumpRequest(tmp_path / "rows"))
    job.train(seed=2)
    wait_for(job, 3)
    assert job.packets()[-1].checkpoint is None
    job.writer.offer_dense(1, lambda: b"dense")
    job.train(seed=3)
    eventually(lambda: job.writer.stream.current_counts().checkpoints == 1)
    job.train(seed=4)
    job.writer.close(None)
    reference = job.packets()[-1].checkpoint
    assert reference is not None
    assert reference.url.startswith(str(job.log.checkpoints))


def test_only_a_dump_that_is_asked_for_removes_small_rows(tmp_path: Path) -> None:
    job = Job(tmp_path / "log", make_bags(config=EmbeddingConfig(min_norm=1e6)))
    job.train()
    wait_for(job, 2)
    job.restart_trainer()
    job.writer.offer_dense(1, lambda: b"dense")
    job.train(seed=1)
    eventually(lambda: job.writer.stream.current_counts().checkpoints == 1)
    num_rows = job.bags.stats().num_rows
    job.writer.close(None)
    assert num_rows > 0
    job.checkpoints.dump(DumpRequest(tmp_path / "asked"))
    assert job.bags.stats().num_rows == 0


def test_a_trainer_that_was_killed_is_followed_by_another_stream(job: Job, tmp_path: Path) -> None:
    job.train()
    wait_for(job, 2)
    first = job.writer.stream.position.stream
    job.train(seed=1)  # these rows are in no packet of the first stream, perhaps
    time.sleep(1.1)  # streams sort by the second they began
    job.restart_trainer()
    job.writer.offer_dense(1, lambda: b"dense")
    job.train(seed=2)
    eventually(lambda: job.writer.stream.current_counts().checkpoints == 1)
    job.train(seed=3)
    job.writer.close(None)
    newest = job.log.newest()
    assert newest == job.writer.stream.position
    assert newest.stream > first
    follower = Follower(job.log)
    follower.load(job.log.checkpoints)
    follower.follow()
    assert_equal(follower, job, tmp_path)


def test_a_server_remembers_its_part_of_a_dump_while_packets_go_on(tmp_path: Path) -> None:
    """Another process dumps: one server is done, and writes packets again, before its coordinator knows."""
    job = Job(tmp_path / "log", num_servers=2)

    class Slow(Peer):
        """Reports a dump as running until two more packets were written."""

        def __str__(self) -> str:
            return str(job.peers[1])

        def call(self, request: Request, timeout_s: float) -> Report:
            report = job.peers[1].call(request, timeout_s)
            if request.verb is Verb.POLL and job.writer.stream.position.number < last_packet:
                return replace(report, state=State.RUNNING, result=None)
            return report

    def keep_changing() -> None:
        while not stop.is_set():
            job.train()
            stop.wait(0.01)

    stop = threading.Event()
    trainer = threading.Thread(target=keep_changing)
    trainer.start()
    try:
        wait_for(job, 2)
        last_packet = job.writer.stream.position.number + 2
        Checkpoints(lambda: [job.peers[0], Slow()], deadline_s=DEADLINE_S).dump(
            DumpRequest(tmp_path / "dump")
        )
    finally:
        stop.set()
        trainer.join()
        job.writer.close(None)
    assert job.writer.stream.position.number >= last_packet
    assert len(rows_of(tmp_path / "dump")) > 0


def test_what_a_killed_trainer_had_under_way_is_ended_by_the_next(job: Job) -> None:
    job.train()
    wait_for(job, 2)
    job.writer.stream.pause()
    stream = job.writer.stream.position.stream
    folder = Position(stream, 99).make_folder()
    arguments = {"directory": str(job.log.files), "stream": stream}
    job.peers[0].call(Request(verb=Verb.TAKE, operation=folder, arguments=arguments), 5)
    job.writer.stream.resume()
    job.restart_trainer()
    started = time.monotonic()
    job.train()
    wait_for(job, 2)
    assert time.monotonic() - started < 50, "not the lease"
    assert not (job.log.files / folder).exists()


def test_a_server_that_restarts_is_no_silent_gap(job: Job, tmp_path: Path) -> None:
    job.writer.offer_dense(1, lambda: b"dense")
    job.train()
    wait_for(job, 2)
    job.bags = make_bags()  # it comes back empty, at the same place
    job.peers[:] = [LocalPeer(services([job.bags], incremental=job.settings)[0])]
    job.train(num_ids=100)
    eventually(lambda: job.writer.stream.current_counts().checkpoints == 1)
    job.writer.close(None)
    follower = Follower(job.log)
    follower.load(job.log.checkpoints)
    follower.follow()
    assert_equal(follower, job, tmp_path)


def test_dense_models_travel_along(tmp_path: Path) -> None:
    job = Job(tmp_path / "log", dense_interval_s=0.0)
    for step in (1, 2):
        job.train(seed=step)
        eventually(lambda: job.writer.wants_dense)
        job.writer.offer_dense(step, lambda step=step: b"model %d" % step)
        # Again and again: a packet that had begun before the offer takes the rows without the dense model.
        eventually(lambda step=step: _train_until_written(job, step))
    job.writer.offer_dense(7, lambda: b"the last one")
    job.writer.close(None)
    dense = {
        p.dense_step: (job.log.files / p.dense[DENSE_FILE].path).read(max_bytes=99)
        for p in job.packets()
        if p.dense
    }
    assert dense == {1: b"model 1", 2: b"model 2", 7: b"the last one"}


def _train_until_written(job: Job, step: int) -> bool:
    job.train(seed=job.step)
    return step in [packet.dense_step for packet in job.packets()]


def test_old_packets_go_once_a_checkpoint_replaces_them(tmp_path: Path) -> None:
    job = Job(tmp_path / "log", keep_packets=3)
    job.writer.offer_dense(1, lambda: b"dense")
    deadline = time.monotonic() + 240
    while job.writer.stream.current_counts().checkpoints < 2:
        assert time.monotonic() < deadline
        number = job.writer.stream.position.number
        job.train(num_ids=50, seed=number)
        wait_for(job, number + 1)
    job.writer.close(None)
    eventually(lambda: job.packets()[0].position.number > 1)
    numbers = [packet.position.number for packet in job.packets()]
    assert numbers == list(range(numbers[0], job.writer.stream.position.number + 1))
    assert len(numbers) >= 3
    follower = Follower(job.log)
    follower.load(job.log.checkpoints)
    assert follower.position is not None
    assert follower.position.number + 1 >= numbers[0], "what the newest checkpoint needs is there"
    follower.follow()
    assert_equal(follower, job, tmp_path)


def test_a_job_without_incremental_updates_writes_none() -> None:
    bags = make_bags()
    peers = [LocalPeer(services([bags])[0])]
    writer = PacketWriter(lambda: peers, deadline_s=DEADLINE_S, step=lambda: 0)
    writer.start()
    train(bags)
    eventually(lambda: not writer._thread.is_alive())
    assert writer.stream.log is None
    writer.close(None)
    assert writer.stream.pause() is None
