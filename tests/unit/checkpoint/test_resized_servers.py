"""Checkpoints while the number of servers is changed (ADR 34): real servers, without a broker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import _native
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import Peer, find_servers
from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.checkpoint.server_job import ServerShare
from persia.checkpoint.service import CheckpointService
from persia.config import GlobalConfig
from persia.errors import FailedPreconditionError, ResourceExhaustedError
from persia.messaging.discovery import Advertiser, ServiceInfo
from persia.messaging.local_session import LocalBroker, LocalSession
from persia.messaging.payloads import MovedShards
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.elastic import ElasticServer, ResizeReport, ResizeRequest, Step
from persia.roles.lifetime import ServerOptions
from persia.storage.manifest import Manifest, make_dump_id
from persia.storage.schema import RowSchema
from persia.waiting import Attempts

from .conftest import SLOTS, rows_of

WAIT_S = 60.0


class Refusals:
    """Waits until a server has told a coordinator to ask again."""

    def __init__(self, handle: Callable[[bytes], bytes | None]) -> None:
        self._handle = handle
        self.happened = threading.Event()

    def __call__(self, payload: bytes) -> bytes | None:
        try:
            return self._handle(payload)
        except ResourceExhaustedError:
            self.happened.set()
            raise


class Server:
    """One server of a job, as run_parameter_server makes it."""

    def __init__(
        self, broker: LocalBroker, index: int, replicas: int, *, generation: int = 0, sources: int = 0
    ) -> None:
        self.native = _native.ParameterServer(
            replica_index=index,
            replica_size=replicas,
            capacity=1_000_000,
            num_internal_shards=4,
            num_sources=sources,
        )
        port = self.native.start("127.0.0.1", 0)
        self.session = LocalSession(broker, name=f"server {index} of {replicas}")
        self.share = ServerShare(
            store=self.native.store,
            moved_shards=lambda: self.native.moved_shards,
            index=index,
            replicas=replicas,
            generation=generation,
            schema=RowSchema.of(SLOTS),
            num_threads=2,
        )
        options = ServerOptions(
            port=0, replica_index=index, replica_size=replicas, generation=generation, sources=sources
        )
        self.elastic = ElasticServer(self.session, self.native, options, port, GlobalConfig())
        info = ServiceInfo(
            role=EMBEDDING_PARAMETER_SERVER,
            index=index,
            replicas=replicas,
            incarnation=self.native.incarnation,
            generation=generation,
        )
        self.advertiser = Advertiser(self.session, info, **self.elastic.advertisement())
        self.refusals = Refusals(self.elastic.handle_checkpoint)
        self._subject = self.session.subjects.resize(generation, index)

    def start(self) -> None:
        checkpoint = self.session.subjects.checkpoint(self.share.index)
        self.session.respond(checkpoint, self.refusals)
        self.advertiser.start(is_silent=not self.elastic.is_serving)
        self.elastic.start(self.advertiser, CheckpointService(self.share))

    def ask(self, step: Step, **more: Any) -> ResizeReport:
        request = ResizeRequest(step=step, **more)
        return ResizeReport.decode(self.session.request(self._subject, request.encode(), WAIT_S))

    def stop(self) -> None:
        self.advertiser.stop()
        self.session.close()
        self.native.stop(1.0)


class Job:
    """Servers of one process, and who coordinates their checkpoints."""

    def __init__(self, resources: ExitStack) -> None:
        self._resources = resources
        self.broker = LocalBroker()
        self._session = LocalSession(self.broker, name="trainer")
        self.on_found: Callable[[], None] = lambda: None
        self.checkpoints = Checkpoints(self._find, deadline_s=WAIT_S)

    def start(self, replicas: int, **options: int) -> list[Server]:
        servers = [Server(self.broker, index, replicas, **options) for index in range(replicas)]
        for server in servers:
            self._resources.callback(server.stop)
            server.start()
        return servers

    def _find(self) -> list[Peer]:
        peers = find_servers(self._session, WAIT_S)
        self.on_found()
        return peers


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as resources:
        yield Job(resources)


def on_all(servers: list[Server], step: Step, **more: Any) -> list[ResizeReport]:
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(lambda server: server.ask(step, **more), servers))


# Virtual shards that are on server 0 or 1 by default.
MOVED = tuple((shard, 1 - shard % 2) for shard in range(0, 2000, 2))


@pytest.mark.parametrize(("before", "after", "moved"), [(2, 3, ()), (3, 2, ()), (2, 2, MOVED), (3, 2, MOVED)])
def test_a_dump_that_waits_for_other_servers_has_all_rows(
    job: Job, checkpoint: Path, tmp_path: Path, before: int, after: int, moved: MovedShards
) -> None:
    old = job.start(before)
    job.checkpoints.load(Source(checkpoint))
    new = job.start(after, generation=1, sources=before)
    reports = on_all(new, Step.WHO)
    targets = tuple((report.address, report.incarnation) for report in reports)
    on_all(old, Step.COPY, targets=targets, moved_shards=moved)
    dump = DumpRequest(tmp_path / "dump")
    with ThreadPoolExecutor(1) as pool:
        dumped = pool.submit(job.checkpoints.dump, dump)
        assert all(server.refusals.happened.wait(WAIT_S) for server in old)
        for _ in Attempts(WAIT_S):
            if all(report.state == "following" for report in on_all(old, Step.WHO)):
                break
        on_all(old, Step.HAND_OVER)
        for server in old:
            server.refusals.happened.clear()
            assert server.refusals.happened.wait(WAIT_S)
        on_all(new, Step.SERVE)
        for server in old:
            server.stop()
        dumped.result(WAIT_S)
    section = Manifest.read(dump.directory)[0].require_embeddings(dump.directory)
    assert len(section.servers) == after
    assert np.array_equal(rows_of(dump.directory), rows_of(checkpoint))
    numbers = [server.native.stats()["num_rows"] for server in new]
    assert [server.advertiser.info.moved_shards for server in new] == [moved] * after
    # A load gives each server the rows that workers ask it for.
    job.checkpoints.load(Source(checkpoint))
    assert [server.native.stats()["num_rows"] for server in new] == numbers
    if moved:
        assert numbers[1] > 1.5 * numbers[0]


def test_a_load_begins_anew_with_the_servers_that_have_taken_over(job: Job, checkpoint: Path) -> None:
    old, new = job.start(2), list[Server]()

    def replaced() -> None:
        if not new:
            for server in old:
                server.stop()
            new.extend(job.start(3, generation=1))

    job.on_found = replaced
    job.checkpoints.load(Source(checkpoint))
    section = Manifest.read(Source(checkpoint).location)[0].require_embeddings(Source(checkpoint).location)
    assert sum(server.native.stats()["num_rows"] for server in new) == section.num_rows


class SlowStore:
    """Takes snapshots only when `may_snapshot` is set."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.snapshots, self.may_snapshot = threading.Event(), threading.Event()

    def begin_snapshot(self, *arguments: Any, **options: Any) -> Any:
        self.snapshots.set()
        assert self.may_snapshot.wait(WAIT_S)
        return self._store.begin_snapshot(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_nothing_else_waits_for_the_snapshot_of_a_dump(job: Job, tmp_path: Path) -> None:
    server = Server(job.broker, 0, 1)
    store = SlowStore(server.share.store)
    server.share = replace(server.share, store=store)  # type: ignore[arg-type]
    server.start()

    def ask(verb: Verb, **more: Any) -> Report:
        request = Request(verb=verb, operation=make_dump_id(), **more)
        subject = server.session.subjects.checkpoint(0)
        return Report.decode(server.session.request(subject, request.encode(), WAIT_S))

    with ThreadPoolExecutor(3) as pool:
        try:
            dump = pool.submit(ask, Verb.DUMP, arguments={"directory": str(tmp_path)})
            assert store.snapshots.wait(WAIT_S)
            assert pool.submit(ask, Verb.CHANGES).result(WAIT_S).state is State.DONE
            # Nor does a copy, which the coordinator may have given up by then.
            copy = pool.submit(server.ask, Step.COPY, targets=(("127.0.0.1:1", "1"),))
            with pytest.raises(FailedPreconditionError, match="a checkpoint is being written"):
                copy.result(WAIT_S)
        finally:
            store.may_snapshot.set()
        with pytest.raises(FailedPreconditionError, match="no optimizer"):
            dump.result(WAIT_S)
    server.stop()


class SlowServer:
    """In place of a native server: is given up while it begins to copy."""

    was_sent_rows = has_handed_over = False
    incarnation, transfer, transfer_refusal = 1, None, ""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.give_up: Callable[[], object] = lambda: None

    def begin_transfer(self, *_: object, **__: object) -> None:
        self._thread = threading.Thread(target=self.give_up)
        self._thread.start()
        self._thread.join(0.2)  # enough for one that does not wait
        self.calls.append("begin")

    def resume(self) -> None:
        self.calls.append("resume")

    def join(self) -> None:
        self._thread.join(WAIT_S)


def test_a_copy_that_is_given_up_while_it_begins_does_not_stay() -> None:
    session, server = LocalSession(LocalBroker(), name="server"), SlowServer()
    elastic = ElasticServer(session, server, ServerOptions(port=0), 0, GlobalConfig())  # type: ignore[arg-type]
    elastic.start(None, None)  # type: ignore[arg-type]

    def ask(step: Step) -> None:
        session.request(session.subjects.resize(0, 0), ResizeRequest(step=step).encode(), WAIT_S)

    server.give_up = lambda: ask(Step.GIVE_UP)
    ask(Step.COPY)
    server.join()
    assert server.calls == ["begin", "resume"]
