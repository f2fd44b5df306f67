"""A loader's context against scripted receivers at a real broker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from persia import env
from persia.ctx import DataCtx
from persia.embedding.data import IDTypeFeature, PersiaBatch
from persia.errors import FailedPreconditionError, UnavailableError
from persia.job.connection import JobConnection
from persia.messaging.payloads import EndOfStream, FlowReply, PositionReply, ReplyStatus, SubmittedBatch
from persia.messaging.subjects import EMBEDDING_WORKER, NN_WORKER
from persia.pipeline import send
from persia.security.secret import TRAINER
from persia.testing import LocalNats

Answer = Callable[[], ReplyStatus]


class Receivers:
    """One embedding worker and one NN rank that answer as told, and keep what they were sent."""

    def __init__(self, answer: Answer, *, loses_first: bool = False) -> None:
        """`loses_first`: the first request on each subject meets a connection that is just made again."""
        self.worker = JobConnection.connect("worker", TRAINER)
        self.rank = JobConnection.connect("rank", TRAINER)
        self.answer = answer
        self.batches: list[SubmittedBatch] = []
        self.ends: list[EndOfStream] = []
        self.answer_to_end = ReplyStatus.OK
        self.lost: set[str] = set()  # by subject, if the first is to be lost
        subjects = self.rank.session.subjects
        answers = (
            (self.worker, subjects.ids(0), self.on_ids),
            (self.rank, subjects.batch(0), self.on_batch),
            (self.rank, subjects.end(0), self.on_end),
            (self.rank, subjects.position(0), lambda _: PositionReply((), 0).encode()),
        )
        for connection, subject, handler in answers:
            handle = partial(self.lose_first, connection, subject, handler) if loses_first else handler
            connection.session.respond(subject, handle)
        self.worker.advertise(EMBEDDING_WORKER, 0, 1, slot_modes=("",))
        self.rank.advertise(NN_WORKER, 0, 1)

    def close(self) -> None:
        self.worker.close()
        self.rank.close()

    def lose_first(
        self, connection: JobConnection, subject: str, handler: Callable[[bytes], bytes], payload: bytes
    ) -> bytes | None:
        if subject in self.lost:
            return handler(payload)
        self.lost.add(subject)
        connection._advertisers[0].publish_again()  # as after each connection
        return None

    def on_ids(self, payload: bytes) -> bytes:
        return FlowReply(self.answer(), 10, 1, 7, "scripted").encode()

    def on_batch(self, payload: bytes) -> bytes:
        self.batches.append(SubmittedBatch.decode(payload))
        return FlowReply(ReplyStatus.OK).encode()

    def on_end(self, payload: bytes) -> bytes:
        self.ends.append(EndOfStream.decode(payload))
        return FlowReply(self.answer_to_end, message="scripted").encode()


@pytest.fixture
def job(nats_server: LocalNats, job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "REPLICA_INDEX", "REPLICA_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERSIA_NATS_URL", nats_server.url)
    monkeypatch.setenv("PERSIA_JOB_NAME", job_name)
    # Processes find each other within it, on a busy machine, too.
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "120")
    env.reload_env()


def batch() -> PersiaBatch:
    return PersiaBatch([IDTypeFeature("user", [np.array([1], np.uint64)])], requires_grad=False)


@pytest.mark.usefixtures("job")
def test_a_receiver_that_is_full_for_longer_than_the_deadline_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "5")
    env.reload_env()
    asked_at: list[float] = []

    def answer() -> ReplyStatus:
        asked_at.append(time.monotonic())
        return ReplyStatus.FULL if asked_at[-1] < asked_at[0] + 6.0 else ReplyStatus.OK

    receivers = Receivers(answer)
    try:
        with DataCtx() as ctx:
            ctx.send_data(batch())
        assert len(asked_at) > 2
        assert [(b.batch_id, b.reference) for b in receivers.batches] == [(0, 7)]
        assert [(end.num_batches, end.error) for end in receivers.ends] == [(1, None)]
    finally:
        receivers.close()


@pytest.mark.usefixtures("job")
def test_what_was_lost_with_a_connection_of_a_receiver_is_repeated_when_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(send, "_REQUEST_TIMEOUT_S", 60.0)  # there is no second try after a time-out
    receivers = Receivers(lambda: ReplyStatus.OK, loses_first=True)
    try:
        with DataCtx() as ctx:
            ctx.send_data(batch())
        assert len(receivers.lost) == 4
        assert (len(receivers.batches), len(receivers.ends)) == (1, 1)
    finally:
        receivers.close()


@pytest.mark.usefixtures("job")
def test_a_refused_batch_ends_the_stream_with_its_reason(log: pytest.LogCaptureFixture) -> None:
    receivers = Receivers(lambda: ReplyStatus.ERROR)
    try:
        with (
            pytest.raises(FailedPreconditionError, match="worker 0 refused the batch: scripted"),
            DataCtx() as ctx,
        ):
            ctx.send_data(batch())
        assert receivers.ends[0].num_batches == 0
        assert "scripted" in (receivers.ends[0].error or "")
        told = [record for record in log.records if "was not sent" in record.getMessage()]
        assert [record.__dict__["batch_id"] for record in told] == [0]
    finally:
        receivers.close()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("catches", [False, True], ids=["uncaught", "caught"])
def test_a_loader_whose_ranks_have_failed_exits_with_an_error(
    catches: bool, log: pytest.LogCaptureFixture
) -> None:
    """Whatever the script catches. Before, its exit code was 0, as if its batches had been trained."""
    receivers = Receivers(lambda: ReplyStatus.OK)

    def load() -> None:
        with DataCtx() as ctx:
            ctx.send_data(batch())
            receivers.rank.failure = "ValueError: scripted"
            receivers.rank.close()
            with contextlib.suppress(UnavailableError) if catches else contextlib.nullcontext():
                ctx.send_data(batch())

    try:
        with pytest.raises(SystemExit) as ended:
            load()
        assert ended.value.code == os.EX_TEMPFAIL
        assert "NN worker 0 has left the job after an error: ValueError: scripted" in log.text
    finally:
        receivers.close()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("answer", "code"), [(ReplyStatus.CLOSED, None), (ReplyStatus.FAILED, os.EX_TEMPFAIL)], ids=str
)
def test_a_rank_tells_at_the_end_whether_its_training_has_failed(
    answer: ReplyStatus, code: int | None
) -> None:
    receivers = Receivers(lambda: ReplyStatus.OK)
    receivers.answer_to_end = answer
    try:
        with (
            contextlib.nullcontext() if code is None else pytest.raises(SystemExit, match=str(code)),
            DataCtx() as ctx,
        ):
            ctx.send_data(batch())
        assert [end.num_batches for end in receivers.ends] == [1]
    finally:
        receivers.close()


WITHOUT_WITH = """
import sys
import numpy as np
from persia import DataCtx, IDTypeFeature, PersiaBatch

