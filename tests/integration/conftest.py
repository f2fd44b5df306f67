"""Whole jobs as fixtures: real servers, loaders and NN workers, running the scripts in `jobs/`."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `benchmarks`, which is not installed
JOBS = Path(__file__).parent / "jobs"
EMBEDDING_CONFIG = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 8}, "items": {"dim": 8}}}
TIMEOUT_S = 280.0  # matters only where something hangs


class Job:
    """A running job. `reports` are what the ranks of jobs/train.py have written, once they have ended."""

    def __init__(self, cluster: Any, output: Path, nproc: int) -> None:
        self.cluster = cluster
        self.loaders: list[Any] = []
        self.nn_worker: Any = None
        self._output = output
        self._nproc = nproc

    def start(self, loaders: Sequence[Sequence[str]], arguments: Sequence[str], script: str) -> None:
        for index, options in enumerate(loaders):
            process = self.cluster.start_loader(
                JOBS / "loader.py", *options, replica_index=index, replica_size=len(loaders)
            )
            self.loaders.append(process)
        options = ("--output", str(self._output), *arguments)
        self.nn_worker = self.cluster.start_nn_worker(JOBS / script, *options, nproc=self._nproc)

    def finish_nn_worker(self) -> int:
        """Waits for the ranks; returns the exit code."""
        code: int = self.cluster.wait(self.nn_worker, TIMEOUT_S)
        return code

    def loader_output(self, index: int) -> str:
        text: str = self.loaders[index].output
        return text

    @property
    def reports(self) -> list[dict[str, Any]]:
        names = [f"{self._output.name}.rank{rank}.json" for rank in range(self._nproc)]
        return [json.loads(self._output.with_name(name).read_text()) for name in names]


@contextlib.contextmanager
def jobs(folder: Path) -> Iterator[Callable[..., Job]]:
    """Yields what the fixture `start_job` gives. The jobs end with the block; `folder` has their reports."""
    from persia.testing import LocalCluster

    with contextlib.ExitStack() as stack:
        number = iter(range(1000))

        def start(
            *arguments: str,
            loaders: Sequence[Sequence[str]],
            nproc: int = 1,
            script: str = "train.py",
            **cluster: Any,
        ) -> Job:
            env = {
                "PERSIA_LOADER_SILENCE_SEC": "2",
                # Also how long ranks and loaders wait for each other to start: importing torch takes a
                # minute where others use the processors.
                "PERSIA_DEADLINE_SEC": "120",
                "OMP_NUM_THREADS": "1",
                **cluster.pop("env", {}),
            }
            config = cluster.pop("embedding_config", EMBEDDING_CONFIG)
            made = stack.enter_context(LocalCluster(embedding_config=config, env=env, **cluster))
            job = Job(made, folder / f"job{next(number)}", nproc)
            job.start(loaders, arguments, script)
            return job

        yield start


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`start_job(*train_arguments, loaders=[[loader options], ...])` starts a job and returns it, running."""
    with jobs(tmp_path) as start:
        yield start


def run_to_end(start: Callable[..., Job], *arguments: str, loaders: Sequence[int], **options: Any) -> Job:
    """Runs a job and checks exit codes. `loaders`: the number of batches of each."""
    job = start(*arguments, loaders=[["--batches", str(n)] for n in loaders], **options)
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    codes = [job.cluster.wait(loader, TIMEOUT_S) for loader in job.loaders]
    assert codes == [0] * len(loaders), [loader.output for loader in job.loaders]
    return job


@pytest.fixture
def run_job(start_job: Callable[..., Job]) -> Callable[..., Job]:
    """`run_job(*train_arguments, loaders=[number of batches, ...])` runs a job and checks exit codes."""
    return functools.partial(run_to_end, start_job)
