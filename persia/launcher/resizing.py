"""Changes of the number of parameter servers of a job while it trains (ADR 34), or of their load (ADR 67), by
who supervises it.

In: the supervisor with the job's processes, and the number that is wanted. New servers are started beside the
old ones, and get their rows; then they take over, and the old ones end. Until all old ones have handed over,
whatever fails is given up: the new servers end, and the old ones continue. What fails afterwards ends the new
ones, which is the death of parameter servers: the job returns to its last checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, StrictBool

from persia import env
from persia.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PersiaError,
    UnavailableError,
)
from persia.launcher.hand_over import (
    HandOver,
    Server,
    ask,
    ask_all,
    attempts,
    check_replaceable,
    servers,
    targets_of,
)
from persia.launcher.process_specs import STANDBY, ProcessSpecs
from persia.launcher.restarts import how_it_ended
from persia.launcher.supervisor import ManagedProcess, ProcessSpec, Supervisor, terminate
from persia.messaging.interface import Registration
from persia.messaging.payloads import MAX_REPLICAS, JsonMessage
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.elastic import Step
from persia.security import audit
from persia.validation import Count

_END_S = 10.0
_INTERRUPT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ResizeState(JsonMessage):
    """What has become of a change; for the command that asked for it."""

    what = "resize state"

    before: Count
    after: Count
    number: Count = 0  # of the changes of this job
    num_moved_shards: Count = 0  # virtual shards that the new servers have elsewhere than by default
    step: str
    is_over: bool = False
    has_new_servers: bool = False  # the job has as many as `after` says, also if these have failed
    num_rows: Count = 0
    num_bytes: Count = 0
    copy_s: float = 0.0  # until the servers handed over
    pause_s: float = 0.0  # from then until all new servers answered
    failure: str = ""

    @property
    def outcome(self) -> str:
        """Of one that has failed."""
        if self.has_new_servers:
            return f"the {self.after} new parameter servers were ended, and the job returns to its checkpoint"
        return f"still {self.before} parameter servers"


class Resizer:
    """The parameter servers of a job, whose number may change. Thread-safe."""

    def __init__(
        self,
        supervisor: Supervisor,
        session: NatsSession,
        specs: ProcessSpecs,
        num_servers: int,
    ) -> None:
        self._supervisor, self._session, self._specs = supervisor, session, specs
        self._lock = threading.Lock()  # one change at a time
        # Generations are never used twice: who watches the job for longer ignores those below the highest.
        self._num_servers, self._generation, self._last_generation = num_servers, 0, 0
        self._names_lock = threading.Lock()
        self._names = [spec.name for spec in self.specs()]  # of the processes that have the rows, by index
        self._is_cancelled, self._is_closed = threading.Event(), threading.Event()
        self.state = ResizeState(before=num_servers, after=num_servers, step="none", is_over=True)

    def specs(self) -> list[ProcessSpec]:
        """The servers as the job has them when it is started again: as many as now, without rows."""
        return [self._spec(index, self._num_servers, self._generation) for index in range(self._num_servers)]

    @property
    def num_servers(self) -> int:
        return self._num_servers

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    def is_expendable(self, name: str) -> bool:
        """Whether it is a parameter server that does not have the rows yet, or no more."""
        is_server = name.startswith(f"{EMBEDDING_PARAMETER_SERVER}-") and not name.endswith(STANDBY)
        with self._names_lock:
            return is_server and name not in self._names

    def cancel(self) -> None:
        """Gives up what can be given up, and returns after that. For a job whose processes have been killed,
        and that is about to be started again.
        """
        self._is_cancelled.set()
        with self._interrupted():
            if self._last_generation:
                self._last_generation += 1
                self._generation = self._last_generation
            with self._names_lock:
                self._names = [spec.name for spec in self.specs()]
            if not self.is_closed:
                self._is_cancelled.clear()

    def close(self) -> None:
        """The job ends: no change begins any more, and the old servers of one under way stay as they are."""
        self._is_closed.set()
        self.cancel()

    def resize(self, num_servers: int, *, rebalances: bool = False) -> ResizeState:
        """Returns when the new servers answer and the old ones have ended. FailedPreconditionError: with what
        the servers have, their number cannot be changed; nothing was started. Other errors: it has failed;
        `state` says which servers the job has.

        `rebalances`: as many servers as before, whose load is uneven.
        """
        self.begin(num_servers, rebalances=rebalances)
        return self.finish()

    def begin(self, num_servers: int, *, rebalances: bool = False) -> None:
        """The first part of `resize`, which refuses. `finish` must follow, on any thread."""
        if not self._lock.acquire(blocking=False):
            raise FailedPreconditionError("the number of parameter servers is being changed already")
        try:
            num_servers = num_servers or (self._num_servers if rebalances else 0)
            self._check(num_servers, rebalances=rebalances)
            self._last_generation += 1
            self.state = ResizeState(
                before=self._num_servers,
                after=num_servers,
                number=self._last_generation,
                step="start",
            )
        except BaseException:
            self._lock.release()
            raise

    def finish(self) -> ResizeState:
        """The second part of `resize`."""
        try:
            with self._failing():
                self._run(self.state.after)
            return self.state
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _interrupted(self) -> Iterator[None]:
        """The block runs once no change is under way. Requests of one that is do not wait for answers."""
        # Again and again: one may just begin to wait.
        while not self._lock.acquire(timeout=_INTERRUPT_S):
            for generation in (self._generation, self._last_generation):
                for index in range(max(self._num_servers, self.state.after)):
                    self._session.interrupt(self._session.subjects.resize(generation, index))
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._note(is_over=True, failure=f"{type(error).__name__}: {error}")
            raise
        self._note(is_over=True, step="done")

    def _note(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def _check(self, num_servers: int, *, rebalances: bool) -> None:
        if self.is_closed:
            raise UnavailableError("the job is ending")
        if num_servers < 1:
            raise InvalidArgumentError(f"{num_servers} parameter servers: a job has at least one")
        if num_servers == self._num_servers and not rebalances:
            raise FailedPreconditionError(f"the job has {num_servers} parameter servers already")
        check_replaceable(ask_all(self._session, self._old(), Step.WHO))

    def _run(self, num_servers: int) -> None:
        generation = self._last_generation
        old, processes = self._old(), list[ManagedProcess]()
        steps = HandOver(
            self._session,
            old,
            servers(generation, num_servers),
            check=lambda: self._check_continues(processes),
            note=self._note,
        )
        moved = steps.place()  # nothing is started if it cannot be more even
        try:
            self._start_new(generation, num_servers, processes)
            steps.copy(targets_of(steps.await_new()), moved)
            copied = time.monotonic()
            steps.hand_over()
            before = self._commit(generation, processes)
        except BaseException:
            self._give_up(old, processes)
            raise
        try:
            steps.serve()
            self._note(step="end", pause_s=time.monotonic() - copied)
        except BaseException:
            # Old ones answer no more, and new ones perhaps not all. The end of these is one of parameter
            # servers, so the job returns to its last checkpoint.
            self._kill(processes)
            raise
        finally:
            terminate([process for process in self._supervisor.processes if process.name in before], _END_S)

    def _commit(self, generation: int, processes: Sequence[ManagedProcess]) -> list[str]:
        """From here on the new servers have the rows, whatever happens. Returns the names of the old ones."""
        # Under the lock: the end of a process that was expendable before must be seen here.
        with self._names_lock:
            _check_running(processes)
            before, self._names = self._names, [process.name for process in processes]
        self._num_servers, self._generation = len(processes), generation
        self._note(step="serve", has_new_servers=True)
        for process, spec in zip(processes, self.specs(), strict=True):
            # One that is started again finds no server that would send it rows.
            process.spec = replace(spec, name=process.name)
        return before

    def _old(self) -> list[Server]:
        return servers(self._generation, self._num_servers)

    def _spec(self, index: int, num_servers: int, generation: int) -> ProcessSpec:
        spec = self._specs.server(EMBEDDING_PARAMETER_SERVER, index, num_servers)
        return replace(spec, command=(*spec.command, f"--generation={generation}")) if generation else spec

    def _start_new(self, generation: int, num_servers: int, processes: list[ManagedProcess]) -> None:
        """Appends to `processes` what has been started, also if it fails."""
        for index in range(num_servers):
            spec = self._spec(index, num_servers, generation)
            command = (*spec.command, f"--sources={self._num_servers}")
            # Never the name of an old one, which is ended by it.
            of = f"of-{num_servers}" if num_servers != self._num_servers else f"generation-{generation}"
            spec = replace(spec, name=f"{spec.name}-{of}", command=command)
            processes.append(self._supervisor.start(spec))

    def _check_continues(self, processes: Sequence[ManagedProcess]) -> None:
        if self._is_cancelled.is_set():
            raise UnavailableError("the job is being started again")
        _check_running(processes)

    def _give_up(self, old: Sequence[Server], processes: Sequence[ManagedProcess]) -> None:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        with ThreadPoolExecutor(len(old)) as pool:
            list(pool.map(self._release, range(len(old))))
        self._kill(processes)

    def _release(self, index: int) -> None:
        """Returns when the old server has forgotten the new ones, or has ended: it would answer nothing, or
        refuse checkpoints and further changes, as long as it lives.
        """
        waiting = f"parameter server {index} to forget the change of their number"
        for _ in attempts(waiting, longest_pause_s=2.0):
            if self.is_closed or self._process(index).exit_code is not None:
                return
            with contextlib.suppress(PersiaError):
                ask(self._session, (self._generation, index), Step.GIVE_UP)
                return
        self._kill([self._process(index)])

    def _process(self, index: int) -> ManagedProcess:
        """The one that has the rows of this server."""
        return next(one for one in self._supervisor.processes if one.name == self._names[index])

    def _kill(self, processes: Sequence[ManagedProcess]) -> None:
        self._supervisor.kill([process.name for process in processes])


def _check_running(processes: Sequence[ManagedProcess]) -> None:
    for process in processes:
        if process.exit_code is not None:
            written = process.output[-2000:]
            raise UnavailableError(f"{process.name} {how_it_ended(process)}\n{written}".rstrip())


@dataclass(frozen=True, kw_only=True)
class ResizeQuestion(JsonMessage):
    """The command to who supervises the job. 0: what has become of the last change."""

    what = "resize question"

    parameter_servers: Annotated[Count, Field(le=MAX_REPLICAS)] = 0
    rebalances: StrictBool = False


class ResizeService:
    """Answers `persia-launcher resize` until `close`; the changes run on threads of their own."""

    def __init__(self, resizer: Resizer, session: NatsSession, tell: Callable[[str], None]) -> None:
        """Connects `session`, and does not wait for that: the job may need no change."""
        self._resizer, self._session, self._tell = resizer, session, tell
        self._registration: Registration | None = None
        threading.Thread(target=self._listen, name="persia-resize-listen", daemon=True).start()

    def close(self) -> None:
        self._resizer.close()
        if self._registration is not None:
            self._registration.close()

    def _listen(self) -> None:
        session = self._session
        try:
            session.connect(env.get_deadline_s())
            self._registration = session.respond(session.subjects.resize_job, self._answer, max_concurrency=1)
        except PersiaError as error:
            if not self._resizer.is_closed:
                self._tell(f"parameter servers: their number cannot be changed: {error}")

    def _answer(self, payload: bytes) -> bytes:
        question = ResizeQuestion.decode(payload)
        if question.parameter_servers or question.rebalances:
            self._begin(question)
        return self._resizer.state.encode()

    def _begin(self, wanted: ResizeQuestion) -> None:
        outcome = "ok"
        try:
            self._resizer.begin(wanted.parameter_servers, rebalances=wanted.rebalances)
        except Exception as error:
            outcome = type(error).__name__
            self._tell(f"parameter servers: not changed: {error}")
            raise
        finally:
            # The broker says no sender; it lets this role ask.
            audit.record(
                peer="NATS",
                role="admin",
                method="resize",
                outcome=outcome,
                parameter_servers=wanted.parameter_servers,
            )
        threading.Thread(target=self._finish, name="persia-resize", daemon=True).start()

    def _finish(self) -> None:
        try:
            done = self._resizer.finish()
            self._tell(f"parameter servers: {done.before} were replaced by {done.after}")
        except Exception as error:
            self._tell(f"parameter servers: {self._resizer.state.outcome}: {error}")
