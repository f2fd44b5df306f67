"""The coordinator of a change of the number of parameter servers whose processes it does not start (ADR 60).

On Kubernetes it is a pod, and the operator starts and ends the servers. It may die at any moment: the servers
know how far the change had come, and the coordinator that follows ends it either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    PersiaError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.launcher.hand_over import (
    HandOver,
    Server,
    Targets,
    ask,
    ask_all,
    attempts,
    check_replaceable,
    targets_of,
)
from persia.messaging.session import NatsSession
from persia.roles.elastic import BUSY, ResizeReport, Step

_LONGEST_PAUSE_S = 2.0
_MOVED = "handed over"  # ResizeReport.state
_LEFT = "its coordinator ended before the new servers had all rows"


class NotResizedError(Exception):
    """The old servers continue, all of them, and no new one has answered anything."""


class Coordinator:
    """Moves rows from the servers `old` to the servers `new`."""

    def __init__(
        self,
        session: NatsSession,
        old: Sequence[Server],
        new: Sequence[Server],
        tell: Callable[[str], None],
    ) -> None:
        self._session, self._old, self._new, self._tell = session, old, new, tell
        self._targets: Targets = ()
        self._told = ""
        self._steps = HandOver(session, self._old, self._new, check=self._check, note=self._note)

    def run(self) -> None:
        """Returns when the new servers answer. NotResizedError: they never will. After any other end, which
        one it is to be is open, and another coordinator must follow."""
        if not self._are_rows_moved():
            try:
                self._move()
            except PersiaError as error:
                self._give_up(str(error))
        self._serve()

    def _are_rows_moved(self) -> bool:
        """Whether a coordinator before this one got so far. What another one left half done is given up."""
        old, absence = list[ResizeReport](), None
        try:
            old = self._await_idle()
        except FailedPreconditionError as error:  # these have never begun
            self._give_up(str(error))
        except (UnavailableError, DeadlineExceededError) as error:  # they may have ended, as they should
            absence = error
        if any(report.state not in ("", _MOVED) for report in old):
            self._give_up(_LEFT)
        try:
            new = self._steps.await_new()
        except (UnavailableError, DeadlineExceededError) as error:
            # No old server has begun to send rows, so no new one was ever told to serve.
            if absence is None and not any(report.state for report in old):
                self._give_up(str(error))
            raise
        # One that answers may have changed rows.
        if any(report.is_serving for report in new):
            return True
        if absence is not None:
            raise absence
        # All old ones have sent everything: one may have answered before it was started again.
        if all(report.state == _MOVED for report in old):
            return True
        if any(report.state for report in old) or any(report.was_sent_rows for report in new):
            self._give_up(_LEFT)
        return False

    def _move(self) -> None:
        self._await_idle()  # again: the new servers may have started late
        self._targets = targets_of(self._steps.await_new())
        self._steps.copy(self._targets, self._steps.place())
        self._steps.hand_over()
        self._check()

    def _await_idle(self) -> list[ResizeReport]:
        for _ in attempts("a checkpoint that is written or loaded", _LONGEST_PAUSE_S):
            reports = ask_all(self._session, self._old, Step.WHO)
            if not any(report.refusal == BUSY for report in reports):
                break
        check_replaceable(reports)
        return reports

    def _check(self) -> None:
        """A new server that was started again lacks what the first one was sent."""
        if self._targets:
            now = targets_of(ask_all(self._session, self._new, Step.WHO))
            for index, (was, is_now) in enumerate(zip(self._targets, now, strict=True)):
                if was != is_now:
                    raise UnavailableError(f"new parameter server {index} was started again")

    def _serve(self) -> None:
        with ThreadPoolExecutor(len(self._new)) as pool:
            list(pool.map(self._serve_one, self._new))

    def _serve_one(self, server: Server) -> None:
        for _ in attempts(f"new parameter server {server[1]} to answer"):
            with contextlib.suppress(UnavailableError, DeadlineExceededError):
                try:
                    ask(self._session, server, Step.SERVE)
                except FailedPreconditionError as error:
                    # Its rows are lost, as those of any server that dies: others may have changed theirs.
                    self._tell(f"new parameter server {server[1]} has been started again: {error}")
                return
        raise DeadlineExceededError(f"new parameter server {server[1]} has its rows, and does not answer")

    def _give_up(self, why: str) -> NoReturn:
        with ThreadPoolExecutor(len(self._old)) as pool:
            list(pool.map(self._release, self._old))
        raise NotResizedError(why)

    def _release(self, server: Server) -> None:
        """Until it confirms: it would answer nothing, or refuse checkpoints, as long as it lives."""
        for _ in attempts(f"parameter server {server[1]} to continue", _LONGEST_PAUSE_S):
            with contextlib.suppress(UnavailableError, DeadlineExceededError, ResourceExhaustedError):
                ask(self._session, server, Step.GIVE_UP)
                return
        raise DeadlineExceededError(f"parameter server {server[1]} does not say that it continues")

    def _note(self, step: str = "", **_figures: object) -> None:
        if step not in ("", self._told):
            self._told = step
            self._tell(f"{step} ...")
