"""Dumps of a training that are asked for from outside, without a broker between the two sides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.checkpoint.training_dump import TrainingDumps, request_training_dump
from persia.errors import (
    CorruptionError,
    DeadlineExceededError,
    FailedPreconditionError,
    ResourceExhaustedError,
    StorageError,
    UnavailableError,
)
from persia.messaging.subjects import Subjects


class DirectSession:
    """Requests become calls; as with a broker, nobody listens where there is no training."""

    subjects = Subjects("job")

    def __init__(self, dumps: TrainingDumps | None) -> None:
        self._dumps = dumps

    def request(self, subject: str, payload: bytes, _timeout_s: float) -> bytes:
        assert subject == "persia.job.checkpoint.training"
        if self._dumps is None:
            raise UnavailableError("nobody listens")
        return self._dumps.handle(payload)


def ask(dumps: TrainingDumps | None, hold_s: float = 0.0, deadline_s: float = 30.0) -> None:
    session: Any = DirectSession(dumps)
    request_training_dump(session, "/c", hold_s=hold_s, deadline_s=deadline_s)


def trained(dumps: TrainingDumps, until: Callable[[], bool]) -> int:
    """Batches, with a dump between two of them where one is wanted."""
    num_batches = 0
    deadline = time.monotonic() + 120
    while not until() and time.monotonic() < deadline:
        num_batches += 1
        if dumps.is_wanted:
            dumps.serve()
        time.sleep(0.005)
    return num_batches


class Asking(threading.Thread):
    """Asks as the launcher's command does."""

    def __init__(self, dumps: TrainingDumps, **options: float) -> None:
        super().__init__(daemon=True)
        self._dumps, self._options = dumps, options
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            ask(self._dumps, **self._options)
        except BaseException as failure:
            self.failure = failure


def test_the_dump_is_taken_between_two_batches_by_the_training_s_thread() -> None:
    written: list[tuple[str, bool, int]] = []
    dumps = TrainingDumps(
        lambda directory, in_place: written.append((directory, in_place, threading.get_ident()))
    )
    asking = Asking(dumps)
    assert trained(dumps, until=lambda: not asking.is_alive()) > 1  # and it goes on
    assert asking.failure is None
    assert written == [("/c", False, threading.get_ident())]


def test_a_held_training_waits_to_be_ended_and_goes_on_if_it_is_not() -> None:
    dumps = TrainingDumps(lambda _, in_place: None)
    request = Request(verb=Verb.DUMP, operation="d", arguments={"directory": "/c", "hold_s": 0.3})
    dumps.handle(request.encode())
    began = time.monotonic()
    dumps.serve()
    assert time.monotonic() - began >= 0.3
    assert Report.decode(dumps.handle(Request(verb=Verb.POLL, operation="d").encode())).state is State.DONE


def test_what_fails_is_told_to_whoever_asked_and_not_to_the_training() -> None:
    def fail(_directory: str, *, in_place: bool) -> None:
        raise StorageError("/c is full")

    dumps = TrainingDumps(fail)
    asking = Asking(dumps, hold_s=600.0)
    trained(dumps, until=lambda: not asking.is_alive())  # without the ten minutes
    assert isinstance(asking.failure, StorageError)
    assert "/c is full" in str(asking.failure)


def test_without_a_training_and_without_batches_it_is_not_yet_possible() -> None:
    with pytest.raises(FailedPreconditionError, match="rank 0 has not entered its TrainCtx"):
        ask(None)
    written: list[str] = []
    dumps = TrainingDumps(lambda directory, in_place: written.append(directory))
    with pytest.raises(FailedPreconditionError, match=r"ended no batch for 0.1 s \(PERSIA_DEADLINE_SEC\)"):
        ask(dumps, deadline_s=0.1)
    dumps.serve()  # nobody waits for it any more
    assert written == []


def test_requests_are_checked_and_one_is_served_at_a_time() -> None:
    dumps = TrainingDumps(lambda _, in_place: None)

    def begin(operation: str, **arguments: Any) -> None:
        dumps.handle(Request(verb=Verb.DUMP, operation=operation, arguments=arguments).encode())

    for arguments in (
        {},
        {"directory": 3},
        {"directory": "/c", "hold_s": -1},
        {"directory": "/c", "hold_s": "x"},
        {"directory": "/c", "in_place": "yes"},
    ):
        with pytest.raises(CorruptionError, match="checkpoint request: dump: "):
            begin("a", **arguments)
    begin("b", directory="/c")
    begin("b", directory="/c")  # repeated after a lost answer
    with pytest.raises(ResourceExhaustedError, match="rank 0 is busy with b"):
        begin("c", directory="/c")


class LateSession(DirectSession):
    """Rank 0 gets the first requests, whose answers come too late."""

    def __init__(self, dumps: TrainingDumps, num_late: int) -> None:
        super().__init__(dumps)
        self._num_late = num_late

    def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        answer = super().request(subject, payload, timeout_s)
        self._num_late -= 1
        if self._num_late >= 0:
            raise DeadlineExceededError(f"no reply on {subject}")
        return answer


def test_a_first_answer_that_is_late_is_asked_for_again_and_one_dump_taken() -> None:
    written: list[str] = []
    dumps = TrainingDumps(lambda directory, in_place: written.append(directory))
    session: Any = LateSession(dumps, num_late=2)
    asking = threading.Thread(
        target=request_training_dump, args=(session, "/c"), kwargs={"hold_s": 0.0, "deadline_s": 30.0}
    )
    asking.start()
    trained(dumps, until=lambda: not asking.is_alive())
    assert written == ["/c"]


def request_of(verb: Verb, operation: str, **arguments: Any) -> bytes:
    return Request(verb=verb, operation=operation, arguments=arguments).encode()


def test_who_has_asked_first_can_end_the_hold_though_another_has_asked_meanwhile() -> None:
    written: list[str] = []
    dumps = TrainingDumps(lambda directory, in_place: written.append(directory))
    dumps.handle(request_of(Verb.DUMP, "first", directory="/1", hold_s=60.0))
    training = threading.Thread(target=dumps.serve)
    training.start()
    deadline = time.monotonic() + 120
    while Report.decode(dumps.handle(request_of(Verb.POLL, "first"))).state is not State.DONE:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    dumps.handle(request_of(Verb.DUMP, "second", directory="/2"))
    assert training.is_alive()
    assert Report.decode(dumps.handle(request_of(Verb.CANCEL, "first"))).state is State.DONE
    training.join(120)
    assert not training.is_alive()
    dumps.serve()
    assert written == ["/1", "/2"]


class InterruptedSession(DirectSession):
    """A signal comes while the dump is written."""

    def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        answer = super().request(subject, payload, timeout_s)
        if Request.decode(payload).verb is Verb.POLL:
            raise SystemExit(143)
        return answer


def test_a_training_is_not_held_for_someone_who_was_interrupted() -> None:
    dumps = TrainingDumps(lambda _, in_place: asking.join(120))  # ends after it was interrupted
    session: Any = InterruptedSession(dumps)

    def ask_and_exit() -> None:
        with pytest.raises(SystemExit):
            request_training_dump(session, "/c", hold_s=60.0, deadline_s=30.0)

    asking = threading.Thread(target=ask_and_exit)
    asking.start()
    while not dumps.is_wanted:
        time.sleep(0.005)
    began = time.monotonic()
    dumps.serve()
    assert time.monotonic() - began < 30
