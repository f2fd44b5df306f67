"""Lines of the audit log."""

import json
import os
import stat
from pathlib import Path

import pytest

from persia.checkpoint.protocol import Request, Verb
from persia.checkpoint.service import CheckpointService
from persia.security import audit


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERSIA_AUDIT_LOG", str(tmp_path / "audit.log"))
    return tmp_path / "audit.log"


def test_a_line_names_who_what_and_when(path: Path) -> None:
    audit.record(peer="10.0.0.1:9", role="admin", method="ClearRows", at=1.5)
    (line,) = lines_of(path)
    assert line.pop("pid") == os.getpid()
    assert line == {
        "time": "1970-01-01T00:00:01.500+00:00",
        "peer": "10.0.0.1:9",
        "role": "admin",
        "method": "ClearRows",
        "outcome": "ok",
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_refused_requests_of_a_second_have_few_lines_and_are_counted(path: Path) -> None:
    for at in [100.0] * 50 + [101.0]:
        audit.record(peer="x", role=None, method="GET /", outcome=audit.REFUSED, at=at)
    lines = lines_of(path)
    assert len(lines) == 6
    assert lines[-1]["refused_without_line"] == 45


def test_refusals_of_rpc_servers_have_as_few_lines_and_no_role_that_is_unproven(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"time": 200.0, "peer": "x", "role": "none", "method": "connect", "outcome": "refused: no key"}
    monkeypatch.setattr(audit._native, "take_audit_events", lambda: [event] * 8)
    audit._write_events()
    lines = lines_of(path)
    assert len(lines) == 5
    assert {line["role"] for line in lines} == {None}


def test_a_file_that_cannot_be_written_is_reported_and_the_line_is_logged(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PERSIA_AUDIT_LOG", "/proc/none/audit")
    audit.record(peer="x", role="admin", method="ClearRows")
    assert "/proc/none/audit cannot be written" in log.text
    assert '"method": "ClearRows"' in log.text


@pytest.mark.parametrize("verb", [Verb.DUMP, Verb.LOAD])
def test_a_failed_dump_or_load_is_recorded_with_its_outcome(path: Path, verb: Verb) -> None:
    service = CheckpointService(None)  # type: ignore[arg-type]  # a share that no dump can use
    payload = Request(verb=verb, operation="1", arguments={"directory": "/ck"}).encode()
    with pytest.raises(Exception) as failure:  # noqa: PT011 - whatever it is, the line names it
        service.handle(payload)
    (line,) = lines_of(path)
    assert (line["method"], line["directory"]) == (f"checkpoint {verb.value}", "/ck")
    assert line["outcome"] == type(failure.value).__name__
