"""Exposition, reported values, rates, trace events and the HTTP port, each by itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from persia._native import DURATION_BOUNDS_S, DurationStats
from persia.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.messaging.discovery import ServiceInfo
from persia.observability import finite_reported, report, reported
from persia.observability.exposition import Families, text
from persia.observability.http import HttpPort, json_answer
from persia.observability.phases import Phase
from persia.observability.recording import trace_events
from persia.observability.status import (
    ProcessStatus,
    fetch_json,
    missing_replicas,
    rates,
    with_gone,
)
from persia.observability.trace_summary import summarize
from persia.security import audit, http_token, secret
from persia.serving.statistics import SIZE_BOUNDS


class Fixed:
    """A collector of what a function adds."""

    def __init__(self, add) -> None:
        self._add = add

    def collect(self):
        families = Families(role="r", replica="0")
        self._add(families)
        return families.collect()


def page_of(add) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fixed(add))
    return text(registry).decode()


def test_published_counters_have_no_suffix_and_ours_have():
    page = page_of(lambda f: (f.counter("nan_count", "N.", 2, feat="a"), f.counter("persia_x", "X.", 3)))
    assert (
        '# HELP nan_count N.\n# TYPE nan_count counter\nnan_count{feat="a",replica="0",role="r"} 2.0' in page
    )
    assert '# TYPE persia_x_total counter\npersia_x_total{replica="0",role="r"} 3.0' in page


def test_samples_of_one_name_are_one_family():
    page = page_of(lambda f: (f.gauge("g", "G.", 1, name="a"), f.gauge("g", "G.", 2, name="b")))
    assert page.count("# TYPE g gauge") == 1
    assert page.count("\ng{") == 2


def test_a_histogram_counts_up_to_each_bound():
    stats = DurationStats("x")
    for ns in (500, 1500, 1500, 10**12):
        stats.record(1000, 1000 + ns)
    page = page_of(lambda f: f.histogram("h", "H.", stats.snapshot(), phase="x"))
    lines = [line for line in page.splitlines() if line.startswith("h_bucket")]
    assert len(lines) == len(DURATION_BOUNDS_S) + 1
    assert [float(line.split()[-1]) for line in lines[:4]] == [1, 1, 3, 3]
    assert 'le="1.024e-06"' in lines[0]
    assert 'le="1.625e-06"' in lines[2]
    assert 'le="+Inf"' in lines[-1]
    assert lines[-1].endswith(" 4.0")
    assert 'h_count{phase="x",replica="0",role="r"} 4.0' in page


@pytest.mark.parametrize("bounds", [DURATION_BOUNDS_S, SIZE_BOUNDS[7:]])  # sizes below 8 are all there
def test_a_bound_is_at_most_1_3_times_the_one_before(bounds):
    steps = [after / before for before, after in itertools.pairwise(bounds)]
    assert min(steps) > 1.1
    assert max(steps) <= 1.3
    assert SIZE_BOUNDS[:8] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_phase_is_recorded_also_when_it_fails():
    phase = Phase("p")
    with pytest.raises(ValueError, match="boom"), phase.of(7, 8):
        raise ValueError("boom")
    counts, total_s, last_s = phase.stats.snapshot()
    assert sum(counts) == 1
    assert 0 < total_s == last_s < 60


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"auc": "0.7"}, InvalidTypeError),
        ({"auc": True}, InvalidTypeError),
        ({"a b": 1}, InvalidArgumentError),
        ({f"n{i}": 1 for i in range(101)}, ResourceExhaustedError),
    ],
)
def test_what_cannot_be_reported_is_refused_and_changes_nothing(values, error):
    report(kept=1)
    with pytest.raises(error, match="report"):
        report(**values)
    assert reported()["kept"] == 1
    assert not reported().keys() & (values.keys() - {"kept"})


def test_nan_is_shown_in_metrics_and_left_out_of_json():
    report(loss_nan=float("nan"))
    assert "loss_nan" in reported()
    assert "loss_nan" not in finite_reported()
    json.dumps(finite_reported(), allow_nan=False)


def info(incarnation: int = 1, status_address: str = "h:1") -> ServiceInfo:
    return ServiceInfo(
        role="nn-worker", index=0, replicas=1, incarnation=incarnation, status_address=status_address
    )


def status(at_s: float, incarnation: int = 1, **stats: object) -> ProcessStatus:
    return ProcessStatus(info=info(incarnation), values={"monotonic_s": at_s, "stats": stats})


def test_rates_are_differences_by_the_process_own_clock():
    before, now = status(10.0, n=5, queues={"q": 1}), status(12.0, n=9, queues={"q": 2}, new=1)
    assert rates(before, now) == {"n": 2.0}


def test_a_restarted_process_has_no_rates():
    assert rates(status(10.0, n=5), status(12.0, incarnation=2, n=1)) == {}
    assert rates(None, status(12.0, n=1)) == {}
    assert rates(status(12.0, n=1), ProcessStatus(info=info(), values=None, error="gone")) == {}


def test_who_is_not_heard_of_any_more_stays_as_gone_in_its_place():
    first, second = (
        ProcessStatus(info=dataclasses.replace(info(), index=index, replicas=2), values={})
        for index in (0, 1)
    )
    before = {("nn-worker", 0): first, ("nn-worker", 1): second}
    now = with_gone(before, [second])
    assert [(one.info.index, one.gone) for one in now] == [(0, True), (1, False)]
    assert now[0].values is None
    assert with_gone(before, [second, first]) == [first, second]


def test_servers_that_were_replaced_by_another_number_are_not_missed():
    old = [
        ProcessStatus(info=dataclasses.replace(info(index), index=index, replicas=2), values={})
        for index in (0, 1)
    ]
    new = ProcessStatus(info=dataclasses.replace(info(5), generation=1), values={})
    assert with_gone({("nn-worker", index): status for index, status in enumerate(old)}, [new]) == [new]


def test_replicas_that_are_not_there_are_named():
    assert missing_replicas([dataclasses.replace(info(), index=1, replicas=3)]) == [
        "nn-worker 0",
        "nn-worker 2",
    ]
    assert missing_replicas([]) == []


def recording(spans, *, boot_id="b", monotonic_ns=0, unix_ns=0):
    return {"spans": spans, "boot_id": boot_id, "monotonic_ns": monotonic_ns, "unix_ns": unix_ns}


def test_spans_of_one_host_keep_their_clock():
    one = recording([["a", 5000, 7000, 0, 3, 1]], unix_ns=10**9)
    other = recording([["b", 6000, 9000, 4, None, 2]], unix_ns=5 * 10**9)  # a clock that was set: ignored
    spans = [e for e in trace_events([(info(), one), (info(), other)]) if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in spans] == [
        ("a", 0.0, 2.0, {"batch_id": 3}),
        ("b", 1.0, 3.0, {"reference": 4}),
    ]


def test_spans_of_another_host_are_placed_by_wall_clock():
    one = recording([["a", 5000, 7000, 0, None, 1]], monotonic_ns=0, unix_ns=100_000)
    # Booted elsewhere, 2000 ns later by wall clock: its time 0 is our 2000.
    other = recording([["b", 4000, 5000, 0, None, 1]], boot_id="c", monotonic_ns=1000, unix_ns=103_000)
    spans = [e for e in trace_events([(info(), one), (info(), other)]) if e["ph"] == "X"]
    assert [e["ts"] for e in spans] == [0.0, 1.0]


def test_calls_are_asynchronous_events():
    events = trace_events([(info(), recording([["rpc to worker 0", 1000, 3000, 0, None, 1]]))])
    (begin, end) = (e for e in events if e["ph"] in "be")
    assert begin["id"] == end["id"]
    assert (begin["ts"], end["ts"]) == (0.0, 2.0)
    assert trace_events([]) == []


def test_a_summary_says_where_the_time_of_a_batch_goes():
    spans = [
        ["batch", 0, 4_000_000, 0, 1, 1],
        ["batch", 0, 8_000_000, 0, 2, 1],
        ["rpc to worker 0", 0, 1_000_000, 0, 1, 1],
        ["rpc to worker 0", 0, 2_000_000, 0, 1, 1],
        ["batch", 0, 90_000_000, 0, None, 1],  # of an evaluation
    ]
    lines = summarize(trace_events([(info(), recording(spans))]))
    assert [line.split() for line in lines[1:]] == [
        ["nn-worker", "batch", "6.000", "1.0"],
        ["nn-worker", "rpc", "to", "worker", "0", "1.500", "1.0"],
    ]
    assert lines[0].endswith("of 2 batches")
    assert summarize([]) == ["no span of a training batch was recorded"]


@pytest.fixture
def port():
    def refuse(_query):
        raise InvalidArgumentError("spans is wrong")

    routes = {
        ("GET", "/healthz"): lambda _query: json_answer("ok"),
        ("GET", "/status"): lambda query: json_answer(dict(query)),
        ("POST", "/trace"): refuse,
    }
    made = HttpPort("127.0.0.1", 0, routes)
    yield made
    made.close()


def ask(
    port: HttpPort, path: str, method: str = "GET", authorization: str | None = None
) -> tuple[int, dict[str, object]]:
    headers = {"Authorization": authorization or f"Bearer {http_token()}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port.port}{path}", headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_port_answers_by_path_and_method(port):
    assert ask(port, "/status?a=1&a=2&b=") == (200, {"a": "2"})
    assert ask(port, "/trace", "POST") == (400, {"error": "spans is wrong"})
    assert ask(port, "/trace")[0] == 405
    code, answer = ask(port, "/etc/passwd")
    assert code == 404
    assert "/status /trace" in str(answer["error"])


@pytest.mark.parametrize("authorization", ["none", "Bearer", "Bearer 00", f"Basic {'0' * 64}", "Bearer \xff"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/status"), ("POST", "/trace"), ("GET", "/etc/passwd")])
def test_strangers_learn_only_whether_the_process_lives(port, authorization, method, path):
    code, answer = ask(port, path, method, authorization)
    assert code == 401
    assert "persia-launcher secret token" in str(answer["error"])
    assert port.num_refused == 1
    assert ask(port, "/healthz", authorization=authorization) == (200, "ok")


def test_a_role_checks_the_token_and_cannot_make_it(monkeypatch):
    token = http_token()
    monkeypatch.setenv("PERSIA_JOB_SECRET", secret.find().limited_to("loader").text)
    made = HttpPort("127.0.0.1", 0, {("GET", "/status"): lambda query: json_answer(dict(query))})
    try:
        assert ask(made, "/status", authorization=f"Bearer {token}")[0] == 200
        with pytest.raises(PermissionDeniedError, match="secret show --role monitor"):
            http_token()
    finally:
        made.close()


def test_the_token_goes_to_the_asked_address_alone(port, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as asked:
        elsewhere = f"http://127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("http_proxy", elsewhere)
        monkeypatch.delenv("no_proxy", raising=False)
        assert fetch_json(f"127.0.0.1:{port.port}", "/status?a=1") == {"a": "1"}

        def redirect() -> None:
            connection, _ = asked.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(
                    f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}/\r\nContent-Length: 0\r\n\r\n".encode()
                )

        threading.Thread(target=redirect, daemon=True).start()
        with pytest.raises(UnavailableError, match="302"):
            fetch_json(f"127.0.0.1:{asked.getsockname()[1]}", "/status")
        other.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_without_a_secret_everything_but_health_is_refused(monkeypatch, log):
    token = http_token()
    monkeypatch.setenv("PERSIA_JOB_SECRET", "broken")
    made = HttpPort("127.0.0.1", 0, {("GET", "/status"): lambda query: json_answer(dict(query))})
    try:
        assert ask(made, "/status", authorization=f"Bearer {token}")[0] == 401
    finally:
        made.close()
    assert "PERSIA_JOB_SECRET has 6 characters" in log.text


def test_refused_requests_are_audited_within_bounds(port, monkeypatch, tmp_path):
    monkeypatch.setenv("PERSIA_AUDIT_LOG", str(tmp_path / "audit"))
    monkeypatch.setattr(audit, "_second", 0)  # an earlier test may have used up this second's lines
    for _ in range(40):
        ask(port, "/status", authorization="none")
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert {(line["method"], line["outcome"]) for line in lines} == {("GET /status", "refused")}
    assert lines[0]["peer"].startswith("127.0.0.1:")
    assert port.num_refused == 40
    assert len(lines) < 40 or lines[-1]["time"][:19] > lines[0]["time"][:19]


def test_clients_that_say_nothing_do_not_keep_others_out_for_long(port):
    silent = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(40)]
    try:
        # 32 are held; the ones above were refused at once.
        for client in silent[32:]:
            client.settimeout(60)
            assert client.recv(1) == b""
        for client in silent[:32]:
            client.settimeout(0)
            with pytest.raises(BlockingIOError):
                client.recv(1)
    finally:
        for client in silent:
            client.close()
    for _ in range(600):
        try:
            assert ask(port, "/status")[0] == 200
            return
        except OSError:
            threading.Event().wait(0.1)
    raise AssertionError("the port did not recover")


def test_garbage_is_answered_or_dropped(port):
    with socket.create_connection(("127.0.0.1", port.port), timeout=60) as client:
        client.sendall(b"\x00\xff garbage\r\n\r\n")
        assert b"400" in client.recv(1000)
    assert ask(port, "/status")[0] == 200
