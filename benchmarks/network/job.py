"""A job whose roles run on hosts of their own, and the steps that its rank takes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from benchmarks.chaos.job import ENVIRONMENT, Outcome, trained_by
from benchmarks.job_scripts import SCRIPTS, SLOTS
from benchmarks.network.hosts import Network
from persia.launcher.process_specs import ProcessSpecs, job_environment
from persia.launcher.supervisor import ManagedProcess, ProcessSpec, Supervisor
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER
from persia.waiting import Attempts

__all__ = ["Job", "Shape", "started"]

_NATS_PORT = 4222
_LEAST_PAUSE_S = 1.0
_STEP = re.compile(r"^step (\d+)$")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What runs. Hosts are named "nats", "loader", "rank0", "worker0", "server0", "standby0", and so on."""

    batches: int
    ranks: int = 1
    workers: int = 1
    servers: int = 1
    standby_deadline_s: int = 0  # 0: servers have no standbys
    pace_s: float = 0.05  # before each batch
    every_steps: int = 1_000_000  # one checkpoint, of step 0: the job must not go back to one
    deadline_s: int | None = None  # PERSIA_DEADLINE_SEC of the ranks, instead of that of the others

    @property
    def hosts(self) -> list[str]:
        several = {"rank": self.ranks, "worker": self.workers, "server": self.servers}
        if self.standby_deadline_s:
            several["standby"] = self.servers
        numbered = [f"{name}{index}" for name, count in several.items() for index in range(count)]
        return ["nats", "loader", *numbered]

    @property
    def global_config(self) -> dict[str, object]:
        section = {"standbys": 1, "standby_deadline_sec": self.standby_deadline_s}
        return {"embedding_parameter_server_config": section if self.standby_deadline_s else {}}


@dataclass
class Job:
    """A running job. `steps` are the times of rank 0's steps, by time.monotonic()."""

    folder: Path
    network: Network
    supervisor: Supervisor
    ranks: Sequence[str]
    processes: dict[str, ManagedProcess] = field(default_factory=dict)  # by host
    steps: list[float] = field(default_factory=list)

    def await_step(self, step: int, timeout_s: float = 240) -> None:
        if not self._comes(lambda: len(self.steps) >= step, timeout_s):
            raise AssertionError(f"step {step} has not come:\n{self.processes[self.ranks[0]].output}")

    def await_log(self, host: str, text: str, timeout_s: float = 240) -> None:
        process = self.processes[host]
        if not self._comes(lambda: text in process.output, timeout_s):
            raise AssertionError(f"{host} has not written {text!r}:\n{process.output}")

    def _comes(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `condition` becomes true before the rank ends."""
        for _ in Attempts(timeout_s):
            has_ended = self.processes[self.ranks[0]].exit_code is not None
            if condition():
                return True
            if has_ended:
                break
        return False

    def paused_s(self, since: float) -> float:
        """The sum of all pauses of more than a second between two steps, after `since`."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        pauses = (end - max(begin, since) for begin, end in pairs if end > since)
        return sum(pause for pause in pauses if pause > _LEAST_PAUSE_S)

    def finish(self, timeout_s: float = 240) -> Outcome:
        """Waits until the ranks have ended. Exit code and output are those of the first that has failed."""
        ranks = [self.processes[name] for name in self.ranks]
        codes = [rank.wait(timeout_s) for rank in ranks]
        failed = next((number for number, code in enumerate(codes) if code), 0)
        code = codes[failed]
        outcome = Outcome(self.folder, -1 if code is None else code, ranks[failed].output)
        for number in range(len(ranks)):
            trained, wasted = trained_by(self.folder / f"rank{number}.log")
            outcome.trained += trained
            outcome.wasted += wasted
        return outcome

    def await_failure_of_ranks(self, timeout_s: float = 240) -> None:
        for rank in map(self.processes.__getitem__, self.ranks):
            if not rank.wait(timeout_s):
                raise AssertionError(f"{rank.name} has not failed:\n{rank.output}")

    def start_again(self) -> None:
        """Kills all processes but NATS and starts them again, as `persia-launcher local` does."""
        specs = [process.spec for host, process in self.processes.items() if host != "nats"]
        self.supervisor.kill([spec.name for spec in specs])
        self.processes |= {spec.name: self.supervisor.start(spec) for spec in specs}


@contextlib.contextmanager
def started(folder: Path, shape: Shape) -> Iterator[Job]:
    """The job, whose processes and hosts end with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slots.yml").write_text(yaml.safe_dump(SLOTS))
    (folder / "global.yml").write_text(yaml.safe_dump(shape.global_config))
    with Network(shape.hosts) as network:
        steps: list[float] = []

        def sink(name: str, line: str) -> None:
            if name == "rank0" and _STEP.match(line):
                steps.append(time.monotonic())

        with Supervisor(sink) as supervisor:
            ranks = [f"rank{number}" for number in range(shape.ranks)]
            job = Job(folder, network, supervisor, ranks, steps=steps)
            for host, spec in _specs(folder, shape, network):
                job.processes[host] = supervisor.start(_on_host(network, host, spec))
            try:
                yield job
            finally:
                network.mend()  # processes that are cut off would wait when they are told to end


def _specs(folder: Path, shape: Shape, network: Network) -> Iterator[tuple[str, ProcessSpec]]:
    paths = {"embedding_config": str(folder / "slots.yml"), "global_config": str(folder / "global.yml")}
    variables = {f"PERSIA_{name.upper()}": path for name, path in paths.items()}
    env = job_environment(
        nats_url=f"nats://{network.address('nats')}:{_NATS_PORT}",
        job_name=f"network-{os.getpid()}",
        extra={**ENVIRONMENT, **variables},
    )
    specs = ProcessSpecs(env=env, **paths)
    nats = (*specs.launcher, "nats-server", "--host=0.0.0.0", f"--port={_NATS_PORT}")
    yield "nats", ProcessSpec(name="nats", command=nats, env=env, stop_stage=2)
    for index in range(shape.servers):
        yield f"server{index}", specs.server(EMBEDDING_PARAMETER_SERVER, index, shape.servers)
        if shape.standby_deadline_s:
            standby = specs.server(EMBEDDING_PARAMETER_SERVER, index, shape.servers, standby=True)
            yield f"standby{index}", standby
    for index in range(shape.workers):
        yield f"worker{index}", specs.server(EMBEDDING_WORKER, index, shape.workers)
    arguments = ("--total", str(shape.batches), "--resume")
    yield "loader", specs.data_loader(str(SCRIPTS / "loader.py"), arguments, 0, 1, {})
    training = (str(folder), str(shape.every_steps), str(shape.pace_s), str(shape.batches))
    own = {"WORLD_SIZE": str(shape.ranks), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "eth0"}
    if shape.deadline_s is not None:
        own["PERSIA_DEADLINE_SEC"] = str(shape.deadline_s)
    command = (sys.executable, str(SCRIPTS / "recovered.py"), *training)
    for number in range(shape.ranks):
        name = f"rank{number}"
        yield name, ProcessSpec(name=name, command=command, env={**env, **own, "RANK": str(number)})


def _on_host(network: Network, host: str, spec: ProcessSpec) -> ProcessSpec:
    env = {**spec.env, "PERSIA_BIND_HOST": network.address(host)}
    return replace(spec, name=host, command=network.command_on(host, spec.command), env=env)
