"""Processes in places of a Ray cluster: what becomes of them when places are late, lost, or cannot be made.

Places run here, as objects of this process; Ray itself is not started.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from persia.errors import FailedPreconditionError, UnavailableError
from persia.launcher.ray_submit import RayJob, _Processes
from persia.launcher.supervisor import ProcessSpec

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'persia[ray]'")
from ray.exceptions import ActorDiedError, RayTaskError  # noqa: E402

from persia.launcher import ray_places  # noqa: E402

DEADLINE_S = 120.0


class Call:
    """A method of a fake actor; what it returns or raises is the result."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def options(self, **_options: object) -> Call:
        return self

    def remote(self, *arguments: object) -> SimpleNamespace:
        made = self._function(*arguments)
        if isinstance(made, Future):
            return SimpleNamespace(future=lambda: made)
        future: Future[Any] = Future()
        if isinstance(made, BaseException):
            future.set_exception(made)
        else:
            future.set_result(made)
        return SimpleNamespace(future=lambda: future)


class FakeActor:
    """Each start gets the next of `starts`, each poll the next of `polls`."""

    def __init__(self, starts: list[Any] = [None], polls: list[Any] = [([], 0)]) -> None:  # noqa: B006
        starts_left, polls_left = iter(starts), iter(polls)
        self.signals: list[tuple[int, int]] = []
        self.start = Call(lambda *_: next(starts_left))
        self.poll = Call(lambda *_: next(polls_left))
        self.send_signal = Call(lambda *given: self.signals.append(given))
        self.free_address = self.start


@pytest.fixture
def placed(monkeypatch):
    monkeypatch.setattr(ray_places.ray, "get", lambda reference: reference.future().result(DEADLINE_S))
    return lambda sink=lambda *_: None, **actors: ray_places.PlacedProcesses(sink, actors)


def spec(name: str = "p", command: tuple[str, ...] = ("true",)) -> ProcessSpec:
    return ProcessSpec(name=name, command=command, env=dict(os.environ))


def test_a_process_that_waits_for_a_place_is_killed_and_started_again(placed):
    actor = FakeActor(starts=[Future(), None], polls=[([], 5)])
    group = placed(p=actor)
    waiting = group.start(spec())
    group.kill(["p"])
    assert waiting.wait(DEADLINE_S) == -signal.SIGKILL
    assert actor.signals == [(1, signal.SIGKILL)]  # should its place come yet
    assert not group.has_lost_place(waiting)
    assert group.start(spec()).wait(DEADLINE_S) == 5


def test_a_process_that_waits_for_a_place_is_terminated(placed):
    group = placed(p=FakeActor(starts=[Future()]))
    waiting = group.start(spec())
    group.stop()
    assert waiting.exit_code == -signal.SIGTERM


@pytest.mark.parametrize("lost", [ConnectionError("Client is shutting down"), Exception("not connected")])
@pytest.mark.parametrize("call", ["start", "poll"])
def test_a_lost_cluster_ends_every_process(placed, monkeypatch, call, lost):
    def fail(*_arguments: object) -> None:
        raise lost

    actor = FakeActor(starts=[None, None])
    for name in (call, "send_signal", "free_address"):
        monkeypatch.setattr(actor, name, Call(fail))
    group = placed(p=actor, q=actor)
    processes = [group.start(spec("p")), group.start(spec("q"))]
    group.kill(["p", "q"])
    for process in processes:
        assert process.wait(DEADLINE_S) == 1
        assert str(lost) in process.output
    assert {group.next_ended(DEADLINE_S), group.next_ended(DEADLINE_S)} == set(processes)
    with pytest.raises(UnavailableError, match=f"the Ray cluster is lost: {lost}"):
        group.free_address("p")


def test_a_line_that_cannot_be_printed_ends_the_process(placed):
    def sink(_name: str, line: str) -> None:
        line.encode("ascii")

    actor = FakeActor(polls=[(["ä"], None)])
    process = placed(sink, p=actor).start(spec())
    assert process.wait(DEADLINE_S) == 1
    assert "'ascii' codec can't encode" in process.output
    assert actor.signals == [(1, signal.SIGKILL)]  # it still runs


def no_persia() -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = "in its creation task\nTraceback\nModuleNotFoundError: No module named 'persia'"
    return error


def test_a_node_without_persia_is_told(placed):
    process = placed(p=FakeActor(starts=[no_persia()])).start(spec())
    assert process.wait(DEADLINE_S) == 1
    assert not process.is_place_lost
    expected = (
        "Ray could not start a place for p: ModuleNotFoundError: No module named 'persia'; "
        "the nodes need the same persia"
    )
    assert expected in process.output
    with pytest.raises(FailedPreconditionError) as raised:
        placed(p=FakeActor(starts=[no_persia()])).free_address("p")
    assert str(raised.value) == expected


