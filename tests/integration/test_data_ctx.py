"""A loader's context against scripted receivers at a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from persia import env
from persia.ctx import DataCtx
from persia.embedding.data import IDTypeFeature, PersiaBatch
from persia.errors import FailedPreconditionError, UnavailableError
from persia.job.connection import JobConnection
from persia.messaging.payloads import EndOfStream, FlowReply, PositionReply, ReplyStatus, SubmittedBatch
from persia.messaging.subjects import EMBEDDING_WORKER, NN_WORKER
from persia.security.secret import TRAINER
from persia.testing import LocalNats

Answer = Callable[[], ReplyStatus]


class Receivers:
    """One embedding worker and one NN rank that answer as told, and keep what they were sent."""

    def __init__(self, answer: Answer) -> None:
        self.cluster = JobConnection.connect("receivers", TRAINER)
        self.answer = answer
        self.batches: list[SubmittedBatch] = []
        self.ends: list[EndOfStream] = []
        session = self.cluster.session
        session.respond(session.subjects.ids(0), self.on_ids)
        session.respond(session.subjects.batch(0), self.on_batch)
        session.respond(session.subjects.end(0), self.on_end)
        session.respond(session.subjects.position(0), lambda _: PositionReply((), 0).encode())
        self.cluster.advertise(EMBEDDING_WORKER, 0, 1, slot_modes=("",))
        self.cluster.advertise(NN_WORKER, 0, 1)

    def on_ids(self, payload: bytes) -> bytes:
        return FlowReply(self.answer(), 10, 1, 7, "scripted").encode()

    def on_batch(self, payload: bytes) -> bytes:
        self.batches.append(SubmittedBatch.decode(payload))
        return FlowReply(ReplyStatus.OK).encode()

    def on_end(self, payload: bytes) -> bytes:
        self.ends.append(EndOfStream.decode(payload))
        return FlowReply(ReplyStatus.OK).encode()


@pytest.fixture
def job(nats_server: LocalNats, job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "REPLICA_INDEX", "REPLICA_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERSIA_NATS_URL", nats_server.url)
    monkeypatch.setenv("PERSIA_JOB_NAME", job_name)
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "1")
    env.reload_env()


def batch() -> PersiaBatch:
    return PersiaBatch([IDTypeFeature("user", [np.array([1], np.uint64)])], requires_grad=False)


@pytest.mark.usefixtures("job")
def test_a_receiver_that_is_full_for_longer_than_the_deadline_is_waited_for() -> None:
    room_at = time.monotonic() + 2.0
    full = [0]

    def answer() -> ReplyStatus:
        if time.monotonic() < room_at:
            full[0] += 1
            return ReplyStatus.FULL
        return ReplyStatus.OK

    receivers = Receivers(answer)
    try:
        with DataCtx() as ctx:
            ctx.send_data(batch())
        assert full[0] > 1
        assert [(b.batch_id, b.reference) for b in receivers.batches] == [(0, 7)]
        assert [(end.num_batches, end.error) for end in receivers.ends] == [(1, None)]
    finally:
        receivers.cluster.close()


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
        receivers.cluster.close()


@pytest.mark.usefixtures("job")
def test_a_receiver_that_does_not_answer_is_named() -> None:
    receivers = Receivers(lambda: ReplyStatus.OK)
    ctx = DataCtx()
    receivers.cluster.close()
    with pytest.raises(UnavailableError, match="embedding worker 0 did not answer in 1 s"):
        ctx.send_data(batch())
    ctx.__exit__(None, None, None)
