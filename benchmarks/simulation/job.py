"""A job in the simulation: its processes, made of the product's classes, and what they must hold.

One parameter server with its standby, two embedding workers, a data loader and a rank that trains one batch
after the other, each on a host of its own, and a broker. What starts the classes is written here, as the
roles do it, because those also read files, open ports for metrics and handle signals.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulation import native
from benchmarks.simulation.broker import Broker, Session
from benchmarks.simulation.kernel import Clock, Kernel, Killed, Process, Thread, Threading, patched
from persia import waiting
from persia.config.global_config import EmbeddingParameterServerConfig
from persia.errors import PersiaError, RowsLostError
from persia.job.lost_rows import OnLostRows, RowsGuard
from persia.logger import get_default_logger
from persia.messaging import discovery
from persia.messaging.discovery import Advertiser, Directory, ServiceInfo
from persia.messaging.subjects import (
    DATA_LOADER,
    EMBEDDING_PARAMETER_SERVER,
    EMBEDDING_WORKER,
    NN_WORKER,
)
from persia.pipeline import backend, failover, loader_watch, queues, receive, send
from persia.pipeline.position import DataPosition
from persia.pipeline.receive import StreamReceiver
from persia.pipeline.send import BatchSender, RegisterBatchHandler
from persia.roles import embedding_worker, replica, standby
from persia.roles.embedding_worker import ServerLinks
from persia.roles.replica import Replica, config_hash, starts_as_standby
from persia.roles.standby import Pair

DEADLINE_S = 120.0
NUM_BATCHES = 24
_MODES = ("",)
_SCHEMA = "simulation"
_MAX_WAITING = 8
_READ_S = 0.3
_TO_CONFIRM = 2_000_000_000  # that a standby needs to ask its primary after a cut


class _Sockets:
    """In place of the module socket: whether a port is open."""

    class _Connection:
        def close(self) -> None: ...

        def __enter__(self) -> _Sockets._Connection:
            return self

        def __exit__(self, *_exc_info: object) -> None: ...

    @classmethod
    def create_connection(cls, address: tuple[str, int], timeout: float) -> _Sockets._Connection:
        kernel = Kernel.current
        kernel.sleep(kernel.random.uniform(0.0001, 0.003))
        host = int(address[0].removeprefix("host"))
        probe = kernel.probes[host]
        if kernel.library.is_cut(kernel.process.number, probe):
            kernel.sleep(timeout)
            raise TimeoutError
        if not kernel.library.listens(f"{address[0]}:{address[1]}".encode()):
            raise ConnectionRefusedError
        return cls._Connection()


class _Exit:
    """In place of the module os."""

    @staticmethod
    def _exit(code: int) -> None:
        Kernel.current.log("ends with exit code %d", code)
        Kernel.current.process.kill()
        raise Killed


class _Pool:
    """In place of DaemonPool."""

    def __init__(self, _num_threads: int, _name: str) -> None: ...

    class _Future:
        def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            self._answers: list[Any] = []
            self._thread = Thread(target=lambda: self._answers.append(function(*arguments)))
            self._thread.start()

        def result(self) -> Any:
            self._thread.join()
            return self._answers[0]

    def submit(self, function: Callable[..., Any], *arguments: Any) -> _Pool._Future:
        return self._Future(function, arguments)

    def close(self) -> None: ...


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        Kernel.current.log("  %s", record.getMessage())


@contextmanager
def simulated(kernel: Kernel) -> Iterator[None]:
    """The product's modules use threads, clocks and sockets of the simulation in the block."""
    both: dict[str, object] = {"threading": Threading, "time": Clock}
    modules: dict[Any, dict[str, object]] = {
        discovery: both,
        waiting: {"time": Clock},
        queues: both,
        failover: {**both, "socket": _Sockets},
        backend: {**both, "RemoteClient": native.RemoteClient, "DaemonPool": _Pool},
        loader_watch: {"time": Clock},
        receive: both,
        send: {"time": Clock, "random": kernel.random},
        embedding_worker: {"threading": Threading},
        replica: {**both, "socket": _Sockets},
        standby: {
            **both,
            "os": _Exit,
            "Presence": lambda session: replica.Presence(session, Clock.monotonic),
        },
    }
    environment = {"PERSIA_DEADLINE_SEC": str(DEADLINE_S), "PERSIA_LOADER_SILENCE_SEC": "60"}
    before = dict(os.environ)
    os.environ.update(environment)
    logger = get_default_logger()
    handlers, logger.handlers = logger.handlers, [_Handler()] if kernel.trace else []
    disabled, logger.disabled = logger.disabled, not kernel.trace
    try:
        with patched(modules):
            yield
    finally:
        logger.handlers, logger.disabled = handlers, disabled
        os.environ.clear()
        os.environ.update(before)


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
    num_batches: int = NUM_BATCHES
    step_s: float = 0.15
    trained: list[int] = field(default_factory=list)
    servers: dict[int, native.ParameterServer] = field(default_factory=dict)  # by process number
    workers: list[native.EmbeddingWorker] = field(default_factory=list)
    sessions: dict[int, Session] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    reads: bool = False
    may_lose_rows: bool = False  # both copies, by faults of a server and the broker at a time
    has_lost_rows: bool = False

    def __post_init__(self) -> None:
        kernel = self.kernel
        self.broker = Broker(kernel, 9)
        self.section = EmbeddingParameterServerConfig(standbys=1, standby_deadline_sec=self.deadline_s)
        for name, host, main in (
            ("server", 1, lambda process: self._serve(process, is_forced=False)),
            ("standby", 2, lambda process: self._serve(process, is_forced=True)),
            ("worker 0", 3, lambda process: self._work(process, 0)),
            ("worker 1", 4, lambda process: self._work(process, 1)),
            ("rank", 5, self._train),
            ("loader", 6, self._load),
        ):
            self.roles[name] = Role(name, host, main)
        # A process of each host that never ends, to see whether the host is reached.
        kernel.probes = {role.host: kernel.library.process(role.host) for role in self.roles.values()}

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
        if not role.is_done:
            self.kernel.later(self.kernel.random.uniform(0.3, 1.5), lambda: self._start(role))

    @property
    def is_trained(self) -> bool:
        return self.roles["rank"].is_done

    def server_of(self, name: str) -> native.ParameterServer | None:
        process = self.roles[name].process
        if process is None or process.is_dead:
            return None
        return self.servers.get(process.number)

    def primaries(self) -> list[tuple[str, native.ParameterServer]]:
        """Servers that began as one, or have taken over."""
        found = []
        for name in ("server", "standby"):
            server = self.server_of(name)
            if server is not None and self.kernel.library.log_state(server.handle) in (-1, 1):
                found.append((name, server))
        return found

    def has_two_copies(self) -> bool:
        """Whether a server replicates to a standby that lives and has every row; both run."""
        if any((process := self.roles[name].process) and process.is_frozen for name in ("server", "standby")):
            return False
        for name, server in self.primaries():
            other = self.server_of("standby" if name == "server" else "server")
            if server.replication == "replicating" and other is not None and other.is_standby_with_rows:
                return True
        return False

    def reaches_broker(self) -> bool:
        """Whether both servers do, for long enough to have heard of each other."""
        processes = [self.roles[name].process for name in ("server", "standby")]
        sessions = [self.sessions.get(p.number) for p in processes if p is not None and not p.is_dead]
        since = self.kernel.now - _TO_CONFIRM
        return self.broker.is_up and all(
            session is None or (session.is_connected and session.connected_at < since) for session in sessions
        )

    def _connect(self, process: Process) -> Any:
        # A process starts only when it reaches the broker.
        for _ in waiting.Attempts(DEADLINE_S, pause_s=0.2):
            if self.broker.is_up and not self.kernel.library.is_cut(
                process.number, self.broker.process.number
            ):
                break
        session = self.sessions[process.number] = Session(self.broker, process)
        return session

    # ---- the processes

    def _serve(self, process: Process, *, is_forced: bool) -> None:
        while not self._serve_once(process, is_forced=is_forced):
            self.kernel.log("%s was released, and starts again", process.name)

    def _serve_once(self, process: Process, *, is_forced: bool) -> bool:
        """As persia.roles.parameter_server._serve_training."""
        with ExitStack() as stack:
            session = self._connect(process)
            stack.callback(session.close)
            is_standby = is_forced or starts_as_standby(session, 0)
            server: Any = native.ParameterServer(0, 1, self.deadline_s, is_standby=is_standby)
            self.servers[process.number] = server
            address = f"{process.address}:{server.start(process.address)}"
            stack.callback(server.stop)
            pair_replica = Replica(session, server, 0, address)
            stack.callback(pair_replica.close)
            pair = Pair(pair_replica, config_hash(self.section, 1, _SCHEMA), self.section)
            if is_standby and not pair.follow(is_forced=is_forced):
                return False
            pair.lead(_Checkpoints())  # type: ignore[arg-type]
            stack.callback(pair.close)
            info = self._info(
                EMBEDDING_PARAMETER_SERVER,
                0,
                1,
                incarnation=server.incarnation,
                address=address,
                has_rows=is_standby,
                term=pair.advertisement()["term"],
            )
            arguments = pair.advertisement()
            advertiser = Advertiser(
                session, info, replaces=arguments["replaces"], is_serving=arguments["is_serving"]
            )
            advertiser.start()
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
            2,
            incarnation=worker.incarnation,
            address=address,
            slot_modes=_MODES,
        )
        responder = RegisterBatchHandler.of_worker(worker)
        Advertiser(session, info).start(lambda: session.respond(session.subjects.ids(index), responder))
        while True:
            self.kernel.sleep(3600.0)

    def _train(self, process: Process) -> None:
        """As BatchPipeline and TrainCtx, one batch at a time."""
        session = self._connect(process)
        directory = Directory(session)
        RowsGuard(directory, OnLostRows.RAISE, self._on_lost)
        workers = backend.ClusterBackend(directory)
        workers.configure(None)  # type: ignore[arg-type]
        stream = StreamReceiver(
            session,
            directory,
            rank=0,
            world_size=1,
            buffer_size=4,
            ordered=True,
            trained=DataPosition(),
            remedy="",
            failure=lambda: "",
            on_received=lambda: None,
            on_superseded=lambda batch: self._release(workers, batch.reference),
            on_taken=lambda _request: b"",
        )
        Advertiser(session, self._info(NN_WORKER, 0, 1)).start()
        if self.reads:
            Thread(target=self._read, args=(workers.client,)).start()
        while (batch := stream.take()) is not None:
            assert batch.reference is not None
            result = workers.lookup(batch.reference, requires_grad=True, id_features=batch.id_features)
            self.kernel.sleep(self.kernel.random.uniform(0.0, 2 * self.step_s))
            workers.return_gradients(batch.reference, result, scale=1.0)  # type: ignore[arg-type]
            stream.yielded(batch.batch_id)
            self.trained.append(batch.batch_id)
            self.kernel.log("step %d", batch.batch_id)
        self.roles["rank"].is_done = self.roles["loader"].is_done = True
        while True:
            self.kernel.sleep(3600.0)

    def _read(self, client: Any) -> None:
        """Asks what a server answers only as the primary, also while others change."""
        while True:
            try:
                client.count_rows(_READ_S)
            except PersiaError as error:
                self.kernel.log("a read fails: %s", error)
            self.kernel.sleep(_READ_S)

    def _release(self, workers: backend.ClusterBackend, reference: Any) -> None:
        try:
            workers.release(reference)
        except PersiaError as error:
            self.kernel.log("a batch was not released: %s", error)

    def _on_lost(self, error: RowsLostError) -> None:
        if not self.may_lose_rows:
            self.kernel.fail(f"rows are lost: {error}")
        self.has_lost_rows = True

    def _load(self, process: Process) -> None:
        """As DataCtx with `resume`."""
        session = self._connect(process)
        sender = BatchSender(session, Directory(session), 0, 1, DEADLINE_S)
        Advertiser(session, self._info(DATA_LOADER, 0, 1)).start()
        sender.wait_for_job()
        sender.resume()
        while sender.position < self.num_batches:
            ids = native.id_features(self.kernel.library, sender.position)
            sender.send(ids, b"dense", requires_grad=True)
        sender.end(None, DEADLINE_S)
        self.roles["loader"].is_done = True


class _Checkpoints:
    """In place of CheckpointService: no checkpoint is taken."""

    is_loading = False