def test_a_start_that_fails_says_why(placed):
    error = RayTaskError("start", "a traceback", LookupError("node 1 has no folder /x"))
    process = placed(p=FakeActor(starts=[error])).start(spec())
    assert process.wait(DEADLINE_S) == 1
    assert "node 1 has no folder /x" in process.output
    assert "same persia" not in process.output


@pytest.mark.parametrize("polled", [None, ActorDiedError()])
def test_a_place_without_the_process_is_a_lost_one(placed, polled):
    group = placed(p=FakeActor(polls=[polled]))
    process = group.start(spec())
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert group.has_lost_place(process)


@pytest.fixture
def place(monkeypatch):
    context = SimpleNamespace(runtime_env={"working_dir": "x"}, gcs_address="")
    monkeypatch.setattr(ray_places.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_places, "_POLL_S", 0.01)
    monkeypatch.setattr(ray_places, "_WAITING_LINES", 2)
    place = ray_places.Place()
    yield place
    if place._run is not None:
        place._run.end()


def poll_to_the_end(place: ray_places.Place, run: int) -> tuple[list[str], int]:
    found = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        lines, exit_code = place.poll(run)
        found += lines
        if exit_code is not None:
            return found, exit_code
    pytest.fail(str(found))


def test_a_run_that_nothing_reads_ends_when_another_begins(place):
    num_threads = threading.active_count()
    place.start(1, spec(command=("-c", "while True: print('old', flush=True)")), 0, "")
    old = place._run
    deadline = time.monotonic() + DEADLINE_S
    while not old._lines.full():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    place.start(2, spec(command=("-c", "print('new')")), 1, "")
    assert poll_to_the_end(place, 2) == (["new"], 0)
    assert old.process.exit_code == -signal.SIGKILL
    while threading.active_count() > num_threads:  # nothing waits for a reader
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_place_knows_which_run_it_has(place):
    assert place.poll(1) is None
    place.start(2, spec(command=("-c", "print('new')")), 0, "")
    assert place.poll(1) is None
    place.start(1, spec(command=("-c", "print('late')")), 0, "")
    assert poll_to_the_end(place, 2) == (["new"], 0)
    place.send_signal(4, signal.SIGKILL)
    place.start(3, spec(command=("-c", "print('late')")), 0, "")
    place.start(4, spec(command=("-c", "print('late')")), 0, "")
    assert place.poll(4) is None


class FakePlaced:
    """Its broker ends while the address of a rank is awaited."""

    def __init__(self) -> None:
        self.awaited: list[str] = []

    def free_address(self, name: str) -> tuple[str, int]:
        self.awaited.append(name)
        return f"host-of-{name}", 1

    def is_running(self, _name: str) -> bool:
        return not self.awaited


def job(**given: Any) -> RayJob:
    fields = dict.fromkeys(RayJob.__dataclass_fields__)
    numbers = dict.fromkeys(("parameter_servers", "embedding_workers", "data_loaders", "nproc_per_node"), 1)
    texts = {"nn_worker": "train.py", "embedding_config": "slots.yml", "job_name": "job"}
    none = {"script_args": (), "loader_args": (), "resources": {}, "variables": {}}
    return RayJob(**{**fields, **numbers, **texts, **none, "nodes": 1, **given})  # type: ignore[arg-type]


def test_a_broker_that_ends_meanwhile_is_started_again():
    started = [spec.name for spec in _Processes(job(), FakePlaced()).specs()]  # type: ignore[arg-type]
    assert started[:2] == ["nats", "embedding-parameter-server-0"]


def test_addresses_of_this_host_stay_here(monkeypatch):
    monkeypatch.setenv("PERSIA_BIND_HOST", "127.0.0.1")
    monkeypatch.setenv("PERSIA_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("PERSIA_ANYTHING", "debug")
    for spec in _Processes(job(), FakePlaced()).specs():  # type: ignore[arg-type]
        assert not {"PERSIA_BIND_HOST", "PERSIA_SOCKET_IFNAME"} & set(spec.env)
        assert spec.env["PERSIA_ANYTHING"] == "debug"
    given = job(variables={"PERSIA_BIND_HOST": "0.0.0.0"})
    for spec in _Processes(given, FakePlaced()).specs():  # type: ignore[arg-type]
        assert spec.env["PERSIA_BIND_HOST"] == "0.0.0.0"
