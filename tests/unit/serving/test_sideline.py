"""Work beside requests is bounded, draws are those of the request's ID, and a log has whole batches only."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch, split_batches
from persia.errors import InvalidArgumentError, StorageError
from persia.serving import sideline
from persia.serving.request_log import RequestLog, RequestLogOptions
from persia.serving.sideline import Share, Sideline

WAIT_S = 60.0


def batch(user: int) -> PersiaBatch:
    return PersiaBatch([IDTypeFeatureWithSingleID("user", np.array([user], np.uint64))], requires_grad=False)


def users(path: Path) -> list[int]:
    return [
        int(PersiaBatch.from_bytes(content).id_type_features[0].ids[0])
        for content in split_batches(path.read_bytes())
    ]


def test_what_comes_while_the_thread_is_behind_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sideline, "_MAX_WAITING", 2)
    begun, release, handled = threading.Event(), threading.Event(), []

    def handle(item: int) -> None:
        handled.append(item)
        begun.set()
        assert release.wait(WAIT_S)
        if item == 0:
            raise ValueError("the thread must outlive it")

    line = Sideline("test", handle)
    line.offer(0)
    assert begun.wait(WAIT_S)
    for item in range(1, 6):
        line.offer(item)
    assert line.num_dropped == 3
    release.set()
    line.close()
    assert handled == [0, 1, 2]


def test_draws_follow_the_request() -> None:
    def drawn_of(share: float, purpose: str) -> set[str]:
        drawing = Share(share, purpose)
        return {f"{number}" for number in range(4000) if drawing.takes(f"{number}")}

    drawn = drawn_of(0.25, "canary")
    assert 800 < len(drawn) < 1200
    assert drawn == drawn_of(0.25, "canary")
    assert drawn < drawn_of(0.5, "canary")
    assert 0.4 < len(drawn & drawn_of(0.5, "shadow")) / len(drawn) < 0.6, "independent"
    chance = Share(0.25, "canary")
    assert 800 < sum(chance.takes("") for _ in range(4000)) < 1200
    assert sum(chance.takes("\ud800") for _ in range(100)) in (0, 100)
    for request_id in ("", "x", "\ud800"):
        assert Share(1.0, "log").takes(request_id)
        assert not Share(0.0, "log").takes(request_id)


def test_what_is_logged_waits_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release, write = threading.Event(), threading.Event(), os.write

    def writing(file: int, content: Any) -> int:
        begun.set()
        assert release.wait(WAIT_S)
        return write(file, content)

    monkeypatch.setattr("persia.serving.request_log.os.write", writing)
    log = RequestLog(RequestLogOptions(path=tmp_path / "log"))
    log.offer(batch(0), "")
    assert begun.wait(WAIT_S)
    for user in range(1, 100):
        log.offer(batch(user), "")
    assert log.status()["num_dropped"] == 99 - 64
    release.set()
    log.close()
    assert users(tmp_path / "log") == list(range(65))


def test_a_log_is_renamed_when_it_is_full_and_when_a_server_starts(tmp_path: Path) -> None:
    path, size = tmp_path / "log", len(batch(0).to_bytes())
    path.touch(0o644)
    RequestLog(RequestLogOptions(path=path)).close()
    assert (path.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (0o600, [path])
    path.write_bytes(b"of the server before")
    for begin in (0, 10):
        log = RequestLog(RequestLogOptions(path=path, max_log_bytes=2 * size))
        for user in range(begin, begin + 5):
            log.offer(batch(user), "")
        log.close()
        assert log.status() == {"num_written": 5, "num_dropped": 0, "error": ""}
        assert (users(tmp_path / "log.1"), users(path)) == ([begin + 2, begin + 3], [begin + 4])
    with pytest.raises(StorageError, match="--request-log cannot be written"):
        RequestLog(RequestLogOptions(path=tmp_path / "nowhere" / "log"))


def test_a_batch_that_does_not_fit_the_disk_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.write, []

    def writing(file: int, content: Any) -> int:
        calls.append(file)
        if len(calls) == 2:
            return write(file, content[:5])
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content)

    monkeypatch.setattr("persia.serving.request_log.os.write", writing)
    log = RequestLog(RequestLogOptions(path=tmp_path / "log"))
    for user in range(4):
        log.offer(batch(user), "")
    log.close()
    assert users(tmp_path / "log") == [0, 3]
    assert log.status()["num_written"] == 2


def test_no_error_ends_a_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write, calls = os.write, []

    def writing(file: int, content: bytes) -> int:
        calls.append(len(content))
        if len(calls) == 1:
            raise ValueError("a fault")
        return write(file, content)

    monkeypatch.setattr("persia.serving.request_log.os.write", writing)
    log = RequestLog(RequestLogOptions(path=tmp_path / "log"))
    for user in range(3):
        log.offer(batch(user), "")
    log.close()
    assert users(tmp_path / "log") == [1, 2]
    assert (log.status()["num_written"], log.status()["num_dropped"]) == (2, 1)


def test_what_is_dropped_is_not_encoded(tmp_path: Path) -> None:
    log = RequestLog(RequestLogOptions(path=tmp_path / "log"))
    log.close()
    dropped = Mock()
    log.offer(dropped, "")
    dropped.to_bytes.assert_not_called()
    assert log.status()["num_dropped"] == 1


def test_a_share_in_a_file_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "share"
    for content in ("", "half", "1.5", "nan", "-0.1"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(InvalidArgumentError, match="share.*: write a number from 0 to 1"):
            Share(path, "canary")
    path.write_text(" 0.25\n", encoding="utf-8")
    share = Share(path, "canary")
    path.write_text("0.5", encoding="utf-8")
    monkeypatch.setattr(sideline, "_REREAD_S", 3600)
    assert share.value == 0.25, "a file is not read for each request"
    monkeypatch.setattr(sideline, "_REREAD_S", 0)
    assert share.value == 0.5
    path.write_text("2", encoding="utf-8")
    assert share.value == 0.5, "what is no share changes nothing"
    path.unlink()
    assert share.value == 0.5
    assert Share(0.125, "canary").value == 0.125
