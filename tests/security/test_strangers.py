"""Whoever has none of the job's credentials reads, changes and forges nothing, and is told so at once.

One test for each experiment that once succeeded against a running job.
"""

from __future__ import annotations

import random
import time

import pytest

from benchmarks.attacks import intruder
from benchmarks.attacks.job import AttackedJob, Watch
from persia.messaging.discovery import EventKind, ServiceEvent, ServiceInfo
from persia.messaging.payloads import EndOfStream
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, Subjects
from tests.security import fuzz_ports

# A peer may also close the connection without a word.
REFUSED = (None, 10)  # kPermissionDenied
PROMPTLY_S = 5.0  # one round trip, on a loaded machine
UNPROVEN_S = 30.0  # how long a connection may stay that proves nothing


@pytest.mark.parametrize("name", intruder.SERVER_METHODS)
def test_no_method_of_a_parameter_server(job: AttackedJob, name: str) -> None:
    answer = intruder.call(job.server, intruder.SERVER_METHODS[name], intruder.body_of(name))
    assert answer.status in REFUSED, f"{name}: status {answer.status}, {len(answer.body)} bytes"
    assert answer.seconds < PROMPTLY_S


@pytest.mark.parametrize("name", intruder.WORKER_METHODS)
def test_no_method_of_an_embedding_worker(job: AttackedJob, name: str) -> None:
    answer = intruder.call(job.worker, intruder.WORKER_METHODS[name], intruder.body_of(name))
    assert answer.status in REFUSED, f"{name}: status {answer.status}, {len(answer.body)} bytes"
    assert answer.seconds < PROMPTLY_S


@pytest.mark.parametrize("plane", ["server", "worker"])
def test_a_connection_that_proves_nothing_is_closed(job: AttackedJob, plane: str) -> None:
    with intruder.held(job.ports[plane], 300) as connections, Watch(job) as watch:
        deadline = time.monotonic() + UNPROVEN_S
        while (left := intruder.num_open(connections)) > 0:
            assert time.monotonic() < deadline, f"{left} idle connections are still open"
            time.sleep(0.2)
    assert watch.still_s < 8.0


def test_nobody_listens_to_the_job(job: AttackedJob) -> None:
    """All IDs, dense features and labels pass the broker."""
    said = intruder.nats_refuses(job.broker, b"SUB persia.> 1\r\n")
    assert b"-ERR 'Authorization Violation'" in said
    assert b"MSG persia." not in said
    assert b"PONG" not in said


def test_nobody_moves_a_server(job: AttackedJob) -> None:
    """A forged "parameter server 0 is at a port where nothing listens"."""
    subjects = Subjects(job.cluster.env["PERSIA_JOB_NAME"])
    forged = ServiceInfo(
        role=EMBEDDING_PARAMETER_SERVER, index=0, replicas=1, incarnation=666, address="127.0.0.1:9"
    )
    hello = ServiceEvent(EventKind.JOINED, forged).encode()
    with Watch(job) as watch:
        said = intruder.nats_refuses(
            job.broker, intruder.publish(subjects.advertise(EMBEDDING_PARAMETER_SERVER), hello)
        )
        job.require_training(50)
    assert b"-ERR 'Authorization Violation'" in said
    assert watch.still_s < 8.0


def test_nobody_ends_the_training(job: AttackedJob) -> None:
    subjects = Subjects(job.cluster.env["PERSIA_JOB_NAME"])
    end = EndOfStream(loader_index=0, loader_replicas=1, num_batches=1, error="forged").encode()
    said = intruder.nats_refuses(job.broker, intruder.publish(subjects.end(0), end))
    assert b"-ERR 'Authorization Violation'" in said
    job.require_training(50)


@pytest.mark.parametrize("path", ["/metrics", "/status"])
@pytest.mark.parametrize("role", AttackedJob.roles)
def test_nobody_reads_metrics_and_status(job: AttackedJob, role: str, path: str) -> None:
    status, answer = intruder.http(job.status[role], path)
    assert status in (401, 403), answer[:300]
    assert b"persia_" not in answer


def test_mutated_messages_before_and_after_authentication(job: AttackedJob) -> None:
    """`python -m tests.security.fuzz_ports` sends a thousand times as many."""
    generator = random.Random(4)
    assert fuzz_ports.attack("of strangers", job, fuzz_ports.by_strangers(job, generator), 100)
    with fuzz_ports.by_roles(job, generator) as send:
        assert fuzz_ports.attack("of the job's roles", job, send, 100)
