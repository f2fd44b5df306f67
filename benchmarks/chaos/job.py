"""Runs the job under `persia-launcher local`, kills its processes, and reads what it has trained."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.job_scripts import SCRIPTS, SLOTS
from persia.rows.comparison import compare
from persia.rows.reader import RowReader

__all__ = [
    "ROLES",
    "Kill",
    "Outcome",
    "Settings",
    "alone",
    "descendants",
    "differences",
    "run",
    "started",
    "trained_by",
    "undisturbed",
]

ROLES = ("rank", "parameter server", "embedding worker", "data loader", "nats")
# What tells a process of a role among the descendants of the launcher, by its command line.
_PATTERNS = {
    "rank": re.compile(r"^\S+ (-u )?\S*jobs/(recovered|fitted)\.py "),
    "parameter server": re.compile(r" embedding-parameter-server "),
    "embedding worker": re.compile(r" embedding-worker "),
    "data loader": re.compile(r"^\S+ \S*jobs/(fitted_)?loader\.py "),
    "nats": re.compile(r"nats-server -c "),
}
# A process may take a minute to start where others use the processors.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PERSIA_LOADER_SILENCE_SEC": "180", "PERSIA_DEADLINE_SEC": "180"}
_STEP = re.compile(r"^nn-worker +\| step (\d+)$")
_RESTARTS = re.compile(r"^restarts: (\d+) of ", re.MULTILINE)
_BACK_OFF = re.compile(r"; every process is started again in (\S+) s \(")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The size of the job."""

    batches: int
    ranks: int = 1
    servers: int = 2  # parameter servers, and as many embedding workers
    every_steps: int = 20
    pace_s: float = 0.02
    standbys: int = 0  # of each parameter server
    spare_restarts: int = 0  # besides one for each kill: on a busy machine, processes miss deadlines
    deadline_s: float = 600.0
    scripts: tuple[str, str] = ("recovered.py", "loader.py")  # of ranks and of data loaders
    device: int | None = None  # of CUDA, of the ranks; None: the CPU

    @property
    def device_arguments(self) -> list[str]:
        return [] if self.device is None else [str(self.device)]


@dataclass
class Kill:
    """One kill, once the job has come to `step`; `which` chooses among the processes of the role."""

    role: str
    step: int
    which: int = 0
    at: float = 0.0  # by time.monotonic(); 0: not yet
    pause_s: float = 0.0  # the longest time between two steps from this kill to the next
    back_off_s: float = 0.0  # for which the launcher waited meanwhile before it restarted the whole job


@dataclass
class Outcome:
    """What became of a run."""

    folder: Path
    exit_code: int
    output: str
    trained: list[int] = field(default_factory=list)  # numbers of batches, by all ranks
    wasted: int = 0  # steps that were trained and rolled back

    @property
    def restarts(self) -> int:
        """As the launcher has counted them."""
        return sum(map(int, _RESTARTS.findall(self.output)))


def run(folder: Path, settings: Settings, kills: Sequence[Kill] = ()) -> Outcome:
    """Runs the job to its end; `kills`, in the order of their steps, get their times and pauses."""
    lines, left, last_step_at, current = list[str](), list(kills), time.monotonic(), None
    back_off_s = 0.0
    with started(folder, settings, len(kills) + settings.spare_restarts) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if (found := _BACK_OFF.search(line)) is not None:
                back_off_s += float(found[1])
            if (found := _STEP.match(line.rstrip())) is None:
                continue
            now = time.monotonic()
            if current is not None and (pause_s := now - max(last_step_at, current.at)) > current.pause_s:
                current.pause_s, current.back_off_s = pause_s, back_off_s
            last_step_at, back_off_s = now, 0.0
            if left and int(found[1]) >= left[0].step and _kill(process.pid, left[0]):
                current = left.pop(0)
        exit_code = process.wait()
    outcome = Outcome(folder, exit_code, "".join(lines))
    for rank in range(settings.ranks):
        numbers, wasted = trained_by(folder / f"rank{rank}.log")
        outcome.trained += numbers
        outcome.wasted += wasted
    return outcome


