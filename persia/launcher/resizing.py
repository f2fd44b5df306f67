"""Changes of the number of parameter servers of a job while it trains (ADR 34), by who supervises it.

In: the supervisor with the job's processes, and the number that is wanted. New servers are started beside the
old ones, and get their rows; then they take over, and the old ones end. Until the new ones answer, whatever
fails is given up: the new servers end, and the old ones continue.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from persia import env
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    PersiaError,
    UnavailableError,
)
from persia.launcher.process_specs import STANDBY, ProcessSpecs
from persia.launcher.supervisor import ManagedProcess, ProcessSpec, Supervisor
from persia.messaging.payloads import JsonMessage
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.elastic import ResizeReport, ResizeRequest, Step
from persia.validation import Count
from persia.waiting import Attempts

_ANSWER_S = 5.0
_HAND_OVER_S = 20.0
_END_S = 10.0
# Requests wait for about one round of changes, when servers hand over.
_SHORT_ROUND_S = 0.05
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
    num_rows: Count = 0
    num_bytes: Count = 0
    copy_s: float = 0.0  # until the servers handed over
    pause_s: float = 0.0  # from then until all new servers answered
    failure: str = ""


class Resizer:
    """The parameter servers of a job, whose number may change. Thread-safe."""

    def __init__(
        self,
        supervisor: Supervisor,
        session: NatsSession,
        specs: ProcessSpecs,
        num_servers: int,
        *,
        processors: int = _PERCENT,
    ) -> None:
        """`processors`: what the copy may take of them, in percent."""
        self._supervisor, self._session, self._specs = supervisor, session, specs
        self._percent = processors
        self._lock = threading.Lock()  # one change at a time
        self._num_servers, self._generation = num_servers, 0
        self._names = [spec.name for spec in self.specs()]  # of the processes that have the rows
        self._is_cancelled = threading.Event()
        self.state = ResizeState(before=num_servers, after=num_servers, step="none", is_over=True)

    def specs(self) -> list[ProcessSpec]:
        """The servers as the job has them when it is started again: as many as now, without rows."""
        count = self._num_servers
        return [self._specs.server(EMBEDDING_PARAMETER_SERVER, i, count) for i in range(count)]

    @property
    def num_servers(self) -> int:
        return self._num_servers

    def is_expendable(self, name: str) -> bool:
        """Whether it is a parameter server that does not have the rows yet, or no more."""
        is_server = name.startswith(f"{EMBEDDING_PARAMETER_SERVER}-") and not name.endswith(STANDBY)
        return is_server and name not in self._names

    def cancel(self) -> None:
        """The job is about to be started again: gives up what can be given up, and returns after that."""
        self._is_cancelled.set()
        with self._lock:  # the change has ended
            self._generation = 0
            self._names = [spec.name for spec in self.specs()]
            self._is_cancelled.clear()

    def resize(self, num_servers: int) -> ResizeState:
        """Returns when the new servers answer and the old ones have ended. FailedPreconditionError: with what
        the servers have, their number cannot be changed; nothing was started. Other errors: it was given up.
        """
        if not self._lock.acquire(blocking=False):
            raise FailedPreconditionError("the number of parameter servers is being changed already")
        try:
            self._check(num_servers)
            self.state = ResizeState(before=self._num_servers, after=num_servers, step="start")
            with self._failing():
                self._run(num_servers)
            return self.state
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except PersiaError as error:
            self._note(is_over=True, failure=f"{type(error).__name__}: {error}")
            raise
        self._note(is_over=True, step="done")

    def _note(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def _check(self, num_servers: int) -> None:
        if num_servers == self._num_servers:
            raise FailedPreconditionError(f"the job has {num_servers} parameter servers already")
        for report in self._ask_all(self._old(), Step.WHO):
            if report.refusal:
                raise FailedPreconditionError(
                    f"the number of parameter servers cannot be changed while the job runs: {report.refusal}"
                )

    def _run(self, num_servers: int) -> None:
        old, new = self._old(), [(self._generation + 1, index) for index in range(num_servers)]
        processes = []
        try:
            processes = self._start_new(num_servers)
            targets = self._await_new(new, processes)
            begin = time.monotonic()
            percent = max(1, self._percent // len(old))
            self._ask_all(old, Step.COPY, targets=targets, percent=percent)
            self._await_copies(old, processes)
            copied = time.monotonic()
            self._note(step="hand over", copy_s=copied - begin)
            reports = self._ask_all(old, Step.HAND_OVER, timeout_s=_HAND_OVER_S)
            self._count(reports)
        except BaseException:
            self._give_up(old, processes)
            raise
        # From here on the new servers have the rows, whatever happens.
        before, self._names = self._names, [process.name for process in processes]
        self._num_servers, self._generation = num_servers, self._generation + 1
        self._ask_all(new, Step.SERVE)
        self._note(step="end", pause_s=time.monotonic() - copied)
        self._end([process for process in self._supervisor.processes if process.name in before])

    def _old(self) -> list[tuple[int, int]]:
        return [(self._generation, index) for index in range(self._num_servers)]

    def _start_new(self, num_servers: int) -> list[ManagedProcess]:
        specs = []
        for index in range(num_servers):
            spec = self._specs.server(EMBEDDING_PARAMETER_SERVER, index, num_servers)
            options = (f"--generation={self._generation + 1}", f"--sources={self._num_servers}")
            name = f"{spec.name}-of-{num_servers}"
            specs.append(replace(spec, name=name, command=(*spec.command, *options)))
        return [self._supervisor.start(spec) for spec in specs]

    def _await_new(
        self, new: Sequence[tuple[int, int]], processes: Sequence[ManagedProcess]
    ) -> tuple[tuple[str, str], ...]:
        for _ in self._attempts(processes, lambda: "new parameter servers"):
            with contextlib.suppress(UnavailableError, DeadlineExceededError):
                reports = self._ask_all(new, Step.WHO, timeout_s=1.0)
                return tuple((report.address, report.incarnation) for report in reports)
        raise DeadlineExceededError("new parameter servers did not start within PERSIA_DEADLINE_SEC")

    def _await_copies(self, old: Sequence[tuple[int, int]], processes: Sequence[ManagedProcess]) -> None:
        attempts = self._attempts(processes, lambda: "short rounds of changes")
        for _ in attempts:
            reports = self._ask_all(old, Step.WHO)
            self._count(reports)
            if failures := [report.failure for report in reports if report.failure]:
                raise InternalError(f"a parameter server could not copy its rows: {failures[0]}")
            if any(report.state == "copying" for report in reports):
                attempts.progressed()
                self._note(step="copy")
                continue
            self._note(step="follow")
            if all(report.round_s < _SHORT_ROUND_S for report in reports):
                return
        raise DeadlineExceededError(
            "rows change faster than they are copied: the last changes still take "
            f"{max(report.round_s for report in reports):.2f} s after PERSIA_DEADLINE_SEC"
        )

    def _attempts(self, processes: Sequence[ManagedProcess], waiting_for: Callable[[], str]) -> Attempts:
        """Of polling; ended by a cancellation, and by the end of a new process."""
        return _Watched(self._is_cancelled, processes, waiting_for)

    def _count(self, reports: Sequence[ResizeReport]) -> None:
        self._note(
            num_rows=sum(report.num_rows for report in reports),
            num_bytes=sum(report.num_bytes for report in reports),
        )

    def _give_up(self, old: Sequence[tuple[int, int]], processes: Sequence[ManagedProcess]) -> None:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for server in old:
            with contextlib.suppress(PersiaError):  # one that has died
                self._ask(server, Step.GIVE_UP)
        for process in processes:
            process.wait(_END_S)

    def _end(self, processes: Sequence[ManagedProcess]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                process.send_signal(number)
            end = time.monotonic() + _END_S
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))

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


class _Watched(Attempts):
    """Attempts of PERSIA_DEADLINE_SEC."""

    def __init__(
        self,
        is_cancelled: threading.Event,
        processes: Sequence[ManagedProcess],
        waiting_for: Callable[[], str],
    ) -> None:
        super().__init__(env.get_deadline_s(), waiting_for=waiting_for)
        self._is_cancelled, self._processes = is_cancelled, processes

    def __iter__(self) -> Iterator[float]:
        for pause_s in super().__iter__():
            if self._is_cancelled.is_set():
                raise UnavailableError("the job is being started again")
            for process in self._processes:
                if process.exit_code is not None:
                    raise UnavailableError(f"{process.name} has ended:\n{process.output[-2000:]}")
            yield pause_s


@dataclass(frozen=True, kw_only=True)
class ResizeQuestion(JsonMessage):
    """The command to who supervises the job. 0: what has become of the last change."""

    what = "resize question"

    parameter_servers: Count = 0


class ResizeService:
    """Answers `persia-launcher resize` until `close`; the changes run on a thread of their own."""

    def __init__(self, resizer: Resizer, session: NatsSession, tell: Callable[[str], None]) -> None:
        self._resizer, self._tell = resizer, tell
        self._thread: threading.Thread | None = None
        self._registration = session.respond(session.subjects.resize_job, self._answer, max_concurrency=1)

    def close(self) -> None:
        self._registration.close()
        self._resizer.cancel()

    def _answer(self, payload: bytes) -> bytes:
        wanted = ResizeQuestion.decode(payload).parameter_servers
        if wanted:
            self._begin(wanted)
        return self._resizer.state.encode()

    def _begin(self, wanted: int) -> None:
        started, refusals = threading.Event(), list[PersiaError]()
        before = self._resizer.state

        def run() -> None:
            try:
                done = self._resizer.resize(wanted)
                self._tell(f"parameter servers: {done.before} were replaced by {done.after}")
            except PersiaError as error:
                refusals.append(error)
                self._tell(f"parameter servers: not changed: {error}")
            finally:
                started.set()

        self._thread = threading.Thread(target=run, name="persia-resize", daemon=True)
        self._thread.start()
        # A refusal comes at once, and is the answer.
        for _ in Attempts(math.inf, pause_s=0.02):
            if started.is_set() or self._resizer.state is not before:
                break
        if refusals and self._resizer.state is before:
            raise refusals[0]
