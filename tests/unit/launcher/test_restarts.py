"""Which processes are restarted alone, how often, and after which pauses."""

from __future__ import annotations

import os
import signal
import sys
import types
from typing import cast

import pytest

from persia.launcher.restarts import Restarts, how_it_ended, partner_of, restarts_alone
from persia.launcher.supervisor import ManagedProcess, ProcessSpec


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ended(name: str, code: str) -> ManagedProcess:
    command = (sys.executable, "-c", f"import os; {code}")
    spec = ProcessSpec(name=name, command=command, env=dict(os.environ))
    process = ManagedProcess(spec, lambda _name, _line: None, lambda _process: None)
    assert process.wait(60) is not None
    return process


def test_pauses_grow_while_restarts_do_not_help() -> None:
    clock = Clock()
    restarts = Restarts(100, clock)
    pauses = []
    for _ in range(8):
        pauses.append(restarts.next_pause_s("nn-worker"))
        clock.now += pauses[-1] + 2.0  # it dies two seconds after its restart
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    clock.now += 60
    assert restarts.next_pause_s("nn-worker") == 0
    clock.now += 45  # its start takes so long, and fails
    assert restarts.next_pause_s("nn-worker") == 1


def test_signals_without_a_name_are_reported() -> None:
    unnamed = int(signal.SIGRTMIN) + 1
    process = ended("nn-worker", f"os.kill(os.getpid(), {unnamed})")
    assert how_it_ended(process) == f"was ended by signal {unnamed}"


def test_restarts_are_limited_and_reported() -> None:
    restarts = Restarts(2, Clock())
    assert not restarts.exhausted
    restarts.next_pause_s("nn-worker")
    assert str(restarts) == "restart 1 of 2"
    restarts.next_pause_s("data-loader-0")
    assert restarts.exhausted
    assert restarts.summary() == "restarts: 2 of 2 (data-loader-0 1, nn-worker 1)"
    assert Restarts(0).exhausted


def test_a_pause_delays_one_process_alone() -> None:
    clock, told = Clock(), list[str]()
    restarts = Restarts(9, clock)
    loader = ended("data-loader-0", f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    worker = ended("embedding-worker-1", f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    restarts.add(loader, [loader.spec], told.append)
    assert restarts.take_due() == [loader.spec]
    assert restarts.next_due_s == float("inf")
    restarts.add(loader, [loader.spec], told.append)
    assert told[-1] == "data-loader-0 was ended by SIGKILL; it is started again in 1 s (restart 2 of 9)"
    assert restarts.take_due() == []
    assert restarts.is_waiting("data-loader-0")
    assert restarts.next_due_s == 1.0
    restarts.add(worker, [worker.spec], told.append)  # its first death
    assert restarts.take_due() == [worker.spec]
    together = [loader.spec, worker.spec]
    restarts.add(worker, together, told.append)
    assert "every process is started again in 0 s" in told[-1]
    assert restarts.take_due() == together
    restarts.add(loader, together, told.append)
    assert "every process is started again in 1 s" in told[-1]
    clock.now += 0.5
    assert restarts.take_due() == []
    clock.now += 0.5
    assert restarts.take_due() == [loader.spec, worker.spec]
    assert not restarts.is_waiting("data-loader-0")


@pytest.mark.parametrize(
    ("name", "code", "alone"),
    [
        ("data-loader-0", f"os.kill(os.getpid(), {int(signal.SIGKILL)})", True),
        ("data-loader-0", "raise SystemExit(1)", False),  # the ranks end with its error
        ("embedding-worker-0", f"os.kill(os.getpid(), {int(signal.SIGKILL)})", True),
        ("embedding-worker-0", "raise SystemExit(1)", False),
        ("nats", "raise SystemExit(1)", True),
        ("nn-worker", f"os.kill(os.getpid(), {int(signal.SIGKILL)})", False),
        ("embedding-parameter-server-1", f"os.kill(os.getpid(), {int(signal.SIGKILL)})", False),
    ],
)
def test_who_is_restarted_alone(name: str, code: str, alone: bool) -> None:
    process = ended(name, code)
    assert restarts_alone(process, None) is alone
    killed = "SIGKILL" in how_it_ended(process)
    assert killed is (process.exit_code == -signal.SIGKILL)


def test_a_server_is_restarted_alone_while_its_partner_runs() -> None:
    name = "embedding-parameter-server-1"
    assert partner_of(name) == f"{name}-standby"
    assert partner_of(f"{name}-standby") == name
    killed = ended(name, f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    standby = ended(f"{name}-standby", "raise SystemExit(1)")
    assert restarts_alone(killed, standby) is False
    running = types.SimpleNamespace(exit_code=None)
    assert restarts_alone(killed, cast(ManagedProcess, running)) is True
