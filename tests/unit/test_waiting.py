"""Attempts end with the deadline, pause between them, and tell what they wait for."""

from __future__ import annotations

import logging

import pytest

from persia import waiting
from persia.waiting import Attempts


class Clock:
    """Takes the place of `time`: only sleeping, and the attempts themselves, pass it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


def test_attempts_end_with_the_deadline(clock: Clock) -> None:
    assert [round(left, 6) for left in Attempts(1.0, pause_s=0.4)] == [0.4, 0.4, 0.2]
    assert clock.now == pytest.approx(101.0)
    assert list(Attempts(0.0)) == [0.0], "the first attempt is made even without time for it"


def test_progress_counts_the_timeout_anew(clock: Clock) -> None:
    attempts = Attempts(1.0, pause_s=0.5)
    num_attempts = 0
    for _ in attempts:
        num_attempts += 1
        if num_attempts == 2:
            attempts.progressed()
            assert attempts.left_s == pytest.approx(1.0)
        elif num_attempts == 3:
            attempts.progressed(clock.now - 0.25)
    assert num_attempts == 4
    assert clock.now == pytest.approx(101.75)
    assert attempts.left_s == 0.0


def test_pauses_grow_up_to_the_longest(clock: Clock) -> None:
    pauses = list(Attempts(100.0, pause_s=1.0, longest_pause_s=2.0))
    assert pauses[:4] == [1.0, 1.5, 2.0, 2.0]


def test_an_attempt_that_takes_its_time_is_not_followed_by_a_pause(clock: Clock) -> None:
    for seconds in Attempts(3.0, pause_s=1.0):
        clock.now += seconds / 4
    assert clock.slept == [0.75, 0.75, 0.75]


def test_a_long_wait_is_reported_and_a_short_one_is_not(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("test_waiting")
    monkeypatch.setattr(waiting, "get_default_logger", lambda: logger)
    with caplog.at_level(logging.INFO, logger="test_waiting"):
        short = Attempts(0.9, pause_s=0.1, waiting_for=lambda: "nothing")
        assert list(short)
        assert not short.has_reported
        long = Attempts(12.0, pause_s=0.5, waiting_for=lambda: "godot")
        assert list(long)
    assert long.has_reported
    assert [record.getMessage() for record in caplog.records] == ["waiting for godot"] * 3
