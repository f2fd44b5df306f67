"""Dumps of a whole job, dense part and rows, that are asked for from outside.

Only rank 0 has the dense part, and only between two of its batches are the dense part and the rows of one
moment. So it is asked for the dump, and takes it at the end of the next batch.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field, StrictBool

from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    PersiaError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging.interface import Session
from persia.storage.manifest import make_dump_id
from persia.waiting import Attempts

_LEASE_S = 60.0  # a request is forgotten after so long without a question about it
_CALL_S = 5.0  # one question
_LONGEST_HOLD_S = 3600.0
_SILENCE_S = 30.0  # of rank 0, until it is considered dead
_POLL_S = 0.2


class _Write(Protocol):
    """Writes everything, or leaves the rows in the servers' storage tiers."""

    def __call__(self, directory: str, /, *, in_place: bool) -> None: ...


@dataclass(frozen=True)
class _Arguments:
    """Arguments of a dump."""

    directory: Annotated[str, Field(min_length=1)]
    hold_s: Annotated[float, Field(strict=True, ge=0, le=_LONGEST_HOLD_S)] = 0.0
    in_place: StrictBool = False


class _Dump:
    """One dump that was asked for. Guarded by its owner's lock."""

    def __init__(self, request: Request) -> None:
        self.operation = request.operation
        self.arguments = request.read(_Arguments)
        self.asked_at = time.monotonic()
        self.has_begun = False
        self.is_cancelled = False
        self.state = State.RUNNING
        self.error: PersiaError | None = None

    @property
    def is_over(self) -> bool:
        return self.state in (State.DONE, State.FAILED) or (self.is_cancelled and not self.has_begun)

    @property
    def is_forgotten(self) -> bool:
        return time.monotonic() - self.asked_at > _LEASE_S

    def report(self) -> Report:
        return Report(state=self.state, error=self.error, result={"has_begun": self.has_begun})


class TrainingDumps:
    """Rank 0's side: `handle` answers on threads of the session, `serve` works on the training's own."""

    def __init__(self, dump: _Write) -> None:
        self._write = dump
        self._changed = threading.Condition()
        self._dump: _Dump | None = None
        self._held: _Dump | None = None  # the one that the training is held for; `_dump` may be a later one
        self.is_wanted = False  # whether `serve` has something to do; read without the lock, once a batch

    def handle(self, payload: bytes) -> bytes:
        """ResourceExhaustedError: another dump runs; NotFoundError: this rank has been started anew."""
        request = Request.decode(payload)
        with self._changed:
            if request.verb is Verb.DUMP:
                self._begin(request)
            # A second request may arrive while the training is held for the first, whose caller still polls.
            known = (d for d in (self._dump, self._held) if d is not None)
            dump = next((d for d in known if d.operation == request.operation), None)
            if dump is None:
                raise NotFoundError(f"rank 0 knows no operation {request.operation}: it has restarted since")
            dump.asked_at = time.monotonic()
            if request.verb is Verb.CANCEL:
                dump.is_cancelled = True
                self._changed.notify_all()
            return dump.report().encode()

    def serve(self) -> None:
        """Takes the dump that waits, if one does, and then holds the training for as long as it asked.

        An error of the dump is reported to the caller of the request; the training continues.
        """
        with self._changed:
            # Also where nothing is dumped below: asked again once a batch, it would take the lock each time.
            self.is_wanted = False
            dump = self._dump
            if dump is None or dump.is_over or dump.is_forgotten:
                return
            dump.has_begun = True
        # Without the lock: polls, which keep the request alive, are answered while the dump is written.
        error: PersiaError | None = None
        try:
            self._write(dump.arguments.directory, in_place=dump.arguments.in_place)
        except PersiaError as failure:
            error = failure
        except Exception as failure:
            get_default_logger().exception("the dump to %s failed", dump.arguments.directory)
            error = InternalError(f"{type(failure).__name__}: {failure}")
        with self._changed:
            dump.error = error
            dump.state = State.DONE if error is None else State.FAILED
            if error is None:
                self._hold(dump)
        if error is not None:
            get_default_logger().warning("the dump that was asked for failed: %s", error)

    def _begin(self, request: Request) -> None:
        last = self._dump
        if last is not None and last.operation == request.operation:
            return
        # A forgotten request that has not begun is replaced: its caller has ended.
        if last is not None and (last.has_begun or not last.is_forgotten) and not last.is_over:
            raise ResourceExhaustedError(f"rank 0 is busy with {last.operation}; one dump is taken at a time")
        self._dump = _Dump(request)
        self.is_wanted = True

    def _hold(self, dump: _Dump) -> None:
        """Holds the training until its caller ends it: batches trained after the dump would be lost."""
        hold_s = dump.arguments.hold_s
        if not hold_s or dump.is_forgotten:
            return
        get_default_logger().info("dumped to %s; training waits to be ended", dump.arguments.directory)
        self._held = dump
        try:
            if not self._changed.wait_for(lambda: dump.is_cancelled, hold_s):
                get_default_logger().warning("the training was not ended within %g s: it continues", hold_s)
        finally:
            self._held = None


