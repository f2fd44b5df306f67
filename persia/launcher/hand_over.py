"""The requests of a change of the number of parameter servers (ADR 34), for each of its coordinators.

A server is named by its generation and its index, as on the broker.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia.errors import DeadlineExceededError, FailedPreconditionError, InternalError, UnavailableError
from persia.launcher.placement import largest_share, place
from persia.logger import get_default_logger
from persia.messaging.payloads import MovedShards
from persia.messaging.session import NatsSession
from persia.roles.elastic import ResizeReport, ResizeRequest, Step
from persia.waiting import Attempts

Server = tuple[int, int]
Targets = tuple[tuple[str, str], ...]

_ANSWER_S = 5.0
_HAND_OVER_S = 20.0
# Requests wait for about one round of changes, when servers hand over. After some seconds of trying, a longer
# round must do.
_SHORT_ROUND_S, _LONGER_ROUND_S = 0.05, 0.1
_TRYING_S = 10.0
# What all old servers together may take of the processors for the copy.
_PERCENT = 8
# How long the load is measured: a pause at least, then until so many rows of the sample were counted.
_MEASURE_S, _MEASURE_PAUSE_S = 10.0, 2.0
_ENOUGH_ROWS = 1 << 17


def servers(generation: int, number: int) -> list[Server]:
    return [(generation, index) for index in range(number)]


def ask(
    session: NatsSession, server: Server, step: Step, timeout_s: float = _ANSWER_S, **more: object
) -> ResizeReport:
    request = ResizeRequest(step=step, **more)  # type: ignore[arg-type]
    return ResizeReport.decode(session.request(session.subjects.resize(*server), request.encode(), timeout_s))


def ask_all(
    session: NatsSession, asked: Sequence[Server], step: Step, timeout_s: float = _ANSWER_S, **more: object
) -> list[ResizeReport]:
    """All at once: between the first and the last one that hands over, training waits."""
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        answers = [pool.submit(ask, session, server, step, timeout_s, **more) for server in asked]
        return [answer.result() for answer in answers]


def check_replaceable(reports: Sequence[ResizeReport]) -> None:
    """Raises FailedPreconditionError for servers whose number cannot be changed."""
    for report in reports:
        if report.refusal:
            raise FailedPreconditionError(
                f"the number of parameter servers cannot be changed while the job runs: {report.refusal}"
            )


def _counts(session: NatsSession, old: Sequence[Server]) -> tuple[list[str], NDArray[np.float64]]:
    reports = ask_all(session, old, Step.MEASURE)
    counts = np.array([report.loads for report in reports], dtype=np.float64)
    return [report.incarnation for report in reports], counts


def targets_of(reports: Sequence[ResizeReport]) -> Targets:
    """Address and incarnation of servers that are to have the rows, by index."""
    return tuple((report.address, report.incarnation) for report in reports)


def attempts(waiting_for: str, longest_pause_s: float = 0.0) -> Attempts:
    return Attempts(env.get_deadline_s(), longest_pause_s=longest_pause_s, waiting_for=lambda: waiting_for)


class HandOver:
    """Moves the rows of the servers `old` to the servers `new`."""

    def __init__(
        self,
        session: NatsSession,
        old: Sequence[Server],
        new: Sequence[Server],
        *,
        check: Callable[[], None],
        note: Callable[..., None],
    ) -> None:
        """`check` raises where the change cannot continue; `note` takes fields of `ResizeState`."""
        self._session, self._old, self._new, self._check, self._note = session, old, new, check, note

    def await_new(self) -> list[ResizeReport]:
        """What the new servers say first."""
        for _ in attempts("new parameter servers"):
            self._check()
            with contextlib.suppress(UnavailableError, DeadlineExceededError):
                return ask_all(self._session, self._new, Step.WHO, timeout_s=1.0)
        raise DeadlineExceededError("new parameter servers did not start within PERSIA_DEADLINE_SEC")

    def place(self) -> MovedShards:
        """Where the new servers have virtual shards, by the load of the old ones. FailedPreconditionError:
        it would be no more even."""
        self._note(step="measure")
        moved = place(self._measure(), len(self._new))
        if moved:  # said first: rows beyond the capacity of a server would be evicted
            get_default_logger().info(
                "%d virtual shards are placed by load: one server gets about %.2f of the mean number of "
                "rows; compare it with embedding_parameter_server_config.capacity",
                len(moved),
                largest_share(moved, len(self._new)),
            )
        self._note(num_moved_shards=len(moved))
        return moved

    def copy(self, targets: Targets, moved: MovedShards) -> None:
        """Returns when the old servers could hand over within a short time."""
        begin = time.monotonic()
        percent = max(1, _PERCENT // len(self._old))
        ask_all(self._session, self._old, Step.COPY, targets=targets, moved_shards=moved, percent=percent)
        self._await_copies()
        self._note(copy_s=time.monotonic() - begin)

    def hand_over(self) -> None:
        """From here on the old servers refuse requests, until they are told to give up."""
        self._note(step="hand over")
        self._count(ask_all(self._session, self._old, Step.HAND_OVER, timeout_s=_HAND_OVER_S))

    def serve(self) -> None:
        """Returns when all new servers answer requests."""
        for _ in attempts("new parameter servers to answer"):
            self._check()
            with contextlib.suppress(UnavailableError, DeadlineExceededError):
                ask_all(self._session, self._new, Step.SERVE)
                return
        raise DeadlineExceededError("new parameter servers have their rows, and do not answer")

    def _measure(self) -> NDArray[np.float64]:
        """What each server looks up by virtual shard over the same time. Servers count since their start, and
        some may have started later than others."""
        began, before = _counts(self._session, self._old)
        grown = np.zeros_like(before)
        measuring = Attempts(_MEASURE_S, pause_s=_MEASURE_PAUSE_S)
        for _ in measuring:
            self._check()
            incarnations, now = _counts(self._session, self._old)
            if incarnations != began:  # a server was started again, and counts from 0
                began, before = incarnations, now
                measuring.progressed()
            grown = np.maximum(now - before, 0)  # threads that count at once may lose some
            if grown.sum() >= _ENOUGH_ROWS:
                break
        return grown

    def _await_copies(self) -> None:
        trying = attempts("short rounds of changes")
        for _ in trying:
            self._check()
            reports = ask_all(self._session, self._old, Step.WHO)
            self._count(reports)
            if failures := [report.failure for report in reports if report.failure]:
                raise InternalError(f"a parameter server could not copy its rows: {failures[0]}")
            if any(not report.state for report in reports):
                raise UnavailableError("a parameter server was started again while it copied its rows")
            if any(report.state == "copying" for report in reports):
                trying.progressed()
                self._note(step="copy")
                continue
            self._note(step="follow")
            is_patient = trying.left_s > env.get_deadline_s() - _TRYING_S
            least_s = _SHORT_ROUND_S if is_patient else _LONGER_ROUND_S
            if all(report.round_s < least_s for report in reports):
                return
        raise DeadlineExceededError(
            "rows change faster than they are copied: the last changes still take "
            f"{max(report.round_s for report in reports):.2f} s after PERSIA_DEADLINE_SEC"
        )

    def _count(self, reports: Sequence[ResizeReport]) -> None:
        self._note(
            num_rows=sum(report.num_rows for report in reports),
            num_bytes=sum(report.num_bytes for report in reports),
        )
