"""What a change of the number of servers leaves behind when messages are lost, and processes die."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PersiaError,
    UnavailableError,
)
from persia.launcher import hand_over, resize
from persia.launcher.process_specs import ProcessSpecs
from persia.launcher.resizing import ResizeQuestion, Resizer, ResizeService, ResizeState
from persia.launcher.supervisor import ProcessSpec
from persia.messaging.interface import Registration
from persia.messaging.subjects import Subjects
from persia.roles.elastic import ResizeReport, ResizeRequest, Step
from persia.storage.manifest import NUM_VIRTUAL_SHARDS

SERVER = "embedding-parameter-server"


class Process:
    """Ends at any signal."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec, self.name, self.output = spec, spec.name, ""
        self.exit_code: int | None = None

    def send_signal(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            self.exit_code = -number

    def wait(self, _timeout_s: float) -> int | None:
        return self.exit_code


class Job:
    """Two servers, and what a resizer needs of a supervisor and of a session."""

    def __init__(self) -> None:
        self.subjects = Subjects("job")
        self.loads: list[dict[int, int]] = [{}, {}, {}]  # by server: what each measurement adds to its counts
        self.counts = np.zeros((3, NUM_VIRTUAL_SHARDS), dtype=int)
        self.incarnations = [0] * 3
        self.asked: list[tuple[Step, str]] = []  # with the generation and index of the server
        self.hooks: dict[Step, Callable[[str], object]] = {}  # called with these first
        self.interrupted, self.listens = threading.Event(), threading.Event()
        self.answer: Callable[[bytes], bytes] | None = None
        self.all: dict[str, Process] = {}
        specs = ProcessSpecs(env={}, embedding_config="slots.yml")
        self.resizer = Resizer(self, self, specs, 2)  # type: ignore[arg-type]
        for spec in self.resizer.specs():
            self.start(spec)
        self.old = self.processes

    @property
    def processes(self) -> list[Process]:
        return list(self.all.values())

    @property
    def new(self) -> list[Process]:
        return [process for process in self.processes if process not in self.old]

    def start(self, spec: ProcessSpec) -> Process:
        self.all[spec.name] = Process(spec)
        return self.all[spec.name]

    def kill(self, names: list[str]) -> None:
        for name in names:
            self.all[name].send_signal(signal.SIGKILL)

    def request(self, subject: str, payload: bytes, _timeout_s: float) -> bytes:
        step, server = ResizeRequest.decode(payload).step, subject.partition(".resize.")[2]
        self.asked.append((step, server))
        if hook := self.hooks.get(step):
            hook(server)
        index = int(server.partition(".")[2])
        loads = self.count(index) if step is Step.MEASURE else ()
        incarnation = f"{self.incarnations[index]:016x}"
        report = ResizeReport(
            address="host:1", incarnation=incarnation, state="following", round_s=0.001, loads=loads
        )
        return report.encode()

    def count(self, index: int) -> tuple[int, ...]:
        for shard, load in self.loads[index].items():
            self.counts[index, shard] += load
        return tuple(self.counts[index].tolist())

    def interrupt(self, _subject: str) -> None:
        self.interrupted.set()

    def respond(self, _subject: str, answer: Any, *, max_concurrency: int) -> Registration:
        self.answer = answer
        self.listens.set()
        return Registration(lambda: None)

    def asked_for(self, step: Step) -> list[str]:
        return sorted(server for asked, server in self.asked if asked is step)

    def resize_fails(self, error: type[BaseException], match: str = "lost") -> ResizeState:
        with pytest.raises(error, match=match):
            self.resizer.resize(3)
        state = self.resizer.state
        assert state.is_over
        assert match in state.failure
        return state


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(hand_over, "_MEASURE_S", 0.02)
    monkeypatch.setattr(hand_over, "_MEASURE_PAUSE_S", 0.001)
    return Job()


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attempts that fail; the first one is always made."""
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "0.2")


def lose(times: float) -> Callable[[str], None]:
    """Loses messages to each server."""
    left: dict[str, float] = {}

    def hook(server: str) -> None:
        left[server] = left.get(server, times) - 1
        if left[server] >= 0:
            raise UnavailableError("lost")

    return hook


def is_running(processes: list[Process]) -> list[bool]:
    return [process.exit_code is None for process in processes]


def test_new_servers_are_told_to_serve_until_each_has_answered(job: Job) -> None:
    job.hooks[Step.SERVE] = lose(2)
    state = job.resizer.resize(3)
    assert (state.before, state.after, state.is_over, state.failure) == (2, 3, True, "")
    assert set(job.asked_for(Step.SERVE)) == {"1.0", "1.1", "1.2"}
    assert is_running(job.new) == [True] * 3
    assert is_running(job.old) == [False] * 2


def test_new_servers_that_do_not_answer_are_ended_and_the_job_restarts(job: Job, deadline: None) -> None:
    job.hooks[Step.SERVE] = lose(float("inf"))
    state = job.resize_fails(DeadlineExceededError, "do not answer")
    assert "returns to its checkpoint" in state.outcome
    assert is_running(job.processes) == [False] * 5
    # That is how the job notices. It is started again with as many.
    assert [job.resizer.is_expendable(process.name) for process in job.new] == [False] * 3
    assert len(job.resizer.specs()) == 3


def test_a_new_server_that_ends_before_the_commit_gives_the_change_up(job: Job) -> None:
    def die(_server: str) -> None:
        job.new[1].send_signal(signal.SIGKILL)

    job.hooks[Step.HAND_OVER] = die
    state = job.resize_fails(UnavailableError, f"{SERVER}-1-of-3 was ended by SIGKILL")
    assert state.outcome == "still 2 parameter servers"
    assert job.asked_for(Step.SERVE) == []
    assert job.asked_for(Step.GIVE_UP) == ["0.0", "0.1"]
    assert is_running(job.processes) == [True] * 2 + [False] * 3


def test_old_servers_are_told_to_give_up_until_each_has_answered(job: Job) -> None:
    job.hooks[Step.HAND_OVER] = lose(1)
    job.hooks[Step.GIVE_UP] = lose(2)
    job.resize_fails(UnavailableError, "lost")
    assert job.asked_for(Step.GIVE_UP) == ["0.0"] * 3 + ["0.1"] * 3
    assert is_running(job.old) == [True] * 2
    assert job.resizer.resize(3).failure == ""


def test_an_old_server_that_cannot_be_told_to_give_up_is_ended(job: Job, deadline: None) -> None:
    def lose_one(server: str) -> None:
        if server == "0.1":
            raise UnavailableError("lost")

    job.hooks[Step.COPY] = lose(1)
    job.hooks[Step.GIVE_UP] = lose_one
    job.resize_fails(UnavailableError, "lost")
    assert is_running(job.old) == [True, False]


def test_errors_of_the_system_end_what_was_started(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    start = job.start

    def fail(spec: ProcessSpec) -> Process:
        if spec.name == f"{SERVER}-1-of-3":
            raise OSError("no more processes")
        return start(spec)

    monkeypatch.setattr(job, "start", fail)
    job.resize_fails(OSError, "no more processes")
    assert is_running(job.processes) == [True, True, False]


def test_a_second_change_is_refused_during_the_first(job: Job) -> None:
    job.resizer.begin(3)
    state = job.resizer.state
    with pytest.raises(FailedPreconditionError, match="is being changed already"):
        job.resizer.begin(4)
    assert job.resizer.state is state
    assert job.resizer.finish().after == 3
    with pytest.raises(InvalidArgumentError, match="at least one"):
        job.resizer.begin(0)


def test_servers_are_replaced_by_as_many_where_their_load_is_uneven(job: Job) -> None:
    with pytest.raises(FailedPreconditionError, match="no load"):
        job.resizer.resize(0, rebalances=True)
    assert job.new == []
    job.loads[:2] = [{0: 60_000, 2: 40_000}, {1: 10_000}]
    job.counts[1, 3] = 1_000_000  # it has been busy, and is no more
    state = job.resizer.resize(0, rebalances=True)
    assert (state.before, state.after, state.number, state.num_moved_shards) == (2, 2, 2, 1)
    assert is_running(job.old) == [False] * 2
    assert is_running(job.new) == [True] * 2
    # Once more: names of processes and numbers of changes are never used twice.
    state = job.resizer.resize(0, rebalances=True)
    assert (state.number, is_running(job.processes)) == (3, [False] * 4 + [True] * 2)


def test_a_server_that_is_started_again_while_the_load_is_measured_is_no_idle_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "_MEASURE_S", 60.0)
    job.loads[:2] = [{0: 30_000, 2: 30_000}, {1: 30_000, 3: 30_000}]
    job.counts[1] = 5

    def restart(server: str) -> None:
        if server == "0.1" and job.asked_for(Step.MEASURE).count(server) == 2:
            job.incarnations[1], job.counts[1] = 1, 0

    job.hooks[Step.MEASURE] = restart
    with pytest.raises(FailedPreconditionError, match=r"is even \(the busiest has 1.00 of the mean\)"):
        job.resizer.resize(0, rebalances=True)


def test_a_job_that_is_started_again_does_not_wait_for_the_measurement(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "_MEASURE_S", 3600.0)
    measuring = threading.Event()
    job.hooks[Step.MEASURE] = lambda _: measuring.set()
    job.resizer.begin(3)  # answers at once
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(job.resizer.finish)
        assert measuring.wait(60)
        job.resizer.cancel()
        with pytest.raises(UnavailableError, match="is being started again"):
            change.result()
    assert (job.new, is_running(job.old)) == ([], [True] * 2)


def test_no_generation_is_used_twice(job: Job) -> None:
    job.resizer.cancel()
    assert not any("--generation" in argument for spec in job.resizer.specs() for argument in spec.command)
    job.hooks[Step.COPY] = lose(1)
    job.resize_fails(UnavailableError)
    job.resizer.resize(3)
    assert job.asked_for(Step.SERVE) == ["2.0", "2.1", "2.2"]
    # Started again alone, it has no server that would send it rows.
    assert [process.spec.command[-1] for process in job.new] == ["--generation=2"] * 3
    job.resizer.cancel()
    assert [spec.command[-1] for spec in job.resizer.specs()] == ["--generation=3"] * 3
    assert [spec.name for spec in job.resizer.specs()] == [f"{SERVER}-{index}" for index in range(3)]


def test_the_end_of_a_job_waits_for_no_server(job: Job) -> None:
    waits = threading.Event()

    def hang(_server: str) -> None:
        waits.set()
        job.interrupted.wait()
        raise UnavailableError("interrupted")

    job.hooks[Step.HAND_OVER] = job.hooks[Step.GIVE_UP] = hang
    failures: list[PersiaError] = []

    def resize() -> None:
        try:
            job.resizer.resize(3)
        except PersiaError as error:
            failures.append(error)

    thread = threading.Thread(target=resize)
    thread.start()
    waits.wait()
    job.resizer.close()
    thread.join()
    assert len(failures) == 1
    assert job.asked_for(Step.GIVE_UP) == []
    assert is_running(job.processes) == [True] * 2 + [False] * 3
    with pytest.raises(UnavailableError, match="the job is ending"):
        job.resizer.resize(3)


def test_a_service_answers_refusals_at_once_and_writes_to_the_audit_log(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_AUDIT_LOG", str(tmp_path / "audit"))
    connected, told = threading.Event(), threading.Event()
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        told.set()

    def connect(_deadline_s: float) -> None:
        connected.wait()

    monkeypatch.setattr(job, "connect", connect, raising=False)
    service = ResizeService(job.resizer, job, tell)  # type: ignore[arg-type]
    connected.set()  # nothing has waited for it
    job.listens.wait()
    assert job.answer is not None
    with pytest.raises(FailedPreconditionError, match="2 parameter servers already"):
        job.answer(ResizeQuestion(parameter_servers=2).encode())
    told.clear()
    job.answer(ResizeQuestion(parameter_servers=3).encode())
    told.wait()
    assert ResizeState.decode(job.answer(ResizeQuestion().encode())).step == "done"
    service.close()
    assert lines[1] == "parameter servers: 2 were replaced by 3"
    written = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["method"], line["parameter_servers"], line["outcome"]) for line in written] == [
        ("resize", 2, "FailedPreconditionError"),
        ("resize", 3, "ok"),
    ]


def test_a_question_cannot_ask_for_more_servers_than_a_job_can_have() -> None:
    payload = ResizeQuestion(parameter_servers=2).encode().replace(b"2", b"65537")
    with pytest.raises(PersiaError, match="parameter_servers"):
        ResizeQuestion.decode(payload)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (
            ResizeState(before=2, after=3, number=1, step="done", is_over=True),
            "3 parameter servers instead of 2",
        ),
        (
            ResizeState(before=2, after=3, number=1, step="copy", is_over=True, failure="lost"),
            "still 2 parameter servers: lost",
        ),
        # Another command has been quick.
        (ResizeState(before=3, after=4, number=2, step="done", is_over=True), "another change has begun"),
    ],
)
def test_a_command_says_what_became_of_its_own_change(
    monkeypatch: pytest.MonkeyPatch, last: ResizeState, said: str
) -> None:
    states = [ResizeState(before=2, after=3, number=1, step="copy"), last]

    class Session:
        subjects = Subjects("job")

        def request(self, _subject: str, _payload: bytes, _timeout_s: float) -> bytes:
            return states.pop(0).encode()

    @contextlib.contextmanager
    def session(*_: object, **__: object) -> Iterator[Session]:
        yield Session()

    monkeypatch.setattr(resize, "job_session", session)
    result = CliRunner().invoke(resize.command, ["--parameter-servers", "3", "--nats-url", "nats://host"])
    assert said in result.output + str(result.exception), result
    assert (result.exit_code == 0) == (last.failure == "" and last.after == 3)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--rebalance", "--parameter-servers", "2"],
        ["--rebalance", "--parameter-servers", "2", "--generation", "1"],
    ],
)
def test_either_a_number_or_a_rebalance_is_asked_for(arguments: list[str]) -> None:
    result = CliRunner().invoke(resize.command, [*arguments, "--nats-url", "nats://host"])
    assert result.exit_code == 2
    assert "give either --parameter-servers or --rebalance" in result.output
