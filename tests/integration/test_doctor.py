"""What `persia-launcher doctor` finds behind a NATS server: its limit, and the processes of a job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from persia.launcher.doctor_checks import Finding, Level, Settings, run_checks
from persia.messaging.discovery import Advertiser, ServiceInfo
from persia.messaging.session import NatsSession
from persia.messaging.subjects import DATA_LOADER, EMBEDDING_WORKER, NN_WORKER
from persia.observability.http import HttpPort, json_answer
from persia.testing import LocalNats
from tests.ports import free_port

from .watching import DEADLINE_S


def found(nats_url: str, job_name: str) -> list[Finding]:
    settings = Settings(global_config=None, embedding_config=None, nats_url=nats_url, job_name=job_name)
    return [finding for topic, finding in run_checks(settings) if topic == "nats"]


@pytest.fixture
def announce(make_session: Callable[[str], NatsSession]) -> Iterator[Callable[..., None]]:
    """Makes a process known that answers what it is told to, or shows nothing."""
    with ExitStack() as stack:

        def start(role: str, index: int, replicas: int, status: dict[str, object] | None) -> None:
            address = ""
            if status is not None:
                port = HttpPort("127.0.0.1", 0, {("GET", "/status"): lambda _query: json_answer(status)})
                stack.callback(port.close)
                address = f"127.0.0.1:{port.port}"
            info = ServiceInfo(
                role=role,
                index=index,
                replicas=replicas,
                incarnation=index + 1,
                status_address=address,
                slot_modes=("",),
            )
            advertiser = Advertiser(make_session(f"{role}-{index}"), info)
            advertiser.start()
            stack.callback(advertiser.stop)

        yield start


def test_a_broker_without_a_job(nats_server: LocalNats, job_name: str) -> None:
    assert [(one.level, one.what) for one in found(nats_server.url, job_name)] == [
        (Level.OK, "NATS answers, messages up to 64 MiB"),
        (Level.OK, f"no process of the job {job_name!r} runs"),
    ]


def test_processes_that_are_ready_not_ready_silent_and_missing(
    nats_server: LocalNats, job_name: str, announce: Callable[..., None]
) -> None:
    announce(EMBEDDING_WORKER, 0, 1, {"ready": True})
    announce(NN_WORKER, 1, 2, {"ready": False, "reason": "there is no connection"})
    announce(DATA_LOADER, 0, 1, None)
    worker, rank, loader, missing = found(nats_server.url, job_name)[1:]
    assert worker.level is Level.OK
    assert "embedding-worker 0 of 1" in worker.what
    assert rank.level is Level.FAIL
    assert "nn-worker 1 of 2" in rank.what
    assert rank.what.endswith("is not ready: there is no connection")
    assert loader.level is Level.WARN
    assert "data-loader 0 of 1" in loader.what
    assert "PERSIA_METRICS_PORT=off" in loader.what
    assert (missing.level, missing.what) == (Level.WARN, "not there: nn-worker 0")
    assert all(one.remedy for one in (rank, loader, missing))


def test_a_broker_that_takes_small_messages_only(job_name: str) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "persia.launcher", "nats-server", "--max-payload", "1MB"]
    with subprocess.Popen([*command, "--port", url.rpartition(":")[2]]) as process:
        try:
            with NatsSession(url, job_name, name="test") as session:
                session.connect(DEADLINE_S)
            small = found(url, job_name)[0]
        finally:
            process.terminate()
    assert (small.level, small.what) == (Level.WARN, "NATS answers, but takes messages up to 1 MiB only")
    assert "max_payload" in small.remedy