ctx = DataCtx()
ctx.send_data(PersiaBatch([IDTypeFeature("user", [np.array([1], np.uint64)])], requires_grad=False))
print("sent", end="")
if sys.argv[1:] == ["fail"]:
    raise ValueError("scripted")
if sys.argv[1:] == ["close"]:
    sys.stdout.close()
"""


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("answer", "arguments", "code"),
    [
        (ReplyStatus.OK, [], 0),
        (ReplyStatus.CLOSED, [], 0),
        (ReplyStatus.FAILED, [], os.EX_TEMPFAIL),
        (ReplyStatus.FAILED, ["close"], os.EX_TEMPFAIL),
        (ReplyStatus.FAILED, ["fail"], 1),
    ],
    ids=str,
)
def test_a_context_without_with_ends_its_process_with_the_same_exit_code(
    answer: ReplyStatus, arguments: list[str], code: int
) -> None:
    receivers = Receivers(lambda: ReplyStatus.OK)
    receivers.answer_to_end = answer
    try:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_WITH, *arguments],
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, "sent"), done.stderr
        assert ("batches were not taken: exit code 75" in done.stderr) == (code == os.EX_TEMPFAIL)
        assert [end.num_batches for end in receivers.ends] == [1]
    finally:
        receivers.close()


@pytest.mark.usefixtures("job")
def test_a_receiver_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "5")
    env.reload_env()
    receivers = Receivers(lambda: ReplyStatus.OK)
    ctx = DataCtx()
    receivers.close()
    with pytest.raises(UnavailableError, match="embedding worker 0 did not answer in 5 s"):
        ctx.send_data(batch())
    ctx.__exit__(None, None, None)
