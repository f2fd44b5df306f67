"""Runs one training of an example as its users run it: scripts of their own, real servers, real data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.consistency.delay import DelayProxy
from benchmarks.consistency.plan import Run
from persia.errors import PersiaError
from persia.launcher.supervisor import ManagedProcess, ProcessSpec, Supervisor
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.testing import LocalCluster

__all__ = ["Sources", "StudyError", "prepare", "run_job"]

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_NUM_SERVERS = 2
_ADULT_RECIPE = "tuned"
_START_S = 60.0
_RUN_S = 1800.0
_SHOWN_CHARACTERS = 3000
# The embedding worker listens on 127.0.0.1 and says that it is here, where the proxy takes its connections.
_FAR_HOST = "127.0.0.2"


class StudyError(RuntimeError):
    """A run did not end well; the message holds the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the data is.

    adult: prepared data of the adult-income example.
    kuairand: the folder with the Parquet files, or None: there is none.
    max_rows: of each file of KuaiRand, the first in time; None takes all.
    """

    adult: Path
    kuairand: Path | None
    max_rows: int | None = None

    def environment(self, output: Path) -> dict[str, str]:
        """What tells the scripts of both examples where to read and write."""
        return {
            "ADULT_DATA": str(self.adult),
            "ADULT_OUTPUT": str(output),
            "KUAIRAND_DIR": str(self.kuairand or ""),
            "KUAIRAND_ROWS": str(self.max_rows or ""),
            "KUAIRAND_OUTPUT": str(output),
        }


@dataclass(frozen=True)
class _Example:
    """Scripts of one data set, in its folder."""

    folder: str
    embedding_config: str
    plain: str
    plain_arguments: Callable[[Run, Sources, Path], list[str]]  # beside the environment
    batch_size: int  # of a step, of all ranks
    has_loader: bool  # else the rank has its batches from its own memory, and no step waits for one

    def path(self, name: str) -> str:
        return str(_EXAMPLES / self.folder / name)


def _reference_arguments(run: Run, sources: Sources, output: Path) -> list[str]:
    summary = str(output / "summary.json")
    choice = ["--recipe", _ADULT_RECIPE, "--seeds", str(run.seed)]
    return ["--data", str(sources.adult), *choice, "--summary", summary]


_SCRIPTS = {
    "adult": _Example(
        "adult_income",
        "config/embedding_config.yml",
        "reference.py",
        _reference_arguments,
        batch_size=256,
        has_loader=False,
    ),
    "kuairand": _Example(
        "kuairand", "embedding_config.yml", "plain.py", lambda *_: [], batch_size=32, has_loader=True
    ),
}


def prepare(adult_source: Path | None, output: Path) -> None:
    """Makes the data of the adult-income example in `output`. Raises StudyError."""
    command = [_SCRIPTS["adult"].path("prepare_data.py"), "--output", str(output)]
    if adult_source is not None:
        command += ["--source", str(adult_source)]
    _call(command, dict(os.environ), "prepare_data.py")


def run_job(run: Run, sources: Sources) -> dict[str, Any]:
    """The summary that the run's script has written: test_auc, samples_per_second, ... Raises StudyError."""
    example = _SCRIPTS[run.dataset]
    with tempfile.TemporaryDirectory(prefix="persia-study-") as folder:
        output = Path(folder)
        settings = {  # all that the scripts read, whatever the caller's environment says
            **sources.environment(output),
            "SEED": str(run.seed),
            "CONSISTENCY": run.mode.consistency or "",
            "EMBEDDING_STALENESS": run.mode.staleness,
            "BATCH_SIZE": str(example.batch_size // run.ranks),
            "ADULT_RECIPE": _ADULT_RECIPE,
            "ADULT_PREPARED_BATCHES": "1",
            "ADULT_EVALUATIONS": "1",  # those on the way would wait for updates
            "ADULT_CHECKPOINT": "",
            "REPRODUCIBLE": "",
            "PERSIA_EMBEDDED": "0",
            "OMP_NUM_THREADS": "1",
            "ENABLE_CUDA": "0",
        }
        if run.mode.consistency is None:
            arguments = example.plain_arguments(run, sources, output)
            _call([example.path(example.plain), *arguments], {**os.environ, **settings}, run.name)
        else:
            _run_cluster(run, example, settings)
        return _summary(output, run)


def _run_cluster(run: Run, example: _Example, settings: Mapping[str, str]) -> None:
    slots = example.path(example.embedding_config)
    try:
        with (
            LocalCluster(
                embedding_config=slots, parameter_servers=_NUM_SERVERS, embedding_workers=0, env=settings
            ) as cluster,
            _distant_worker(cluster, slots, run.delay_ms / 1000) as worker,
        ):
            loaders = [cluster.start_loader(example.path("data_loader.py"))] if example.has_loader else []
            ranks = cluster.start_nn_worker(example.path("train.py"), nproc=run.ranks)
            for process in (ranks, *loaders):
                if cluster.wait(process, _RUN_S) != 0:
                    raise StudyError(_failure(run, (process, worker, *cluster.processes)))
    except PersiaError as error:
        raise StudyError(f"{run.name}: {error}") from error


@contextmanager
def _distant_worker(cluster: LocalCluster, slots: str, round_trip_s: float) -> Iterator[ManagedProcess]:
    """An embedding worker behind a proxy, also for no delay: what the proxy costs is then in every figure."""
    launcher = (sys.executable, "-m", "persia.launcher", EMBEDDING_WORKER)
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor())
        worker = supervisor.start(
            ProcessSpec(
                name=f"{EMBEDDING_WORKER}-0",
                command=(*launcher, "--port=0", f"--embedding-config={slots}"),
                env={**cluster.env, "PERSIA_ADVERTISE_HOST": _FAR_HOST},
            )
        )
        try:
            (info,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, _START_S, 1)
        except PersiaError as error:
            raise StudyError(f"{error}\n{worker.output[-_SHOWN_CHARACTERS:]}") from error
        near = f"127.0.0.1:{info.address.rpartition(':')[2]}"
        stack.enter_context(DelayProxy(info.address, near, round_trip_s / 2))
        yield worker


def _call(command: Sequence[str], environment: Mapping[str, str], name: str) -> None:
    finished = subprocess.run(
        [sys.executable, *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_RUN_S,
        check=False,
    )
    if finished.returncode != 0:
        tail = finished.stdout[-_SHOWN_CHARACTERS:]
        raise StudyError(f"{name}: exit code {finished.returncode}\n{tail}")


def _failure(run: Run, processes: Sequence[ManagedProcess]) -> str:
    ends = [
        f"{process.name}, exit code {process.exit_code}:\n{process.output[-_SHOWN_CHARACTERS:]}"
        for process in dict.fromkeys(processes)
        if process.exit_code not in (None, 0)
    ]
    return f"{run.name}: " + "\n".join(ends)


def _summary(output: Path, run: Run) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(f"{run.name}: its script has ended well without a summary ({error})") from error
    return summary
