"""Long dumps and loads show how far they are to whoever waits for them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import types
from pathlib import Path

import pytest

from persia.checkpoint import progress as progress_module
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.coordinator import DumpOperation, LoadOperation
from persia.checkpoint.peers import LocalPeer, Peer
from persia.checkpoint.progress import Progress, ShownProgress, megabytes
from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.storage.location import Location
from persia.storage.manifest import is_dump_id, make_dump_id

from .conftest import make_bags, services, train


class Terminal(io.StringIO):
    """As far as programs ask."""

    def isatty(self) -> bool:
        return True


class HeldPeer(LocalPeer):
    """Says that it works on until `terminal` shows that it does."""

    terminal: Terminal | None = None

    def call(self, request: Request, timeout_s: float) -> Report:
        report = super().call(request, timeout_s)
        if request.verb is not Verb.POLL or self.terminal is None:
            return report
        phase = ": checking" if report.state is State.CHECKED else ": loading"
        phase = ": writing" if is_dump_id(request.operation) else phase
        if phase in self.terminal.getvalue():
            return report
        return dataclasses.replace(report, state=State.RUNNING, result=None)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """To be made standard error by the test itself: pytest has its own again when fixtures are set up."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    return Terminal()


@pytest.fixture
def peer() -> HeldPeer:
    bags = make_bags()
    train(bags, num_ids=300)
    (service,) = services([bags])
    return HeldPeer(service)


def test_operations_tell_how_far_they_are(tmp_path: Path, peer: HeldPeer) -> None:
    told: list[Progress] = []
    dump = DumpOperation(
        make_dump_id(), [peer], 20.0, request=DumpRequest(tmp_path / "a"), on_progress=told.append
    )
    dump.begin()
    section = dump.finish()
    assert {progress.phase for progress in told} == {"writing"}
    assert told == sorted(told, key=lambda progress: (progress.done_rows, progress.done_bytes))
    assert told[-1].done_rows == told[-1].total_rows == section.num_rows > 0
    assert told[-1].done_bytes == section.num_bytes

    Checkpoints(lambda: [peer], deadline_s=20.0).dump(DumpRequest(tmp_path / "b"))
    told.clear()
    load = LoadOperation(
        "load-1", [peer], 20.0, directory=Location.of(tmp_path / "b"), on_progress=told.append
    )
    load.check()
    load.apply()
    for phase in ("checking", "loading"):
        last = [progress for progress in told if progress.phase == phase][-1]
        assert last.done_rows == last.total_rows == section.num_rows


def test_waiting_shows_a_bar(tmp_path: Path, peer: HeldPeer, terminal: Terminal) -> None:
    peers: list[Peer] = [peer]
    checkpoints = Checkpoints(lambda: peers, deadline_s=20.0)
    peer.terminal = terminal
    with contextlib.redirect_stderr(terminal):
        _dump_and_load(checkpoints, terminal, tmp_path)


def _dump_and_load(checkpoints: Checkpoints, terminal: Terminal, tmp_path: Path) -> None:
    checkpoints.dump(DumpRequest(tmp_path / "c", blocking=False))
    assert terminal.getvalue() == "", "nobody waits: the terminal is the script's"
    checkpoints.wait_for_dump()
    assert f"dumping to {tmp_path / 'c'}: writing" in terminal.getvalue()
    checkpoints.load(Source(tmp_path / "c"), blocking=False)
    assert f"loading {tmp_path / 'c'}: checking" in terminal.getvalue()
    assert ": loading" not in terminal.getvalue()
    checkpoints.wait_for_load()
    assert ": loading" in terminal.getvalue()
    assert "rows, " in terminal.getvalue()


def test_a_blocking_dump_shows_a_bar(tmp_path: Path, peer: HeldPeer, terminal: Terminal) -> None:
    peer.terminal = terminal
    with contextlib.redirect_stderr(terminal):
        Checkpoints(lambda: [peer], deadline_s=20.0).dump(DumpRequest(tmp_path / "c"))
    assert ": writing" in terminal.getvalue()


def test_a_log_has_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(progress_module, "time", types.SimpleNamespace(monotonic=lambda: now))
    shown = ShownProgress("dumping to /m")
    for now in (101.0, 129.0, 131.0, 140.0, 162.0):
        shown(Progress("writing", int(now * 1e6), 0, 0))
    assert [record.message for record in log.records] == [
        "dumping to /m: writing, 131.0 MB so far",
        "dumping to /m: writing, 162.0 MB so far",
    ]


def test_amounts() -> None:
    assert (megabytes(0), megabytes(12_340_000), megabytes(4.56e9)) == ("0.0 MB", "12.3 MB", "4.56 GB")
