"""Payloads survive the wire, and malformed ones are refused."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.errors import CorruptionError
from persia.messaging.payloads import (
    EndOfStream,
    FlowReply,
    IdsRequest,
    ReplyStatus,
    SubmittedBatch,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
replicas = st.integers(1, 2**32 - 1).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


@given(replicas, st.binary())
def test_ids_request_round_trip(replica, id_features):
    request = IdsRequest(*replica, id_features)
    assert IdsRequest.decode(request.encode()) == request


@given(st.sampled_from(ReplyStatus), u32, u64, u64, st.text())
def test_flow_reply_round_trip(status, retry_ms, incarnation, reference, message):
    reply = FlowReply(status, retry_ms, incarnation, reference, message)
    assert FlowReply.decode(reply.encode()) == reply


@given(replicas, st.integers(0, 2**31), u64, u64, u32, st.booleans(), st.binary())
def test_submitted_batch_round_trip(replica, sequence, incarnation, reference, worker, grad, dense):
    index, size = replica
    batch_id = sequence * size + index
    batch = SubmittedBatch(batch_id, incarnation, reference, worker, index, size, grad, dense)
    assert SubmittedBatch.decode(batch.encode()) == batch


@given(replicas, u64, st.none() | st.text())
def test_end_of_stream_round_trip(replica, num_batches, error):
    end = EndOfStream(*replica, num_batches, error)
    assert EndOfStream.decode(end.encode()) == end


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (IdsRequest, IdsRequest(0, 1, b"").encode()),
        (FlowReply, FlowReply(ReplyStatus.OK, 0, 1, 2).encode()),
        (SubmittedBatch, SubmittedBatch(0, 1, 2, 0, 0, 1, True, b"").encode()),
        (EndOfStream, EndOfStream(0, 1, 7).encode()),
    ],
)
def test_every_truncation_is_refused(kind, payload):
    for length in range(len(payload)):
        with pytest.raises(CorruptionError):
            kind.decode(payload[:length])


def test_layout_of_a_submitted_batch_is_that_of_the_wire_format():
    batch = SubmittedBatch(7, 0x1122334455667788, 9, 2, 1, 3, True, b"dense", b"ids")
    head = struct.pack("<QQQIIIIQ", 7, 0x1122334455667788, 9, 2, 1, 3, 1, 5)
    assert batch.encode() == head + b"dense" + b"ids"
    with pytest.raises(CorruptionError, match="a dense section of 5 bytes, and 4 are left"):
        SubmittedBatch.decode(head + b"dens")


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        (SubmittedBatch(4, 0, 0, 0, 0, 3, True, b""), "batch_id 4"),
        (SubmittedBatch(3, 0, 0, 0, 3, 3, True, b""), "loader_index 3"),
        (SubmittedBatch(0, 0, 0, 0, 0, 0, True, b""), "loader_replicas 0"),
        (SubmittedBatch(0, 0, 0, 0, 0, 1, 2, b""), "requires_grad"),  # type: ignore[arg-type]
    ],
)
def test_impossible_batches_are_refused(batch, complaint):
    with pytest.raises(CorruptionError, match=complaint):
        SubmittedBatch.decode(batch.encode())


def test_unknown_status_and_bad_text_are_refused():
    size = len(FlowReply(ReplyStatus.OK).encode())
    with pytest.raises(CorruptionError, match="5 is not a valid ReplyStatus"):
        FlowReply.decode(struct.pack("<I", 5).ljust(size, b"\0"))
    with pytest.raises(CorruptionError, match="utf-8"):
        FlowReply.decode(FlowReply(ReplyStatus.ERROR).encode() + b"\xff")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"loader_index": 2}, "loader_index 2"),
        ({"loader_index": -1}, "loader_index=-1"),
        ({"loader_index": True}, "loader_index=true"),
        ({"num_batches": 1.5}, "num_batches=1.5"),
        ({"num_batches": None}, "num_batches=null"),
        ({"num_batches": 2**64}, "num_batches"),
        ({"error": 3}, "error=3"),
    ],
)
def test_impossible_ends_are_refused(change, complaint):
    values = {"loader_index": 0, "loader_replicas": 2, "num_batches": 5, "error": None, **change}
    with pytest.raises(CorruptionError, match=complaint):
        EndOfStream.decode(json.dumps(values).encode())


@pytest.mark.parametrize("payload", [b"[]", b"3", b"\xff", b"{", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(payload):
    with pytest.raises(CorruptionError):
        EndOfStream.decode(payload)
