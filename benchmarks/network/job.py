"""A job whose roles run on hosts of their own, and the steps that its rank takes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
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
    """What runs. Hosts are named "nats", "rank", "loader", "worker0", "server0" and "standby0", and so on."""

    batches: int
    workers: int = 1
    servers: int = 1
    standby_deadline_s: int = 0  # 0: servers have no standbys
    pace_s: float = 0.05  # before each batch

    @property
    def hosts(self) -> list[str]:
        several = {"worker": self.workers, "server": self.servers}
        if self.standby_deadline_s:
            several["standby"] = self.servers
        numbered = [f"{name}{index}" for name, count in several.items() for index in range(count)]
        return ["nats", "rank", "loader", *numbered]

    @property
    def global_config(self) -> dict[str, object]:
        section = {"standbys": 1, "standby_deadline_sec": self.standby_deadline_s}
        return {"embedding_parameter_server_config": section if self.standby_deadline_s else {}}


@dataclass
class Job:
    """A running job. `steps` are the times of the rank's steps, by time.monotonic()."""

    folder: Path
    network: Network
    processes: dict[str, ManagedProcess] = field(default_factory=dict)  # by host
    steps: list[float] = field(default_factory=list)

    def await_step(self, step: int, timeout_s: float = 240) -> None:
        if not self._comes(lambda: len(self.steps) >= step, timeout_s):
            raise AssertionError(f"step {step} has not come:\n{self.processes['rank'].output}")

    def await_log(self, host: str, text: str, timeout_s: float = 240) -> None:
        process = self.processes[host]
        if not self._comes(lambda: text in process.output, timeout_s):
            raise AssertionError(f"{host} has not written {text!r}:\n{process.output}")

    def _comes(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `condition` becomes true before the rank ends."""
        for _ in Attempts(timeout_s):
            has_ended = self.processes["rank"].exit_code is not None
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
        """Waits until the rank has ended."""
        rank = self.processes["rank"]
        code = rank.wait(timeout_s)
        trained, wasted = trained_by(self.folder / "rank0.log")
        return Outcome(self.folder, -1 if code is None else code, rank.output, trained, wasted)


@contextlib.contextmanager
def started(folder: Path, shape: Shape) -> Iterator[Job]:
    """The job, whose processes and hosts end with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slots.yml").write_text(yaml.safe_dump(SLOTS))
    (folder / "global.yml").write_text(yaml.safe_dump(shape.global_config))
    with Network(shape.hosts) as network:
        job = Job(folder, network)

        def sink(name: str, line: str) -> None:
            if name == "rank" and _STEP.match(line):
                job.steps.append(time.monotonic())

        with Supervisor(sink) as supervisor:
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
    # One checkpoint, of step 0: the job must not go back to one.
    training = (str(folder), "1000000", str(shape.pace_s), str(shape.batches))
    yield "rank", specs.nn_worker(str(SCRIPTS / "recovered.py"), training, 1, {})


def _on_host(network: Network, host: str, spec: ProcessSpec) -> ProcessSpec:
    env = {**spec.env, "PERSIA_BIND_HOST": network.address(host)}
    return replace(spec, name=host, command=network.command_on(host, spec.command), env=env)
