"""Who reaches a port of a running job, and sends nothing, little, slowly or nonsense, stops no training."""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from benchmarks.attacks import intruder
from benchmarks.attacks.job import AttackedJob, Watch

# The floor is a second on a quiet machine. Where others use the processors, a batch itself may take longer.
STILL_S = 8.0
MESSAGES = 200  # to each port
IDLE = 500  # at each port, all at once
GROWTH_BYTES = 96 << 20
PORTS = (
    "server",
    "worker",
    "broker",
    "status of embedding-parameter-server",
    "status of embedding-worker",
    "status of nn-worker",
)


@pytest.mark.parametrize("plane", ["server", "worker"])
def test_bodies_that_never_come_hold_nobody_up(job: AttackedJob, plane: str) -> None:
    """Six headers that promise a gibibyte each: once they stopped the training for as long as they stayed."""
    method = {"server": 17, "worker": 34}[plane]
    promise = intruder.frame(method, claimed=(1 << 30) - 8)
    with Watch(job) as watch, intruder.held(job.ports[plane], 6, promise) as connections:
        job.require_training(50)
        deadline = time.monotonic() + 30
        while intruder.num_open(connections):  # and they are closed, though they would have stayed
            assert time.monotonic() < deadline, "the server waits for bodies that never come"
            time.sleep(0.1)
    assert watch.still_s < STILL_S


def test_nonsense_at_every_port(job: AttackedJob) -> None:
    assert set(job.ports) == set(PORTS)
    before = job.memory()
    with Watch(job) as watch:
        for name, address in job.ports.items():
            generator = random.Random(name)
            intruder.throw(address, [intruder.garbage(generator) for _ in range(MESSAGES)])
        job.require_training()
    assert watch.still_s < STILL_S
    growth = {process: after - before[process] for process, after in job.memory().items()}
    assert max(growth.values()) < GROWTH_BYTES, growth


def test_thousands_of_idle_connections(job: AttackedJob) -> None:
    before = job.memory()
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(Watch(job))
        opened = [stack.enter_context(intruder.held(address, IDLE)) for address in job.ports.values()]
        assert sum(len(connections) for connections in opened) > 1000  # status ports accept few
        job.require_training(50)
        growth = {process: after - before[process] for process, after in job.memory().items()}
    assert watch.still_s < STILL_S
    assert max(growth.values()) < GROWTH_BYTES, growth


@pytest.mark.parametrize("role", AttackedJob.roles)
def test_half_requests_do_not_close_the_status_port(job: AttackedJob, role: str) -> None:
    with intruder.held(job.status[role], 100, b"GET /healthz HTTP/1.1\r\nHost:"):
        job.require_training()
    deadline = time.monotonic() + 30
    while True:  # once they are gone it answers: 200, or that it wants credentials
        try:
            status, _ = intruder.http(job.status[role], "/healthz")
        except (OSError, IndexError):
            assert time.monotonic() < deadline, "the status port answers nobody any more"
            time.sleep(0.2)
            continue
        assert status in (200, 401, 403)
        return