def request_training_dump(
    session: Session, directory: str, *, hold_s: float, deadline_s: float, in_place: bool = False
) -> None:
    """Returns when rank 0 of the job has written dense part and rows; it then waits for up to `hold_s`.
    With `in_place` rows stay in the servers' storage tiers.

    Raises FailedPreconditionError where there is no training to ask, or it ends no batch within `deadline_s`,
    DeadlineExceededError where it does not answer, ResourceExhaustedError where it is busy with another dump:
    nothing has changed, and the same may succeed later. Otherwise what kept rank 0 from dumping.

    An exception of a signal handler during the call releases the training.
    """
    # A new name for each call: rank 0 recognises repetitions of this one by it.
    operation = make_dump_id()
    arguments = {"directory": directory, "hold_s": hold_s, "in_place": in_place}
    request = Request(verb=Verb.DUMP, operation=operation, arguments=arguments)
    try:
        _await_dump(session, request, deadline_s)
    except BaseException:
        with contextlib.suppress(PersiaError):  # it may have ended, or never begun
            cancel = Request(verb=Verb.CANCEL, operation=operation)
            session.request(session.subjects.training_dump, cancel.encode(), _CALL_S)
        raise


def _await_dump(session: Session, request: Request, deadline_s: float) -> None:
    """Polls until the dump is written; cancels it where it has not begun within `deadline_s`."""
    report = _ask(session, request)
    waits_until = time.monotonic() + deadline_s
    for _ in Attempts(math.inf, pause_s=_POLL_S):
        if report.state is not State.RUNNING:
            break
        has_begun = bool((report.result or {}).get("has_begun"))
        if has_begun or time.monotonic() < waits_until:
            report = _ask(session, Request(verb=Verb.POLL, operation=request.operation))
            continue
        report = _ask(session, Request(verb=Verb.CANCEL, operation=request.operation))
        if not (report.result or {}).get("has_begun"):  # it may have begun meanwhile
            raise FailedPreconditionError(
                f"rank 0 has ended no batch for {deadline_s:g} s (PERSIA_DEADLINE_SEC), and a dump "
                "is taken between two: ask again when it trains"
            )
    if report.error is not None:
        raise report.error


def _ask(session: Session, request: Request) -> Report:
    """Repeats the request, which rank 0 recognises, until there is an answer.

    FailedPreconditionError: no rank 0 listens to the first request; UnavailableError: it is gone since.
    """
    is_first = request.verb is Verb.DUMP
    last: PersiaError | None = None
    for _ in Attempts(_SILENCE_S, pause_s=_POLL_S):
        try:
            return Report.decode(session.request(session.subjects.training_dump, request.encode(), _CALL_S))
        except NotFoundError as failure:
            raise UnavailableError("rank 0 was started anew during the dump: ask again") from failure
        except (UnavailableError, DeadlineExceededError) as failure:
            if is_first and isinstance(failure, UnavailableError):
                raise FailedPreconditionError(
                    "there is no training to ask for its dense part: rank 0 has not entered its TrainCtx, "
                    f"which configures the optimizers, or has left it; ask again when it trains ({failure})"
                ) from failure
            last = failure.with_traceback(None)  # whose frame holds this one
    kind = DeadlineExceededError if is_first else UnavailableError
    raise kind(f"rank 0 has not answered for {_SILENCE_S:g} s during the dump: {last}") from last
