"""Changes of the number of parameter servers of a job while it trains (ADR 34), by who supervises it.

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

from pydantic import Field

from persia import env
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PersiaError,
    UnavailableError,
)
from persia.launcher.process_specs import STANDBY, ProcessSpecs
from persia.launcher.restarts import how_it_ended
from persia.launcher.supervisor import ManagedProcess, ProcessSpec, Supervisor, terminate
from persia.messaging.interface import Registration
from persia.messaging.payloads import MAX_REPLICAS, JsonMessage
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.elastic import ResizeReport, ResizeRequest, Step
from persia.security import audit
from persia.validation import Count
from persia.waiting import Attempts

_ANSWER_S = 5.0
_HAND_OVER_S = 20.0
_END_S = 10.0
_INTERRUPT_S = 0.2
# Requests wait for about one round of changes, when servers hand over. After some seconds of trying, a longer
# round must do.
_SHORT_ROUND_S, _LONGER_ROUND_S = 0.05, 0.1
_TRYING_S = 10.0
# What all old servers together may take of the processors for the copy.
_PERCENT = 8


@dataclass(frozen=True, kw_only=True)
class ResizeState(JsonMessage):
    """What has become of a change; for the command that asked for it."""

    what = "resize state"

    before: Count
    after: Count
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

    def resize(self, num_servers: int) -> ResizeState:
        """Returns when the new servers answer and the old ones have ended. FailedPreconditionError: with what
        the servers have, their number cannot be changed; nothing was started. Other errors: it has failed;
        `state` says which servers the job has.
        """
        self.begin(num_servers)
        return self.finish()

    def begin(self, num_servers: int) -> None:
        """The first part of `resize`, which refuses. `finish` must follow, on any thread."""
        if not self._lock.acquire(blocking=False):
            raise FailedPreconditionError("the number of parameter servers is being changed already")
        try:
            self._check(num_servers)
            self.state = ResizeState(before=self._num_servers, after=num_servers, step="start")
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

    def _check(self, num_servers: int) -> None:
        if self.is_closed:
            raise UnavailableError("the job is ending")
        if num_servers < 1:
            raise InvalidArgumentError(f"{num_servers} parameter servers: a job has at least one")
        if num_servers == self._num_servers:
            raise FailedPreconditionError(f"the job has {num_servers} parameter servers already")
        for report in self._ask_all(self._old(), Step.WHO):
            if report.refusal:
                raise FailedPreconditionError(
                    f"the number of parameter servers cannot be changed while the job runs: {report.refusal}"
                )

    def _run(self, num_servers: int) -> None:
        self._last_generation += 1
        generation = self._last_generation
        old, new = self._old(), [(generation, index) for index in range(num_servers)]
        processes: list[ManagedProcess] = []
        try:
            self._start_new(generation, num_servers, processes)
            targets = self._await_new(new, processes)
            begin = time.monotonic()
            percent = max(1, _PERCENT // len(old))
            self._ask_all(old, Step.COPY, targets=targets, percent=percent)
            self._await_copies(old, processes)
            copied = time.monotonic()
            self._note(step="hand over", copy_s=copied - begin)
            reports = self._ask_all(old, Step.HAND_OVER, timeout_s=_HAND_OVER_S)
            self._count(reports)
            before = self._commit(generation, processes)
        except BaseException:
            self._give_up(old, processes)
            raise
        try:
            self._serve(new, processes)
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

    def _old(self) -> list[tuple[int, int]]:
        return [(self._generation, index) for index in range(self._num_servers)]

    def _spec(self, index: int, num_servers: int, generation: int) -> ProcessSpec:
        spec = self._specs.server(EMBEDDING_PARAMETER_SERVER, index, num_servers)
        return replace(spec, command=(*spec.command, f"--generation={generation}")) if generation else spec

    def _start_new(self, generation: int, num_servers: int, processes: list[ManagedProcess]) -> None:
        """Appends to `processes` what has been started, also if it fails."""
        for index in range(num_servers):
            spec = self._spec(index, num_servers, generation)
            command = (*spec.command, f"--sources={self._num_servers}")
            spec = replace(spec, name=f"{spec.name}-of-{num_servers}", command=command)
            processes.append(self._supervisor.start(spec))

    def _await_new(
        self, new: Sequence[tuple[int, int]], processes: Sequence[ManagedProcess]
    ) -> tuple[tuple[str, str], ...]:
        for _ in self._attempts("new parameter servers"):
            self._check_continues(processes)
            with contextlib.suppress(UnavailableError, DeadlineExceededError):
                reports = self._ask_all(new, Step.WHO, timeout_s=1.0)
                return tuple((report.address, report.incarnation) for report in reports)
        raise DeadlineExceededError("new parameter servers did not start within PERSIA_DEADLINE_SEC")

    def _await_copies(self, old: Sequence[tuple[int, int]], processes: Sequence[ManagedProcess]) -> None:
        attempts = self._attempts("short rounds of changes")
        for _ in attempts:
            self._check_continues(processes)
            reports = self._ask_all(old, Step.WHO)
            self._count(reports)
            if failures := [report.failure for report in reports if report.failure]:
                raise InternalError(f"a parameter server could not copy its rows: {failures[0]}")
            if any(report.state == "copying" for report in reports):
                attempts.progressed()
                self._note(step="copy")
                continue
            self._note(step="follow")
            is_patient = attempts.left_s > env.get_deadline_s() - _TRYING_S
            least_s = _SHORT_ROUND_S if is_patient else _LONGER_ROUND_S
            if all(report.round_s < least_s for report in reports):
                return
        raise DeadlineExceededError(
            "rows change faster than they are copied: the last changes still take "
            f"{max(report.round_s for report in reports):.2f} s after PERSIA_DEADLINE_SEC"
        )

    def _serve(self, new: Sequence[tuple[int, int]], processes: Sequence[ManagedProcess]) -> None:
        for _ in self._attempts("new parameter servers to answer"):
            self._check_continues(processes)
            with contextlib.suppress(UnavailableError, DeadlineExceededError):
                self._ask_all(new, Step.SERVE)
                return
        raise DeadlineExceededError("new parameter servers have their rows, and do not answer")

    def _attempts(self, waiting_for: str, longest_pause_s: float = 0.0) -> Attempts:
        return Attempts(
            env.get_deadline_s(), longest_pause_s=longest_pause_s, waiting_for=lambda: waiting_for
        )

    def _check_continues(self, processes: Sequence[ManagedProcess]) -> None:
        if self._is_cancelled.is_set():
            raise UnavailableError("the job is being started again")
        _check_running(processes)

    def _count(self, reports: Sequence[ResizeReport]) -> None:
        self._note(
            num_rows=sum(report.num_rows for report in reports),
            num_bytes=sum(report.num_bytes for report in reports),
        )

    def _give_up(self, old: Sequence[tuple[int, int]], processes: Sequence[ManagedProcess]) -> None:
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
        for _ in self._attempts(waiting, longest_pause_s=2.0):
            if self.is_closed or self._process(index).exit_code is not None:
                return
            with contextlib.suppress(PersiaError):
                self._ask((self._generation, index), Step.GIVE_UP)
                return
        self._kill([self._process(index)])

    def _process(self, index: int) -> ManagedProcess:
        """The one that has the rows of this server."""
        return next(one for one in self._supervisor.processes if one.name == self._names[index])

    def _kill(self, processes: Sequence[ManagedProcess]) -> None:
        self._supervisor.kill([process.name for process in processes])

    def _ask_all(
        self, servers: Sequence[tuple[int, int]], step: Step, timeout_s: float = _ANSWER_S, **more: object
    ) -> list[ResizeReport]:
        """All at once: between the first and the last one that hands over, training waits."""
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            asked = [pool.submit(self._ask, server, step, timeout_s, **more) for server in servers]
            return [one.result() for one in asked]

    def _ask(
        self, server: tuple[int, int], step: Step, timeout_s: float = _ANSWER_S, **more: object
    ) -> ResizeReport:
        request = ResizeRequest(step=step, **more)  # type: ignore[arg-type]
        subject = self._session.subjects.resize(*server)
        return ResizeReport.decode(self._session.request(subject, request.encode(), timeout_s))


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
        wanted = ResizeQuestion.decode(payload).parameter_servers
        if wanted:
            self._begin(wanted)
        return self._resizer.state.encode()

    def _begin(self, wanted: int) -> None:
        outcome = "ok"
        try:
            self._resizer.begin(wanted)
        except Exception as error:
            outcome = type(error).__name__
            self._tell(f"parameter servers: not changed: {error}")
            raise
        finally:
            # The broker says no sender; it lets this role ask.
            audit.record(
                peer="NATS", role="admin", method="resize", outcome=outcome, parameter_servers=wanted
            )
        threading.Thread(target=self._finish, name="persia-resize", daemon=True).start()

    def _finish(self) -> None:
        try:
            done = self._resizer.finish()
            self._tell(f"parameter servers: {done.before} were replaced by {done.after}")
        except Exception as error:
            self._tell(f"parameter servers: {self._resizer.state.outcome}: {error}")
