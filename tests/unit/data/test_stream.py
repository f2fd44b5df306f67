"""What a rank does when its loaders are silent, over a broker of which only the answers are real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from persia.errors import DeadlineExceededError
from persia.messaging.interface import Registration
from persia.messaging.subjects import Subjects
from persia.pipeline.position import DataPosition
from persia.pipeline.receive import LOADER_REMEDY, StreamReceiver


class Session:
    """`connected`: whether the broker is there after each question, the last one for good."""

    subjects = Subjects("test")

    def __init__(self, connected: list[bool]) -> None:
        self._connected = connected

    def respond(self, *_: Any, **__: Any) -> Registration:
        return Registration(lambda: None)

    @property
    def is_connected(self) -> bool:
        return self._connected.pop(0) if len(self._connected) > 1 else self._connected[0]


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "0.001")
    monkeypatch.setenv("PERSIA_LOADER_SILENCE_SEC", "0.01")


def make_receiver(answers: list[Any], connected: list[bool], remedy: str = LOADER_REMEDY) -> StreamReceiver:
    """`answers`: what a loader answers when asked whether it is there, None for nothing."""
    directory = SimpleNamespace(probe=lambda *_: answers.pop(0))
    session: Any = Session(connected)
    return StreamReceiver(
        session,
        directory,
        rank=0,
        world_size=1,
        buffer_size=1,
        ordered=False,
        trained=DataPosition(),
        remedy=remedy,
        failure=lambda: "",
        on_received=lambda: None,
        on_superseded=lambda batch: None,
        on_taken=lambda payload: payload,
    )


def test_first_batch_may_take_longer_than_the_deadline_while_its_loader_lives() -> None:
    alive = object()
    answers = [alive, alive, None, alive, None, None, alive]
    with pytest.raises(DeadlineExceededError, match="no data loader has sent anything yet"):
        make_receiver(answers, [True]).take()
    assert answers == [alive]  # it gave up when two questions in a row were not answered


def test_a_loader_is_not_dead_because_the_broker_is_away() -> None:
    answers: list[Any] = [None, None, None, None, None]
    with pytest.raises(DeadlineExceededError):
        make_receiver(answers, [False, False, True]).take()
    assert answers == [None]  # two that say nothing, and two in a row that do


def test_the_waiting_line_says_how_to_start_a_loader(monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    monkeypatch.setattr("persia.pipeline.loader_watch._REPORT_INTERVAL_S", 0.0)
    receiver = make_receiver([object(), None, None], [True], remedy="run one")
    with pytest.raises(DeadlineExceededError, match="no data loader has sent anything yet: run one"):
        receiver.take()
    assert log.records[0].getMessage() == "waiting for the first batch of the data loaders; run one"
