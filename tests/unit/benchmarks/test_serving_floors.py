"""A floor of serving is met by a run that tested it, and by no other."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from benchmarks import serving, serving_floors
from benchmarks.grpc_load import Outcome
from benchmarks.serving_floors import Figure

TURN = 10  # requests


@pytest.mark.parametrize(
    ("value", "is_least", "is_met"), [(3, True, True), (2, True, False), (3, False, True), (4, False, False)]
)
def test_a_floor_is_a_bound_of_either_side(value: float, is_least: bool, is_met: bool) -> None:
    figure = Figure("p99", value, " ms", 3.0, is_least)
    assert figure.is_met == is_met
    assert ("met" if is_met else "missed") in str(figure)


def while_loading(monkeypatch: pytest.MonkeyPatch, loads: int, answers: int, error: str = "") -> Figure:
    """The figure of turns of `TURN` requests, while versions are switched `loads` times."""
    switched = threading.Event()

    class Switching:
        def __init__(self, _folder: Path) -> None:
            self.loaded = 0

        async def run(self, _address: str, _probe: bytes) -> None:
            self.loaded = 1 + loads
            switched.set()
            if error:
                raise ValueError(error)
            await asyncio.Event().wait()

    def open_loop(*_: object) -> Outcome:
        assert switched.wait(60)
        return Outcome([0.001] * answers, [0.001] * (TURN - answers))

    monkeypatch.setattr(serving, "Switching", Switching)
    monkeypatch.setattr(serving_floors, "open_loop", open_loop)
    monkeypatch.setattr(serving_floors, "requests", lambda _folder: [b""])
    monkeypatch.setattr(serving_floors, "throughput", lambda *_: (TURN, 0.0))
    return serving_floors._while_loading("", 0, Path(), 1.0)


@pytest.mark.parametrize(
    ("loads", "answers", "untested"),
    [
        (1, TURN, ""),
        (0, TURN, "no version was loaded"),
        (-1, TURN, "no version was loaded"),
        (1, TURN - 1, "1 of 10 requests were not answered"),
        (1, 0, "10 of 10 requests were not answered"),
    ],
)
def test_latencies_while_a_version_loads(
    monkeypatch: pytest.MonkeyPatch, loads: int, answers: int, untested: str
) -> None:
    figure = while_loading(monkeypatch, loads, answers)
    assert figure.is_met == (not untested)
    assert figure.untested == untested
    assert ("met" if figure.is_met else "missed") in str(figure)
    assert untested in str(figure)
    assert f"{max(loads, 0)} loads" in str(figure)


def test_an_error_of_the_switching_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no second version"):
        while_loading(monkeypatch, 1, TURN, "no second version")


@pytest.mark.parametrize(("dead", "healthy", "is_met"), [(10, 10, True), (9, 10, False), (10, 9, False)])
def test_latencies_with_a_dead_worker_are_those_of_all_requests(
    dead: int, healthy: int, is_met: bool
) -> None:
    figure = serving_floors._by_healthy([0.0015] * dead, [0.001] * healthy, TURN)
    assert figure.value == pytest.approx(1.5)
    assert figure.is_met == is_met
    assert ("1 of 20 requests were not answered" in str(figure)) == (not is_met)
