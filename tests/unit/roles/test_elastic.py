"""A parameter server whose number changes is not ready while it has not all rows, or no more."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from persia.config import GlobalConfig
from persia.errors import CorruptionError
from persia.messaging.discovery import ServiceInfo
from persia.messaging.interface import Registration
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, Subjects
from persia.observability.sources import ParameterServerSource
from persia.roles import elastic
from persia.roles.elastic import ElasticServer, ResizeReport
from persia.roles.lifetime import ServerOptions


@pytest.mark.parametrize(
    ("sources", "has_handed_over", "reason"),
    [(0, False, None), (0, True, "it has handed its rows over"), (2, False, "it still gathers its rows")],
)
def test_readiness(sources: int, has_handed_over: bool, reason: str | None) -> None:
    session: Any = SimpleNamespace(subjects=Subjects("job"))
    server: Any = SimpleNamespace(has_handed_over=has_handed_over)
    elastic = ElasticServer(session, server, ServerOptions(port=0, sources=sources), 1, GlobalConfig())
    source = ParameterServerSource(server, 0, 1)
    assert source.not_ready() is None
    source.silence = elastic.not_ready
    assert source.not_ready() == reason


def info_of(replicas: int, generation: int) -> ServiceInfo:
    optional = {field.name: field.default for field in fields(ServiceInfo) if field.default is not MISSING}
    info = {"role": EMBEDDING_PARAMETER_SERVER, "index": 0, "replicas": replicas, "incarnation": 1}
    return ServiceInfo(**{**optional, **info, "generation": generation})


class Broker:
    """A session on whose clock only pauses take time. `serving`: the infos of the servers that answer."""

    def __init__(self, replicas: int) -> None:
        self.subjects = Subjects("job")
        self.num_looks, self.num_pauses, self.limit = 0, 0, 100
        self.serving: list[ServiceInfo] = []
        self.info = info_of(replicas, generation=1)
        self.on_event: Any = None

    def request_many(self, subject: str, _payload: bytes, _window_s: float, enough: Any) -> list[bytes]:
        self.num_looks += 1
        for one in self.serving:
            enough(one.encode())
        return []

    def subscribe(self, _subject: str, on_event: Any) -> Registration:
        self.on_event = on_event
        return Registration(lambda: None)

    def others(self, _window_s: float) -> list[ServiceInfo]:
        self.num_looks += 1
        return [info_of(3, generation=0)]

    def pause(self, _seconds: float) -> bool:
        self.num_pauses += 1
        if self.num_pauses == self.limit:
            raise TimeoutError
        return False


def test_a_server_that_has_restarted_asks_its_generation_for_the_placement() -> None:
    broker: Any = Broker(replicas=2)
    assert elastic.placement_of(broker, 1) == ()
    assert broker.num_looks == 3  # in one, answers may be lost
    broker.serving = [info_of(2, generation=0), replace(info_of(2, generation=1), moved_shards=((7, 1),))]
    assert elastic.placement_of(broker, 1) == ((7, 1),)
    broker.serving.insert(0, info_of(2, generation=1))  # it has restarted, too
    assert elastic.placement_of(broker, 1) == ((7, 1),)


def restarted(broker: Broker) -> ElasticServer:
    """Without rows, and with the default placement."""
    server: Any = SimpleNamespace(was_sent_rows=False, has_handed_over=False)
    session: Any = broker
    elastic = ElasticServer(session, server, ServerOptions(port=0, generation=1), 1, GlobalConfig())
    elastic._advertiser = broker  # type: ignore[assignment]
    return elastic


@pytest.mark.parametrize("moved_shards", [(), ((7, 1),)])
def test_a_server_that_hears_late_of_another_placement_begins_again(
    monkeypatch: pytest.MonkeyPatch, moved_shards: Any
) -> None:
    broker, waits = Broker(replicas=3), []
    first = replace(info_of(3, generation=1), index=1)
    second = replace(first, index=2, moved_shards=moved_shards)

    def pause(event: threading.Event, _seconds: float) -> bool:
        broker.serving = [broker.info, *([first] if broker.num_pauses == 0 else [first, second])]
        broker.on_event(b"")
        broker.num_pauses += 1
        return event.is_set()

    monkeypatch.setattr(threading.Event, "wait", pause)
    monkeypatch.setattr(elastic, "wait_for_stop", lambda: waits.append(True))
    restarted(broker).wait()
    assert (broker.num_looks, bool(waits)) == (3, not moved_shards)


def test_a_server_advertises_its_placement_before_it_answers() -> None:
    session: Any = SimpleNamespace(subjects=Subjects("job"))
    server: Any = SimpleNamespace(
        has_handed_over=False, serve=lambda: None, moved_shards=[(7, 1)], incarnation=1
    )
    new = ElasticServer(session, server, ServerOptions(port=0, sources=2), 1, GlobalConfig())
    changes = []

    def change(**fields: Any) -> None:
        assert not new.is_serving
        changes.append(fields)

    new._advertiser = SimpleNamespace(change=change, publish_again=lambda: None, info="")  # type: ignore[assignment]
    new._serve()
    assert (changes, new.is_serving) == ([{"moved_shards": ((7, 1),)}], True)


@pytest.mark.parametrize(("num_loads", "is_known"), [(0, True), (4096, True), (5, False)])
def test_loads_of_other_virtual_shards_are_refused(num_loads: int, is_known: bool) -> None:
    report = {"address": "h:1", "incarnation": "0" * 16, "loads": [1] * num_loads}
    with contextlib.nullcontext() if is_known else pytest.raises(CorruptionError, match="loads has 5"):
        ResizeReport.decode(json.dumps(report).encode())


def waiting(broker: Broker) -> ElasticServer:
    server: Any = SimpleNamespace(was_sent_rows=False)
    session: Any = broker
    elastic = ElasticServer(session, server, ServerOptions(port=0, sources=2), 1, GlobalConfig())
    elastic._advertiser = broker  # type: ignore[assignment]
    return elastic


def test_more_servers_that_wait_for_rows_do_not_ask_each_server_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {}
    for replicas in (10, 100):
        broker = Broker(replicas=replicas)
        monkeypatch.setattr(
            threading.Event, "wait", lambda _event, seconds, broker=broker: broker.pause(seconds)
        )
        monkeypatch.setattr(time, "sleep", broker.pause)
        with pytest.raises(TimeoutError):
            waiting(broker).wait()
        asked[replicas] = replicas * broker.num_looks
    assert asked[100] <= asked[10]


MANY_SERVERS = [(3010, 300.0), (310, 30.0), (1, 1.0)]


def lasting(monkeypatch: pytest.MonkeyPatch, deadline_s: float) -> list[float]:
    """The clock of a server that waits, in one item: a look takes 2 s, and pauses take their time."""
    now = [0.0]

    def pause(_event: threading.Event, seconds: float) -> bool:
        now[0] += seconds
        return False

    monkeypatch.setenv("PERSIA_DEADLINE_SEC", str(deadline_s))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threading.Event, "wait", pause)
    monkeypatch.setattr(elastic, "wait_for_stop", lambda: None)
    return now


@pytest.mark.parametrize(("replicas", "deadline_s"), MANY_SERVERS)
def test_rows_are_not_lost_by_one_look_that_finds_no_older_server(
    monkeypatch: pytest.MonkeyPatch, replicas: int, deadline_s: float
) -> None:
    broker, now, looks = Broker(replicas=replicas), lasting(monkeypatch, deadline_s), []

    def others(_window_s: float) -> list[ServiceInfo]:
        now[0] += 2.0
        looks.append(now[0])
        if len(looks) > 6:
            raise TimeoutError
        return [] if len(looks) == 3 else [info_of(3, generation=0)]

    monkeypatch.setattr(broker, "others", others)
    with pytest.raises(TimeoutError):
        waiting(broker).wait()  # a return: it begins without rows


@pytest.mark.parametrize(("replicas", "deadline_s"), MANY_SERVERS)
def test_rows_are_lost_once_no_older_server_has_answered_for_the_deadline(
    monkeypatch: pytest.MonkeyPatch, replicas: int, deadline_s: float
) -> None:
    broker, now, looks = Broker(replicas=replicas), lasting(monkeypatch, deadline_s), []

    def others(_window_s: float) -> list[ServiceInfo]:
        now[0] += 2.0
        looks.append(now[0])
        return []

    monkeypatch.setattr(broker, "others", others)
    waiting(broker).wait()
    assert deadline_s < now[0] < 1.2 * deadline_s + 10.0
    assert len(looks) >= 3


def test_a_server_that_waits_for_rows_looks_again_when_another_one_begins_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker(replicas=1000)

    def pause(event: threading.Event, seconds: float) -> bool:
        broker.serving = [broker.info]
        broker.on_event(b"")
        return event.is_set() or broker.pause(seconds)

    monkeypatch.setattr(threading.Event, "wait", pause)
    waiting(broker).wait()  # returns: its rows are lost
    assert broker.num_pauses == 0
