"""CallMonitor: which calls are slow, and when their workers are looked at."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from persia.errors import (
    InternalError,
)
from persia.pipeline.workers import CallMonitor, SlowCalls


def test_looks_at_slow_workers_become_rare() -> None:
    slow_calls = SlowCalls()
    looks = [now / 2 for now in range(60) if 1 in slow_calls.due([1], now / 2)]
    assert looks == [0, 0.5, 1.5, 3.5, 7.5, 15.5, 23.5]
    assert slow_calls.due([2], 30.0) == {2}
    assert slow_calls.due([1], 30.5) == {1}, "it was not slow meanwhile"


def test_the_monitor_names_the_workers_of_slow_calls_only() -> None:
    told: list[set[int | None]] = []
    done = threading.Event()

    def on_slow(workers: set[int | None]) -> None:
        told.append(workers)
        done.set()

    monitor = CallMonitor(on_slow)
    with monitor.watching(0):
        pass
    with monitor.watching(3):
        assert done.wait(120)
    monitor.close()
    assert told[0] == {3}


def test_calls_report_that_the_monitor_has_failed(log: Any) -> None:
    """Else a dead worker would be waited for until the deadline, without a reason."""

    def on_slow(workers: set[int | None]) -> None:
        raise ValueError("port 'x' is no number")

    monitor = CallMonitor(on_slow)
    with monitor.watching(3):
        monitor._thread.join(120)
    with (
        pytest.raises(InternalError, match=r"embedding workers that have died.*port 'x' is no number"),
        monitor.watching(3),
    ):
        pass
    assert "looking for embedding workers that have died failed" in log.text
    monitor.close()