def undisturbed(folder: Path, settings: Settings) -> Outcome:
    """The same training in one process without a broker, where nothing is killed."""
    with alone(folder, settings) as process:
        output, _ = process.communicate(timeout=settings.deadline_s)
    trained, wasted = trained_by(folder / "rank0.log")
    return Outcome(folder, process.returncode, output, trained, wasted)


def alone(folder: Path, settings: Settings) -> subprocess.Popen[str]:
    """Starts the training in one process without a broker, or starts it again."""
    script, slots = str(SCRIPTS / settings.scripts[0]), _write_slots(folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PERSIA_", "RANK"))}
    return subprocess.Popen(
        [
            *(sys.executable, script, str(folder), str(settings.every_steps), "0", str(settings.batches)),
            *settings.device_arguments,
        ],
        env={**env, "OMP_NUM_THREADS": "1", "PERSIA_EMBEDDING_CONFIG": str(slots)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _write_slots(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "slots.yml"
    path.write_text(yaml.safe_dump(SLOTS))
    return path


def differences(one: Outcome, other: Outcome) -> list[str]:
    """In what the two results differ: nothing, if they are equal bit for bit."""
    found = []
    if (one.folder / "dense.sha256").read_text() != (other.folder / "dense.sha256").read_text():
        found.append("weights of the dense model")
    for slot, changes in compare(RowReader(one.folder / "final"), RowReader(other.folder / "final")).items():
        if changes.num_added or changes.num_removed or changes.num_moved:
            found.append(f"rows of {slot}: {changes.to_json()}")
    return found


@contextlib.contextmanager
def started(folder: Path, settings: Settings, max_restarts: int) -> Iterator[subprocess.Popen[str]]:
    """The launcher, which is stopped at the deadline."""
    _write_slots(folder)
    servers = {"embedding_parameter_server_config": {"standbys": settings.standbys}}
    (folder / "global.yml").write_text(yaml.safe_dump(servers))
    with subprocess.Popen(
        _command(folder, settings, max_restarts),
        env={**os.environ, **ENVIRONMENT, "PERSIA_JOB_NAME": f"chaos-{os.getpid()}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        timer = threading.Timer(settings.deadline_s, process.terminate)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.terminate()  # if the caller has failed


def _command(folder: Path, settings: Settings, max_restarts: int) -> list[str]:
    return [
        *(sys.executable, "-m", "persia.launcher", "local", "--max-restarts", str(max_restarts)),
        *("--nn-worker", str(SCRIPTS / settings.scripts[0])),
        *("--data-loader", str(SCRIPTS / settings.scripts[1])),
        *("--embedding-config", str(folder / "slots.yml")),
        *("--global-config", str(folder / "global.yml")),
        *("--loader-args", f"--total {settings.batches} --resume"),
        *("--parameter-servers", str(settings.servers), "--embedding-workers", str(settings.servers)),
        *("--data-loaders", "2"),
        *("--nproc-per-node", str(settings.ranks)),
        *("--", str(folder), str(settings.every_steps), str(settings.pace_s), str(settings.batches)),
        *settings.device_arguments,
    ]


def trained_by(path: Path) -> tuple[list[int], int]:
    """The numbers of the batches that a rank has trained, and the steps that were rolled back."""
    trained, wasted = list[tuple[int, int]](), 0
    for line in path.read_text().splitlines() if path.exists() else ():
        step, number = line.split()
        if step == "begin":
            kept = [entry for entry in trained if entry[0] <= int(number)]
            wasted += len(trained) - len(kept)
            trained = kept
        else:
            trained.append((int(step), int(number)))
    return [number for _, number in trained], wasted


def _kill(launcher: int, kill: Kill) -> bool:
    """False: no process of the role runs now, as a loader that has sent everything."""
    found = [pid for pid, command in descendants(launcher) if _PATTERNS[kill.role].search(command)]
    if not found:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(sorted(found)[kill.which % len(found)], signal.SIGKILL)
        kill.at = time.monotonic()
        return True
    return False


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """The processes below `pid` with their command lines."""
    children = ""
    with contextlib.suppress(OSError):  # ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += (task / "children").read_text()
    for child in map(int, children.split()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            yield child, command
        yield from descendants(child)
