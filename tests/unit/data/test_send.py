"""Which embedding worker a loader asks, and for how long, when requests get lost or take long."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from persia.errors import DeadlineExceededError, UnavailableError
from persia.messaging.payloads import FlowReply, ReplyStatus
from persia.messaging.subjects import Subjects
from persia.pipeline.send import BatchSender


class Session:
    """Answers each request as `script` tells, in order: an error to raise, or the seconds that it takes."""

    def __init__(self, script: list[Exception | float]) -> None:
        self.subjects, self.is_connected = Subjects("job"), True
        self.script, self.now = script, 1000.0
        self.asked: list[tuple[str, float]] = []
        self.reconnect: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self.reconnect = callback

    def request(self, subject: str, _payload: bytes, timeout_s: float) -> bytes:
        self.asked.append((subject.removeprefix("persia.job."), timeout_s))
        outcome = self.script.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        self.now += min(outcome, timeout_s)
        if outcome > timeout_s:
            raise DeadlineExceededError("no reply")
        return FlowReply(ReplyStatus.OK, worker_incarnation=1, reference=2).encode()


Start = Callable[..., "tuple[BatchSender, Session]"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def start(*script: Exception | float) -> tuple[BatchSender, Session]:
        session = Session(list(script))
        clock = SimpleNamespace(monotonic=session.monotonic, sleep=lambda _seconds: None)
        monkeypatch.setattr("persia.pipeline.send.time", clock)
        directory: Any = SimpleNamespace(watch=lambda *_, **__: None, wait_for=lambda *_: [])
        sender = BatchSender(session, directory, 0, 1, 600.0)  # type: ignore[arg-type]
        sender._workers = {0: 7, 1: 8}
        return sender, session

    return start


def lost() -> UnavailableError:
    error = UnavailableError("interrupted, as its listener has connected again")
    error.is_lost = True
    return error


def test_a_worker_that_has_connected_again_is_asked_again(start: Start) -> None:
    sender, session = start(lost(), 0.0)
    sender._register(b"ids")
    assert [subject for subject, _ in session.asked] == ["ids.0", "ids.0"]
    assert sender._available_workers() == [0, 1]


def test_a_worker_is_not_taken_for_dead_while_the_broker_is_away(start: Start) -> None:
    sender, session = start(DeadlineExceededError("no reply"), 0.0)
    session.is_connected = False
    sender._register(b"ids")
    assert [subject for subject, _ in session.asked] == ["ids.0", "ids.0"]
    assert sender._available_workers() == [0, 1]


def test_a_worker_that_does_not_answer_is_replaced(start: Start) -> None:
    sender, session = start(UnavailableError("no listener"), 0.0)
    sender._register(b"ids")
    assert [subject for subject, _ in session.asked] == ["ids.0", "ids.1"]
    assert sender._available_workers() == [1]


def test_workers_that_were_left_out_are_asked_again_once_the_broker_is_reached(start: Start) -> None:
    sender, session = start(DeadlineExceededError("the network was cut, which is not noticed yet"), 0.0)
    sender.wait_for_job()
    sender._register(b"ids")
    assert sender._available_workers() == [1]
    session.reconnect()
    assert sender._available_workers() == [0, 1]


def test_workers_whose_answers_take_long_are_not_taken_for_dead(start: Start) -> None:
    sender, session = start(5.0, 5.0, 0.1, 0.1)
    for _ in range(4):
        sender._register(b"ids")
        sender.position += 1
    # The first answer is awaited for long, as the time that one takes is unknown.
    assert session.asked == [("ids.0", 10.0), ("ids.1", 10.0), ("ids.0", 10.0), ("ids.1", 3.0)]
