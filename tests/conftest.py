"""Fixtures that run real processes on free ports."""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from persia.logger import get_default_logger
from persia.messaging.session import NatsSession
from persia.testing import LocalCluster, LocalNats

# A shell that runs the tests in the background makes them, and every process they start, ignore Ctrl-C. Tests
# send it; a handler here lets new processes start with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What persia itself says in this process, from INFO on."""
    logger = get_default_logger()
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[LocalNats]:
    """A NATS server for the whole run; tests keep apart by `job_name`. One that kills it starts its own."""
    with LocalNats() as server:
        yield server


@pytest.fixture
def job_name() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
def make_session(nats_server: LocalNats, job_name: str) -> Iterator[Callable[[str], NatsSession]]:
    """Makes connected sessions of one job, each with the name given."""
    with ExitStack() as stack:

        def make(name: str) -> NatsSession:
            session = stack.enter_context(NatsSession(nats_server.url, job_name, name=name))
            session.connect(10.0)
            return session

        yield make


@pytest.fixture
def local_cluster() -> Iterator[Callable[..., LocalCluster]]:
    """Starts clusters: takes the arguments of `LocalCluster` and returns it entered."""
    with ExitStack() as stack:

        def start(**options: Any) -> LocalCluster:
            return stack.enter_context(LocalCluster(**options))

        yield start
