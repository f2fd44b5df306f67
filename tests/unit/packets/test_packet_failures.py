"""Packets on a full disk, on a storage that hangs, and with servers that miss a message."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from persia.checkpoint.checkpoints import DumpRequest, Source
from persia.checkpoint.peers import Peer
from persia.checkpoint.protocol import Report, Request, Verb
from persia.errors import UnavailableError

from .conftest import DEADLINE_S, Follower, Job, assert_equal, eventually, wait_for


class FullDisk:
    """Writes below `path` fail while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
        self.is_full = True
        kind = type(fsspec.filesystem("memory"))
        opened, piped = kind._open, kind.pipe_file

        def check(path: str) -> None:
            if self.is_full and wanted in path:
                raise OSError(errno.ENOSPC, "no space left on device", path)

        def open_(fs: Any, path: str, mode: str = "rb", **options: Any) -> Any:
            if mode != "rb":
                check(path)
            return opened(fs, path, mode, **options)

        def pipe_file(fs: Any, path: str, value: bytes, **options: Any) -> None:
            check(path)
            piped(fs, path, value, **options)

        monkeypatch.setattr(kind, "_open", open_)
        monkeypatch.setattr(kind, "pipe_file", pipe_file)


@pytest.mark.parametrize("what", ["rows-0", "000000000002.json", "dense.pt", "latest"])
def test_a_full_disk_loses_nothing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, what)
    job = Job(f"memory://{tmp_path.parent.name}/{tmp_path.name[-1]}")
    job.writer.offer_dense(1, lambda: b"dense")
    job.train()
    eventually(
        lambda: job.writer.stream.current_counts().failures > 0 or job.writer.stream.position.number > 1
    )
    if what != "latest":  # which is not what makes a packet exist
        assert [packet.is_restart for packet in job.packets()] == [True], "no half packet is seen"
    disk.is_full = False
    job.train(seed=1)
    wait_for(job, 2)
    job.writer.close(None)
    follower = Follower(job.log)
    follower.follow()
    assert_equal(follower, job, tmp_path)
    folders = {child.name for child in job.log.files.children()}
    assert folders == {file.path.split("/")[0] for packet in job.packets() for file in packet.files}


class DeafPeer:
    """A server that some requests do not reach."""

    is_remote = False

    def __init__(self, peer: Peer, deaf_to: Verb) -> None:
        self.peer, self.deaf_to, self.num_lost = peer, deaf_to, 0

    def call(self, request: Request, timeout_s: float) -> Report:
        if request.verb is self.deaf_to and self.num_lost < 1:
            self.num_lost += 1
            raise UnavailableError("lost on its way")
        return self.peer.call(request, timeout_s)

    def __str__(self) -> str:
        return "a server"


@pytest.mark.parametrize("verb", [Verb.CHANGES, Verb.TRACK, Verb.TAKE, Verb.APPLY, Verb.POLL])
def test_a_lost_message_is_repeated(verb: Verb, job: Job, tmp_path: Path) -> None:
    job.peers[:] = [DeafPeer(job.peers[0], verb)]
    job.writer.stream.peers = job.peers
    job.train()
    wait_for(job, 2)
    job.train(seed=1)
    job.writer.close(None)
    assert job.writer.stream.current_counts().failures == 0
    follower = Follower(job.log)
    follower.follow()
    assert_equal(follower, job, tmp_path)


class ForgetfulPeer(DeafPeer):
    """A server whose packet ends by its lease, once, when it is about to be committed."""

    def call(self, request: Request, timeout_s: float) -> Report:
        if request.verb is self.deaf_to and self.num_lost < 1:
            self.num_lost += 1
            self.peer.call(replace(request, verb=Verb.CANCEL), timeout_s)
        return self.peer.call(request, timeout_s)


def test_a_clearing_that_one_server_does_not_commit_stops_no_packets(tmp_path: Path) -> None:
    job = Job(tmp_path / "log", num_servers=2)

    def train_both(seed: int) -> None:
        for index, bags in enumerate((job.bags, *job.others)):
            ids = np.arange(100, dtype=np.uint64) + np.uint64(1000 * index + 10 * seed)
            pooled, batch = bags.lookup(ids, np.ones((2, 50), np.int64), train=True)
            bags.update(batch, np.ones_like(pooled))

    job.writer.offer_dense(1, lambda: b"dense")
    train_both(1)
    wait_for(job, 2)
    job.writer.stream.pause()
    for bags in (job.bags, *job.others):
        bags.clear()
    train_both(2)
    job.peers[1] = forgetful = ForgetfulPeer(job.peers[1], Verb.APPLY)
    job.writer.stream.peers = job.peers
    job.writer.stream.resume()
    eventually(lambda: forgetful.num_lost == 1)
    train_both(3)
    eventually(lambda: job.writer.stream.current_counts().checkpoints == 1)
    train_both(4)
    job.writer.close(None)
    assert job.writer.stream.current_counts().failures == 0
    follower = Follower(job.log)
    follower.load(job.log.checkpoints)
    follower.follow()
    assert_equal(follower, job, tmp_path)


def test_whatever_goes_wrong_in_a_pause_the_next_one_is_free(job: Job, tmp_path: Path) -> None:
    job.train()
    wait_for(job, 2)
    job.checkpoints.dump(DumpRequest(tmp_path / "model"))
    job.checkpoints.load(Source(tmp_path / "model"))  # a restart waits to be written
    step, job.writer.stream._step = job.writer.stream._step, lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        job.checkpoints.dump(DumpRequest(tmp_path / "next"))
    job.writer.stream._step = step
    started = time.monotonic()
    job.checkpoints.dump(DumpRequest(tmp_path / "next"))
    assert time.monotonic() - started < DEADLINE_S / 2


def test_a_storage_that_hangs_does_not_keep_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("persia.packets.writer._CONNECT_S", 0.1)
    job = Job(f"memory://{tmp_path.parent.name}/hangs")
    job.train()
    wait_for(job, 2)
    kind, answers = type(fsspec.filesystem("memory")), threading.Event()
    piped = kind.pipe_file

    def pipe_file(fs: Any, path: str, value: bytes, **options: Any) -> None:
        answers.wait(60)
        piped(fs, path, value, **options)

    monkeypatch.setattr(kind, "pipe_file", pipe_file)
    job.writer._deadline_s = 0.5
    job.train(seed=1)
    started = time.monotonic()
    job.writer.close(None)
    took_s = time.monotonic() - started
    answers.set()
    assert took_s < 50
    assert "the last changes are in no packet" in caplog.text
    job.writer._thread.join(120)
    assert job.writer.stream.current_counts().lag_s == 0, "it was only late"
