"""The table of `persia-launcher status`, from what processes answer to the text that is shown."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console

from persia.launcher import status_table
from persia.launcher.status_table import JobView, render, si
from persia.messaging.discovery import ServiceInfo
from persia.messaging.subjects import (
    DATA_LOADER,
    EMBEDDING_PARAMETER_SERVER,
    EMBEDDING_WORKER,
    NN_WORKER,
    SERVING,
)
from persia.observability.status import ProcessStatus

# As each role answers at /status, but for what the table does not read.
STATS: dict[str, dict[str, Any]] = {
    EMBEDDING_PARAMETER_SERVER: {
        "num_looked_up_rows": 4000,
        "num_missing_rows": 1000,
        "sum_staleness": 30,
        "num_updates": 20,
        "num_rows": 1_234_567,
        "num_evicted_rows": 12,
        "rpc_num_running": 3,
        "rpc_num_in_line": 5,
    },
    EMBEDDING_WORKER: {
        "servers": [{"num_retries": 1}, {"num_retries": 2}],
        "num_signs": 60,
        "num_ids": 100,
        "num_expired": 4,
        "num_in_flight": 6,
        "num_buffered": 7,
        "num_looked_up": 50,
    },
    NN_WORKER: {
        "batches_trained": 1500,
        "batches_failed": 1,
        "batches_released": 2,
        "in_flight": 8,
        "queues": {"ready": 4, "gradients": 5},
    },
    DATA_LOADER: {"num_sent": 2500},
    SERVING: {
        "served_version": "7",
        "num_failed": 3,
        "num_samples": 90,
        "num_batches": 10,
        "num_requests": 40,
        "request_s": 1.0,
        "num_running": 1,
        "num_waiting": 2,
        "following": None,
        "version_error": "",
    },
}
FOLLOWING = {"number": 41, "num_behind": 2, "delay_s": 0.5, "pinned": False, "error": None}


def process(
    role: str,
    *,
    index: int = 0,
    replicas: int = 1,
    at_s: float = 10.0,
    stats: Mapping[str, Any] | None = None,
    **values: Any,
) -> ProcessStatus:
    info = ServiceInfo(role=role, index=index, replicas=replicas, incarnation=1)
    answered = {
        "ready": True,
        "configured": True,
        "reason": None,
        "monotonic_s": at_s,
        "resident_bytes": 300 << 20,
        "reported": {},
        "stats": {**STATS[role], **(stats or {})},
        **values,
    }
    return ProcessStatus(info=info, values=answered)


def text_of(now: Sequence[ProcessStatus], before: Sequence[ProcessStatus] = (), **options: Any) -> str:
    earlier = {(status.info.role, status.info.index): status for status in before}
    drawn = io.StringIO()
    Console(file=drawn, width=220).print(render(earlier, now, "job j", **options))
    return drawn.getvalue()


def cells(status: ProcessStatus, before: Sequence[ProcessStatus] = ()) -> list[str]:
    """Of the only row."""
    (row,) = [line for line in text_of([status], before).splitlines() if line.startswith("│")]
    return [cell.strip() for cell in row.strip("│").split("│")]


@pytest.mark.parametrize(
    ("role", "counter", "rate", "in_flight", "waiting", "details"),
    [
        (
            EMBEDDING_PARAMETER_SERVER,
            "num_looked_up_rows",
            "500 rows/s",
            "3",
            "5",
            "1.23M rows, 12 evicted, 75.0% hits, staleness 1.5",
        ),
        (
            EMBEDDING_WORKER,
            "num_looked_up",
            "500 batches/s",
            "6",
            "7",
            "60% unique, 4 expired, 3 RPC retries",
        ),
        (NN_WORKER, "batches_trained", "500 batches/s", "8", "9", "1.5k trained, 2 released, 1 failed"),
        (DATA_LOADER, "num_sent", "500 batches/s", "", "", "2.5k sent"),
        (
            SERVING,
            "num_requests",
            "500 requests/s",
            "1",
            "2",
            "version 7, 3 failed, 9 samples a batch, 0.5 ms",
        ),
    ],
)
def test_a_row_of_each_role(
    role: str, counter: str, rate: str, in_flight: str, waiting: str, details: str
) -> None:
    now = process(role, at_s=12.0)
    before = process(role, at_s=10.0, stats={counter: STATS[role][counter] - 1000, "request_s": 0.5})
    assert cells(now, [before]) == [f"{role} 0", "ready", rate, in_flight, waiting, "300 MiB", details]
    assert cells(now)[2] == "", "one look tells no rate"


def test_restarts_are_shown() -> None:
    assert cells(process(DATA_LOADER, restarts=0))[-1] == "2.5k sent"
    assert cells(process(DATA_LOADER, restarts=1))[-1] == "1 restart; 2.5k sent"
    starting = process(DATA_LOADER, restarts=2, ready=False, reason="it has not joined the job yet")
    assert cells(starting)[-1] == "2 restarts; it has not joined the job yet"


def test_before_the_first_batch_nothing_is_divided_by_nothing() -> None:
    server = dict.fromkeys(STATS[EMBEDDING_PARAMETER_SERVER], 0)
    assert cells(process(EMBEDDING_PARAMETER_SERVER, stats=server))[-1] == "0 rows, 0 evicted, staleness 0.0"
    worker = {"servers": [], **dict.fromkeys(("num_signs", "num_ids", "num_expired"), 0)}
    assert cells(process(EMBEDDING_WORKER, stats=worker))[-1] == "0% unique, 0 expired, 0 RPC retries"
    serving = {"num_samples": 0, "num_batches": 0}
    assert cells(process(SERVING, stats=serving))[-1] == "version 7, 3 failed, 0 samples a batch"


def test_states_of_a_process() -> None:
    waits = cells(process(NN_WORKER, ready=False, reason="there is no connection to the NATS server"))
    assert (waits[1], waits[-1]) == ("not ready", "there is no connection to the NATS server")
    assert cells(process(EMBEDDING_WORKER, configured=False))[1] == "not configured"
    info = ServiceInfo(role=NN_WORKER, index=0, replicas=1, incarnation=1)
    off = ProcessStatus(info=info, values=None, error="shows no status")
    assert cells(off) == ["nn-worker 0", "no status", "", "", "", "", "shows no status"]
    gone = ProcessStatus(info=info, values=None, error="not heard of any more", gone=True)
    assert cells(gone) == ["nn-worker 0", "gone", "", "", "", "", "not heard of any more"]


def test_a_narrow_terminal_cuts_no_name_and_no_number() -> None:
    now = [process(role, at_s=12.0) for role in STATS]
    before = [process(role, at_s=10.0, stats={"num_looked_up_rows": 0}) for role in STATS]
    earlier = {(status.info.role, status.info.index): status for status in before}
    drawn = io.StringIO()
    Console(file=drawn, width=80).print(render(earlier, now, "job j", width=80))
    lines = drawn.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 1 + 3 * len(now), "one line of counts may be wrapped once"
    for status in now:
        assert f"{status.info.role} 0  ready" in [line.rstrip() for line in lines]
    text = " ".join(drawn.getvalue().split())
    assert "3 in flight, 5 waiting, 300 MiB, 1.23M rows, 12 evicted, 75.0% hits, staleness 1.5" in text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, ", packet 41, 2 behind, 0.5 s late"),
        ({"num_behind": None, "delay_s": None}, ", packet 41"),
        ({"pinned": True}, ", packet 41, 2 behind, pinned"),
        ({"error": "a gap"}, ", packet 41, 2 behind, 0.5 s late, stuck: a gap"),
    ],
)
@pytest.mark.parametrize("role", [EMBEDDING_PARAMETER_SERVER, SERVING])
def test_where_a_follower_stands(role: str, changed: Mapping[str, Any], text: str) -> None:
    assert cells(process(role, stats={"following": {**FOLLOWING, **changed}}))[-1].endswith(text)


def test_a_version_that_is_refused_is_told_where_nothing_else_tells_it() -> None:
    refused = {"version_error": "no rows"}
    alone = cells(process(SERVING, stats=refused))[-1]
    assert alone.endswith("; the newest version cannot be served: no rows")
    assert "no rows" not in cells(process(SERVING, stats={**refused, "following": FOLLOWING}))[-1]


def test_what_a_canary_does() -> None:
    canary = {"version": "8", "num_errors": 3, "rolled_back": "", "error": ""}
    for changed, text in (
        ({}, "; canary 8, 3 errors"),
        ({"rolled_back": "it failed"}, "; canary 8, 3 errors, rolled back: it failed"),
        ({"version": "", "error": "no checkpoint"}, "; canary not loaded, 3 errors, no checkpoint"),
    ):
        assert cells(process(SERVING, stats={"canary": {**canary, **changed}}))[-1].endswith(text)


def test_several_models_in_one_server() -> None:
    models = [
        {"model": "ads", "served_version": "7", "version_error": "", "following": FOLLOWING},
        {"model": "feed", "served_version": "8", "version_error": "no rows", "following": None},
    ]
    expected = "ads: version 7, packet 41, 2 behind, 0.5 s late; feed: version 8; the newest version cannot"
    details = cells(process(SERVING, stats={"models": models}))[-1]
    assert details.startswith("2 models, 3 failed, 9 samples a batch; ")
    assert expected in details


def test_below_the_table() -> None:
    first = process(NN_WORKER, index=0, replicas=3, reported={"auc": 0.79125, "step": 120})
    second = process(NN_WORKER, index=1, replicas=3, reported={"auc": 0.5, "loss": 0.25})
    text = text_of([first, second])
    assert text.split("\n")[0].rstrip() == "job j"
    assert "auc 0.79125  step 120  loss 0.25" in text
    assert "not there: nn-worker 2; start them, or see their logs" in text
    assert "not there" not in text_of([first, second], is_whole_job=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1234, "1.23k"), (1_234_567, "1.23M"), (5e9, "5G"), (-2500, "-2.5k")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert si(value) == text


@pytest.mark.parametrize(
    ("tier", "text"),
    [
        ({"checkpoint": None, "step": None, "num_pending": 0}, "1k cached, 2M promoted, no checkpoint"),
        (
            {"checkpoint": "dump-1", "step": None, "num_pending": 0},
            "1k cached, 2M promoted, checkpoint of no step",
        ),
        (
            {"checkpoint": "dump-1", "step": 40, "num_pending": 1},
            "1k cached, 2M promoted, checkpoint of step 40, 1 pending",
        ),
    ],
)
def test_a_server_over_a_pool_shows_its_cache_and_checkpoint(tier: dict[str, Any], text: str) -> None:
    counts = {"num_hot": 1000, "num_promoted": 2_000_000}
    status = process(EMBEDDING_PARAMETER_SERVER, stats={"tier": {**counts, **tier}})
    assert cells(status)[-1].endswith(text)


class Job:
    """What a broker and the processes of a job would answer; a session, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *processes: ProcessStatus) -> None:
        self.processes = list(processes)
        self.is_connected = True
        monkeypatch.setattr(
            status_table, "find_processes", lambda _job, _known: [p.info for p in self.processes]
        )
        monkeypatch.setattr(status_table, "job_status", self.statuses)
        monkeypatch.setattr(status_table.time, "sleep", lambda _seconds: None)

    def statuses(self, infos: Any) -> list[ProcessStatus]:
        asked = list(infos)
        return [status for status in self.processes if status.info in asked]

    def view(self) -> JobView:
        return JobView(self, (), "ads")  # type: ignore[arg-type]


def test_a_job_is_fine_when_every_replica_is_there_and_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, process(NN_WORKER))
    assert job.view().exit_code == 0
    job.processes = [process(NN_WORKER, ready=False, reason="busy")]
    assert job.view().exit_code == 1
    job.processes = [process(EMBEDDING_WORKER, replicas=2)]
    assert job.view().exit_code == 1
    job.processes = []
    assert job.view().exit_code == 1


def test_a_process_that_disappears_is_shown_as_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(monkeypatch, process(NN_WORKER), process(DATA_LOADER))
    view = job.view()
    job.processes.pop()
    view.print_once(1.0)
    assert "gone" in capsys.readouterr().out
    assert view.exit_code == 1


def test_without_the_broker_the_known_processes_are_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(monkeypatch, process(NN_WORKER))
    view = job.view()
    job.is_connected = False
    monkeypatch.setattr(status_table, "find_processes", None)  # would fail
    view.print_once(1.0)
    shown = capsys.readouterr().out
    assert "job ads: its NATS server does not answer" in shown
    assert "gone" not in shown
    assert view.exit_code == 0
