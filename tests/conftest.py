"""Fixtures that run real processes and servers on free ports."""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from persia import _native, observability, utils
from persia.config import parse_embedding_config
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.logger import get_default_logger
from persia.messaging.session import NatsSession
from persia.pipeline.slot_rows import slot_signs
from persia.security import identity
from persia.security.secret import TRAINER, WORKER
from persia.testing import LocalCluster, LocalNats
from tests.preloaded import Preloaded

# Of this run alone: tests must not use, or create, the secret of the user who runs them.
os.environ["PERSIA_JOB_SECRET"] = f"persia1.job.{secrets.token_hex(32)}"

# As `./run test` has it: threads of numpy and torch that spin take the cores from other processes, and a
# process with threads cannot be forked (tests/preloaded.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without it, an example may take 0.2 s, which a busy machine exceeds.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# A shell that runs the tests in the background makes them, and every process they start, ignore Ctrl-C. Tests
# send it; a handler here lets new processes start with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(
    wrapper=True, tryfirst=True
)  # outermost: what it writes stands below the list of skipped tests
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None, None, None]:
    """Ends the run with the command that adds the tests skipped for want of a program."""
    yield
    reports = terminalreporter.stats.get("skipped", [])
    count = sum("`./run extras`" in str(report.longrepr) for report in reports)
    if count:
        terminalreporter.write_line(
            f"{count} tests were skipped for want of a Kubernetes API server or Prometheus: "
            "`./run extras` installs both, then run the tests again"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--start-as-always`."""
    parser.addoption(
        "--start-as-always", action="store_true", help="do not fork processes of tests: tests/preloaded.py"
    )


@pytest.fixture(scope="session", autouse=True)
def preloaded(pytestconfig: pytest.Config) -> Iterator[None]:
    """Forks Python processes of tests from one that has imported torch: tests/preloaded.py."""
    with closing(Preloaded()) as process:
        if not pytestconfig.getoption("start_as_always"):
            process.install()
        yield


@pytest.fixture(autouse=True)
def process_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test a process that measures, without a seed, reported values and a role in a job."""
    monkeypatch.setattr(utils, "_seed", None)
    monkeypatch.setattr(observability, "_values", {})
    monkeypatch.setattr(identity, "_installed", None)
    _native.clear_security()
    _native.enable_durations(True)  # a context of an earlier test may have switched it off


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


@pytest.fixture
def embedding_worker() -> Iterator[Callable[..., str]]:
    """Starts an embedding worker over a parameter server, both in this process: the address it serves at.

    Takes slots, as `embedding_config.yml` has them, and rows: {slot: {ID: value of every element}}.
    """
    with ExitStack() as stack:

        def start(slots: Mapping[str, Any], rows: Mapping[str, Mapping[int, float]]) -> str:
            config = parse_embedding_config(slots)
            identity.install(WORKER)  # the caller of the parameter server
            server = _native.ParameterServer(
                replica_index=0, replica_size=1, capacity=1000, num_internal_shards=1
            )
            stack.callback(server.stop)
            worker = _native.EmbeddingWorker(
                slots=config.native_slots(),
                feature_index_prefix_bit=config.feature_index_prefix_bit,
                num_servers=1,
            )
            worker.set_server(0, f"127.0.0.1:{server.start('127.0.0.1', 0)}")
            address = f"127.0.0.1:{worker.start('127.0.0.1', 0)}"
            stack.callback(worker.stop)
            identity.install(TRAINER)
            client = _native.RemoteClient(1)
            client.set_worker(0, address)
            client.configure(SGD(lr=1.0).train_config(EmbeddingConfig()))
            for slot, values in rows.items():
                signs = slot_signs(config, slot, np.array(list(values), np.uint64))
                column = np.array(list(values.values()), np.float32).reshape(-1, 1)
                client.set_embeddings(signs, np.tile(column, config.slots_config[slot].dim))
            return address

        yield start
