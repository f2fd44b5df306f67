"""A job in the simulation: its processes, made of the product's classes, and what they must hold.

One or two parameter servers, each with a standby, two embedding workers, a data loader and a rank that
trains one batch after the other, each on a host of its own, and a broker. What starts the classes is
written here, as the roles do it, because those also read files, open ports for metrics and handle signals.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.simulation import native
from benchmarks.simulation.broker import Broker, Session
from benchmarks.simulation.kernel import Kernel, Killed, Process, Thread
from benchmarks.simulation.rows import Store
from benchmarks.simulation.stand_ins import DEADLINE_S
from persia import waiting
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import find_servers
from persia.checkpoint.server_job import ServerShare
from persia.checkpoint.service import CheckpointService
from persia.config.global_config import EmbeddingParameterServerConfig
from persia.errors import PersiaError, RowsLostError
from persia.job.lost_rows import OnLostRows, RowsGuard
from persia.messaging.discovery import Advertiser, Directory, ServiceInfo
from persia.messaging.subjects import (
    DATA_LOADER,
    EMBEDDING_PARAMETER_SERVER,
    EMBEDDING_WORKER,
    NN_WORKER,
)
from persia.pipeline import backend
from persia.pipeline.position import DataPosition, stripe_of
from persia.pipeline.receive import StreamReceiver
from persia.pipeline.send import BatchSender, RegisterBatchHandler
from persia.roles.embedding_worker import ServerLinks, watch_ranks
from persia.roles.replica import Replica, config_hash, starts_as_standby
from persia.roles.standby import Pair
from persia.storage.location import Location
from persia.storage.versions import LATEST_NAME, resolve

NUM_BATCHES = 24
_MODES = ("",)
_SCHEMA = "simulation"
_MAX_WAITING = 8
_NUM_WORKERS = 2
_BROKER_HOST = 1
_READ_S = 0.3
_STEPS_A_CHECKPOINT = 5
_TO_CONFIRM = 2_000_000_000  # that a standby needs to ask its primary after a cut


@dataclass
class Role:
    """A place in the job, in which a process is started again when the one before has ended."""

    name: str
    host: int
    main: Callable[[Process], None]
    process: Process | None = None
    num_starts: int = 0
    is_done: bool = False  # its work is: it is not started again


@dataclass
class Job:
    kernel: Kernel
    deadline_s: int = 2
    num_servers: int = 1
    num_loaders: int = 1
    num_batches: int = NUM_BATCHES
    step_s: float = 0.15
    trained: list[int] = field(default_factory=list)
    servers: dict[int, native.ParameterServer] = field(default_factory=dict)  # by process number
    workers: list[native.EmbeddingWorker] = field(default_factory=list)
    sessions: dict[int, Session] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    reads: bool = False
    directory: str = ""  # of checkpoints; the job returns to the newest one; empty: it takes none
    may_lose_rows: bool = False  # both copies, by faults of a server and the broker at a time
    has_lost_rows: bool = False
    num_roll_backs: int = 0

    def __post_init__(self) -> None:
        kernel = self.kernel
        self.broker = Broker(kernel, _BROKER_HOST)
        self.section = EmbeddingParameterServerConfig(standbys=1, standby_deadline_sec=self.deadline_s)
        self.pairs = [(f"server {index}", f"standby {index}") for index in range(self.num_servers)]
        mains: list[tuple[str, Callable[[Process], None]]] = [
            (name, partial(self._serve, index=index, is_forced=is_forced))
            for index, pair in enumerate(self.pairs)
            for name, is_forced in zip(pair, (False, True), strict=True)
        ]
        mains += [(f"worker {index}", partial(self._work, index=index)) for index in range(_NUM_WORKERS)]
        self.loader_names = ["loader", "loader 1"][: self.num_loaders]
        mains += [("rank", self._train)]
        mains += [(name, partial(self._load, index=i)) for i, name in enumerate(self.loader_names)]
        for host, (name, main) in enumerate(mains, start=_BROKER_HOST + 1):
            self.roles[name] = Role(name, host, main)

    # ---- the supervisor

    def start(self) -> None:
        for role in self.roles.values():
            self._start(role)

    def _start(self, role: Role) -> None:
        kernel = self.kernel
        role.num_starts += 1
        process = role.process = Process(kernel, f"{role.name}#{role.num_starts}", role.host)
        process.on_killed.append(lambda: self._restart(role))
        process.start(lambda: role.main(process))

    def _restart(self, role: Role) -> None:
        if role.name == "rank" and not role.is_done:
            self._go_back()
        if not role.is_done:
            self.kernel.later(self.kernel.random.uniform(0.3, 1.5), lambda: self._start(role))

    def _go_back(self) -> None:
        """The rank has ended: the supervisor starts it and the data loaders again."""
        self.num_roll_backs += 1
        for loader in (self.roles[name] for name in self.loader_names):
            was_done, loader.is_done = loader.is_done, False
            if loader.process is not None:
                loader.process.kill()
            if was_done:
                self._restart(loader)

    @property
    def is_trained(self) -> bool:
        return self.roles["rank"].is_done

    def server_of(self, name: str) -> native.ParameterServer | None:
        process = self.roles[name].process
        if process is None or process.is_dead:
            return None
        return self.servers.get(process.number)

    @property
    def server_names(self) -> list[str]:
        return [name for pair in self.pairs for name in pair]

    def primaries(self, index: int) -> list[tuple[str, native.ParameterServer]]:
        """Servers of an index that began as one, or have taken over."""
        found = []
        for name in self.pairs[index]:
            server = self.server_of(name)
            if server is not None and self.kernel.library.log_state(server.handle) in (-1, 1):
                found.append((name, server))
        return found

    def has_two_copies(self) -> bool:
        """Whether each server replicates to a standby that lives and has every row; all run."""
        return all(map(self._has_two_copies, range(self.num_servers)))

    def _has_two_copies(self, index: int) -> bool:
        pair = self.pairs[index]
        if any((process := self.roles[name].process) and process.is_frozen for name in pair):
            return False
        for name, server in self.primaries(index):
            other = self.server_of(pair[1 - pair.index(name)])
            if server.replication == "replicating" and other is not None and other.is_standby_with_rows:
                return True
        return False

    def reaches_broker(self) -> bool:
        """Whether all servers do, for long enough to have heard of each other."""
        processes = [self.roles[name].process for name in self.server_names]
        sessions = [self.sessions.get(p.number) for p in processes if p is not None and not p.is_dead]
        since = self.kernel.now - _TO_CONFIRM
        return self.broker.is_up and all(
            session is None or (session.is_connected and session.connected_at < since) for session in sessions
        )

    def _connect(self, process: Process) -> Any:
        # A process starts only when it reaches the broker.
        for _ in waiting.Attempts(DEADLINE_S, pause_s=0.2):
            if self.broker.is_up and not self.kernel.is_cut(process.host, _BROKER_HOST):
                break
        session = self.sessions[process.number] = Session(self.broker, process)
        return session

    # ---- the processes

    def _serve(self, process: Process, index: int, *, is_forced: bool) -> None:
        while not self._serve_once(process, index, is_forced=is_forced):
            self.kernel.log("%s was released, and starts again", process.name)

    def _serve_once(self, process: Process, index: int, *, is_forced: bool) -> bool:
        """As persia.roles.parameter_server._serve_training."""
        with ExitStack() as stack:
            session = self._connect(process)
            stack.callback(session.close)
            is_standby = is_forced or starts_as_standby(session, index)
            place = (index, self.num_servers)
            server: Any = native.ParameterServer(*place, self.deadline_s, is_standby=is_standby)
            self.servers[process.number] = server
            address = f"{process.address}:{server.start(process.address)}"
            stack.callback(server.stop)
            pair_replica = Replica(session, server, index, address)
            stack.callback(pair_replica.close)
            pair = Pair(pair_replica, config_hash(self.section, self.num_servers, _SCHEMA), self.section)
            if is_standby and not pair.follow(is_forced=is_forced):
                return False
            store: Any = Store(server, *place)
            checkpoints = stack.enter_context(closing(CheckpointService(_share(store, *place))))
            pair.lead(checkpoints)
            stack.callback(pair.close)
            info = self._info(
                EMBEDDING_PARAMETER_SERVER,
                index,
                self.num_servers,
                incarnation=server.incarnation,
                address=address,
                has_rows=is_standby,
                term=pair.advertisement()["term"],
            )
            arguments = pair.advertisement()
            advertiser = Advertiser(
                session, info, replaces=arguments["replaces"], is_serving=arguments["is_serving"]
            )
            subject = session.subjects.checkpoint(index)
            advertiser.start(lambda: session.respond(subject, pair.handle_checkpoint))
            pair.start(advertiser)
            self.kernel.log("%s is the primary, %s", process.name, info.has_rows)
            while True:
                self.kernel.sleep(3600.0)

    def _info(self, role: str, index: int, replicas: int, **values: Any) -> ServiceInfo:
        values.setdefault("incarnation", self.kernel.random.getrandbits(63) | 1)
        return ServiceInfo(role=role, index=index, replicas=replicas, schema=_SCHEMA, **values)

    def _work(self, process: Process, index: int) -> None:
        """As persia.roles.embedding_worker.run_embedding_worker."""
        session = self._connect(process)
        directory = Directory(session)
        servers = directory.wait_for(EMBEDDING_PARAMETER_SERVER, DEADLINE_S)
        worker: Any = native.EmbeddingWorker(len(servers), _MAX_WAITING)
        self.workers.append(worker)
        links = ServerLinks(worker, len(servers))
        for server in servers:
            links.connect(server)
        directory.watch(EMBEDDING_PARAMETER_SERVER, links.on_event)
        for server in directory.wait_for(EMBEDDING_PARAMETER_SERVER, DEADLINE_S, len(servers)):
            links.connect(server)
        address = f"{process.address}:{worker.start(process.address)}"
        info = self._info(
            EMBEDDING_WORKER,
            index,
            _NUM_WORKERS,
            incarnation=worker.incarnation,
            address=address,
            slot_modes=_MODES,
        )
        responder = RegisterBatchHandler.of_worker(worker)
        Advertiser(session, info).start(lambda: session.respond(session.subjects.ids(index), responder))
        watch_ranks(directory, worker)
        while True:
            self.kernel.sleep(3600.0)

    def _train(self, process: Process) -> None:
        """As BatchPipeline and TrainCtx, one batch at a time."""
        session = self._connect(process)
        directory = Directory(session)
        guard = RowsGuard(directory, OnLostRows.RAISE, self._on_lost)
        workers = backend.ClusterBackend(directory)
        workers.configure(object())  # type: ignore[arg-type]  # that of the library, also for later workers
        checkpoints = Checkpoints(lambda: find_servers(session, DEADLINE_S), deadline_s=DEADLINE_S)
        before = self._load_newest(checkpoints, guard) if self.directory else DataPosition()
        stream = StreamReceiver(
            session,
            directory,
            rank=0,
            world_size=1,
            buffer_size=4,
            ordered=True,
            trained=before,
            remedy="",
            failure=lambda: "",
            on_received=lambda: None,
            on_superseded=lambda batch: _release(self.kernel, workers, batch.reference),
            on_taken=lambda _request: b"",
        )
        Advertiser(session, self._info(NN_WORKER, 0, 1)).start()
        if self.reads:
            Thread(target=_read, args=(self.kernel, workers.client)).start()
        while (batch := stream.take()) is not None:
            assert batch.reference is not None
            result = workers.lookup(batch.reference, requires_grad=True, id_features=batch.id_features)
            self.kernel.sleep(self.kernel.random.uniform(0.0, 2 * self.step_s))
            workers.return_gradients(result.reference, result, scale=1.0)  # type: ignore[arg-type]
            stream.yielded(batch.batch_id)
            self.trained.append(batch.batch_id)
            self.kernel.log("step %d", batch.batch_id)
            if self.directory and len(self.trained) % _STEPS_A_CHECKPOINT == 0:
                guard.check()
                bounds = stream.inbox.bounds(())
                assert bounds is not None
                self._dump(checkpoints, before.joined(stripe_of([bounds])), blocking=False)
        checkpoints.close(finish=True)
        if self.directory:
            guard.check()  # the last steps may have been trained without the rows
        for name in ("rank", *self.loader_names):
            self.roles[name].is_done = True
        while True:
            self.kernel.sleep(3600.0)

    def _load_newest(self, checkpoints: Checkpoints, guard: RowsGuard) -> DataPosition:
        """As PeriodicCheckpoints.begin; returns the position of the data."""
        root = Location.of(self.directory)
        if not (root / LATEST_NAME).exists_replaced():
            self.trained.clear()
            self._dump(checkpoints, DataPosition(), blocking=True)
            return DataPosition()
        source = Source(resolve(root))
        missing = guard.missing()
        checkpoints.load(source)
        guard.loaded(missing)
        manifest = source.manifest
        assert manifest.step is not None
        assert manifest.trained is not None
        del self.trained[manifest.step :]
        self.kernel.log("continues after step %d", manifest.step)
        return manifest.trained

    def _dump(self, checkpoints: Checkpoints, position: DataPosition, *, blocking: bool) -> None:
        def on_failure(error: PersiaError) -> None:
            self.kernel.log("a dump failed: %s", error)

        checkpoints.dump(
            DumpRequest(
                self.directory,
                step=len(self.trained),
                trained=position,
                keep_last=2,
                blocking=blocking,
                on_failure=None if blocking else on_failure,
            )
        )

    def _on_lost(self, error: RowsLostError) -> None:
        if self.directory:  # as RollBack: the supervisor starts the process again
            self.kernel.process.kill()
            raise Killed
        if not self.may_lose_rows:
            self.kernel.fail(f"rows are lost: {error}")
        self.has_lost_rows = True

    def _load(self, process: Process, index: int) -> None:
        """As DataCtx with `resume`."""
        session = self._connect(process)
        sender = BatchSender(session, Directory(session), index, self.num_loaders, DEADLINE_S)
        Advertiser(session, self._info(DATA_LOADER, index, self.num_loaders)).start()
        sender.wait_for_job()
        sender.resume()
        while sender.next_batch_id < self.num_batches:
            ids = native.id_features(self.kernel.library, sender.next_batch_id)
            sender.send(ids, b"dense", requires_grad=True)
        sender.end(None, DEADLINE_S)
        self.roles[self.loader_names[index]].is_done = True


def _share(store: Any, index: int, replicas: int) -> ServerShare:
    return ServerShare(
        store=store, index=index, replicas=replicas, schema=None, num_threads=1, dump_percent=100
    )


def _read(kernel: Kernel, client: Any) -> None:
    """Asks what a server answers only as the primary, also while others change."""
    while True:
        try:
            client.count_rows(_READ_S)
        except PersiaError as error:
            kernel.log("a read fails: %s", error)
        kernel.sleep(_READ_S)


def _release(kernel: Kernel, workers: backend.ClusterBackend, reference: Any) -> None:
    try:
        workers.release(reference)
    except PersiaError as error:
        kernel.log("a batch was not released: %s", error)
