"""What comes over NATS is judged before anybody acts on it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.errors import CorruptionError, InternalError, StorageError


def test_round_trips() -> None:
    request = Request(verb=Verb.DUMP, operation="x", arguments={"directory": "/a"})
    assert Request.decode(request.encode()) == request
    report = Report(state=State.DONE, done_bytes=1, done_rows=2, total_rows=3, result={"files": []})
    assert Report.decode(report.encode()) == report


def test_errors_keep_their_class_and_message() -> None:
    back = Report.decode(Report(state=State.FAILED, error=StorageError("disk full")).encode())
    assert isinstance(back.error, StorageError)
    assert str(back.error) == "disk full"


def test_only_our_classes_are_looked_up() -> None:
    payload = Report(state=State.FAILED, error=StorageError("x")).encode()
    payload = payload.replace(b"StorageError", b"annotations")
    assert isinstance(Report.decode(payload).error, InternalError)


@given(st.binary(max_size=100))
def test_any_bytes_are_corruption(payload: bytes) -> None:
    for kind in (Request, Report):
        with pytest.raises(CorruptionError):
            kind.decode(payload)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "payload",
    [
        b'{"verb": "erase", "operation": "x", "arguments": {}}',
        b'{"verb": "dump", "operation": 1, "arguments": {}}',
        b'{"verb": "dump", "operation": "x", "arguments": []}',
    ],
)
def test_bad_requests_are_corruption(payload: bytes) -> None:
    with pytest.raises(CorruptionError, match="checkpoint request"):
        Request.decode(payload)
