"""Services and callers find each other in any start order, and disagreements are refused."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace

import pytest

from persia.errors import DeadlineExceededError, FailedPreconditionError
from persia.messaging.discovery import Advertiser, Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.session import NatsSession
from persia.messaging.subjects import DATA_LOADER
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER as SERVER
from persia.observability.status import find_processes
from persia.testing import LocalNats

DEADLINE_S = 60.0


def info(index: int, replicas: int, incarnation: int = 1, **more) -> ServiceInfo:
    return ServiceInfo(role=SERVER, index=index, replicas=replicas, incarnation=incarnation, pid=1, **more)


class Events:
    """Collects events and waits for their number."""

    def __init__(self) -> None:
        self.all: list[ServiceEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: ServiceEvent) -> None:
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def wait_for(self, number: int) -> list[ServiceEvent]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all) >= number, DEADLINE_S), self.all
            return self.all


def test_services_that_were_there_first_are_found_by_index(make_session):
    infos = [info(index, 3, incarnation=index + 10, address=f"h:{index}") for index in range(3)]
    for service in reversed(infos):
        Advertiser(make_session(f"server {service.index}"), service).start()
    assert Directory(make_session("caller")).wait_for(SERVER, DEADLINE_S) == infos
    assert Directory(make_session("another")).wait_for(SERVER, DEADLINE_S, expected=3) == infos


def test_a_caller_that_was_there_first_waits(make_session):
    found: list[list[ServiceInfo]] = []
    directory = Directory(make_session("caller"))
    thread = threading.Thread(target=lambda: found.append(directory.wait_for(SERVER, DEADLINE_S)))
    thread.start()
    Advertiser(make_session("server 1"), info(1, 2, 5)).start()
    Advertiser(make_session("server 0"), info(0, 2, 6)).start()
    thread.join(DEADLINE_S)
    assert found == [[info(0, 2, 6), info(1, 2, 5)]]


def test_giving_up_names_what_is_missing(make_session):
    directory = Directory(make_session("caller"))
    with pytest.raises(
        DeadlineExceededError, match=f"no {SERVER} has joined, 2 expected.*persia-launcher {SERVER}"
    ):
        directory.wait_for(SERVER, 0.2, expected=2)
    Advertiser(make_session("server"), info(1, 4)).start()
    with pytest.raises(DeadlineExceededError, match=f"{SERVER} 0, 2, 3 of 4 missing"):
        directory.wait_for(
            SERVER, 3.0
        )  # the one that has joined must answer meanwhile, on a busy machine, too


def test_jobs_that_share_a_broker_do_not_meet(make_session, nats_server):
    Advertiser(make_session("server"), info(0, 1)).start()
    with NatsSession(nats_server.url, "another-job", name="stranger") as stranger:
        stranger.connect(DEADLINE_S)
        assert Directory(stranger).probe(SERVER, 0, DEADLINE_S) is None


@pytest.mark.parametrize(
    ("newcomer", "complaint"),
    [
        (info(0, 2, incarnation=2), "0 is running already"),
        (info(1, 3, incarnation=2), "number of replicas, 3 and 2"),
        (info(1, 2, incarnation=2, schema="bbb"), "embedding configs, bbb and aaa"),
    ],
)
def test_a_newcomer_that_disagrees_is_refused_and_the_job_goes_on(make_session, newcomer, complaint):
    running = info(0, 2, schema="aaa")
    Advertiser(make_session("running"), running).start()
    watched = Events()
    directory = Directory(make_session("caller"))
    directory.watch(SERVER, watched)
    with pytest.raises(FailedPreconditionError, match=complaint):
        Advertiser(make_session("newcomer"), newcomer).start()
    assert directory.probe(SERVER, 0, DEADLINE_S) == running
    assert directory.probe(SERVER, 1, 0.1) is None
    assert not watched.all


def test_of_two_that_start_at_once_at_one_index_at_most_one_is_accepted(make_session, monkeypatch):
    # On a busy machine, one may answer later than the other waits as a rule.
    monkeypatch.setattr("persia.messaging.discovery._CONFLICT_WINDOWS_S", (2.4,))
    sessions = [make_session("a"), make_session("b")]
    failures: list[Exception] = []
    both = threading.Barrier(2)

    def start(session, service):
        both.wait(DEADLINE_S)
        try:
            Advertiser(session, service).start()
        except FailedPreconditionError as error:
            failures.append(error)

    threads = [
        threading.Thread(target=start, args=(session, info(0, 1, incarnation)))
        for incarnation, session in enumerate(sessions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert failures


@pytest.mark.parametrize("is_known", [False, True])
def test_a_process_that_answers_late_is_in_the_status(make_session, is_known):
    # That replica 1 is missing, replica 0 tells; of the only one the status has told before.
    others = [] if is_known else [info(0, 2)]
    for other in others:
        Advertiser(make_session("server 0"), other).start()
    late, asked = make_session("late"), []
    service = info(0, 1) if is_known else info(1, 2)

    async def answer(_payload):
        asked.append(True)
        return service.encode() if len(asked) > 1 else None

    late.respond(late.subjects.who(SERVER), answer)
    known = [(SERVER, 0)] if is_known else []
    assert find_processes(make_session("status"), known) == [*others, service]


def test_a_caller_that_expects_something_else_is_told_both_values(make_session):
    Advertiser(make_session("server"), info(0, 1, schema="aaa")).start()
    directory = Directory(make_session("caller"))
    with pytest.raises(FailedPreconditionError, match="1 replicas, 2 are expected"):
        directory.wait_for(SERVER, DEADLINE_S, expected=2)
    with pytest.raises(FailedPreconditionError, match="embedding config aaa, this process bbb"):
        directory.wait_for(SERVER, DEADLINE_S, schema="bbb")
    assert directory.wait_for(SERVER, DEADLINE_S, schema="aaa")


def test_watch_reports_starts_stops_and_restarts(make_session):
    events = Events()
    Directory(make_session("caller")).watch(SERVER, events)
    first = Advertiser(make_session("first"), info(0, 1, incarnation=1))
    first.start()
    first.stop()
    first.stop()
    second = info(0, 1, incarnation=2)
    Advertiser(make_session("second"), second).start()
    assert events.wait_for(3) == [
        ServiceEvent(EventKind.JOINED, first.info),
        ServiceEvent(EventKind.LEFT, first.info),
        ServiceEvent(EventKind.JOINED, second),
    ]


def test_a_watcher_is_told_each_time_that_a_service_connects_again(make_session):
    advertiser = Advertiser(make_session("server"), info(0, 1))
    advertiser.start()
    events, joined = Events(), queue.SimpleQueue()
    Directory(make_session("watcher")).watch(SERVER, events, on_joined=joined.put)
    for _ in range(2):  # the first is news to this watcher
        advertiser.publish_again()  # as after each connection
        assert joined.get(timeout=DEADLINE_S) == info(0, 1)
    assert len(events.all) == 1


def test_a_slow_watcher_sees_starts_and_stops_in_their_order(make_session):
    # The first event is handled when all have come: hellos and byes that took different ways would now race.
    events, all_published = Events(), threading.Event()

    def handle(event: ServiceEvent) -> None:
        assert all_published.wait(DEADLINE_S)
        events(event)

    Directory(make_session("caller")).watch(SERVER, handle)
    session, number = make_session("server"), 5
    for index in range(number):
        advertiser = Advertiser(session, info(index, number))
        advertiser.start()
        advertiser.stop()
    all_published.set()
    assert events.wait_for(2 * number) == [
        ServiceEvent(kind, info(index, number)) for index in range(number) for kind in EventKind
    ]


def test_a_closed_watch_is_silent(make_session):
    events, others = Events(), Events()
    directory = Directory(make_session("caller"))
    directory.watch(SERVER, events).close()
    directory.watch(SERVER, others)
    Advertiser(make_session("server"), info(0, 1)).start()
    others.wait_for(1)
    assert not events.all


def test_malformed_answers_are_ignored(make_session):
    async def lie(_payload):
        return b'{"role": "embedding-parameter-server"}'

    liar = make_session("liar")
    liar.respond(liar.subjects.who(SERVER), lie)
    Advertiser(make_session("server"), info(0, 1)).start()
    caller = make_session("caller")
    assert Directory(caller).wait_for(SERVER, DEADLINE_S) == [info(0, 1)]


def test_a_restart_while_the_broker_is_away_is_noticed(job_name):
    with (
        LocalNats() as broker,
        NatsSession(broker.url, job_name, name="caller") as caller,
        NatsSession(broker.url, job_name, name="server") as server,
    ):
        caller.connect(DEADLINE_S)
        server.connect(DEADLINE_S)
        events = Events()
        Directory(caller).watch(SERVER, events)
        old = Advertiser(server, info(0, 1, incarnation=1))
        old.start()
        events.wait_for(1)
        broker.kill()
        server.close()
        broker.restart()
        with NatsSession(broker.url, job_name, name="successor") as successor:
            successor.connect(DEADLINE_S)
            Advertiser(successor, info(0, 1, incarnation=2)).start()
            seen = [event.info.incarnation for event in events.wait_for(2)]
        assert seen[:2] == [1, 2]


def test_what_a_service_says_of_another_role_is_ignored(make_session, log):
    session = make_session("forger")
    forged = info(0, 1, address="127.0.0.1:9")

    async def answer(_payload):
        return forged.encode()

    session.respond(session.subjects.who(DATA_LOADER), answer)
    directory, events = Directory(make_session("caller")), Events()
    deadline = time.monotonic() + DEADLINE_S
    while "which answered for data-loader" not in log.text:  # a busy machine may be late with the answer
        assert time.monotonic() < deadline
        assert directory.probe(DATA_LOADER, 0, 0.3) is None
    directory.watch(DATA_LOADER, events)
    session.publish(session.subjects.advertise(DATA_LOADER), ServiceEvent(EventKind.JOINED, forged).encode())
    Advertiser(session, replace(forged, role=DATA_LOADER)).start()
    assert [event.info.role for event in events.wait_for(1)] == [DATA_LOADER]


def test_a_server_that_was_replaced_is_not_believed_when_it_returns(make_session):
    replaced, successor = info(0, 1, 1, term=5), info(0, 1, 2, term=6)
    old = Advertiser(make_session("replaced"), replaced)
    old.start()
    watched = Events()
    directory = Directory(make_session("caller"))
    directory.watch(SERVER, watched)
    with pytest.raises(FailedPreconditionError, match="is running already"):
        Advertiser(make_session("a stranger"), successor).start()
    Advertiser(make_session("successor"), successor, replaces=1).start()
    assert [event.info for event in watched.wait_for(1)] == [successor]
    old.publish_again()
    Advertiser(make_session("later"), info(0, 1, 3, term=7), replaces=2)._publish(EventKind.JOINED)
    assert [event.info.term for event in watched.wait_for(2)] == [6, 7]
    # Both answer now.
    assert directory.wait_for(SERVER, DEADLINE_S)[0].term in (5, 6)
