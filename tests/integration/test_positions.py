"""A checkpoint has the position of the data: whatever is killed and resumed trains each batch once."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from persia.storage.location import Location
from persia.storage.manifest import Manifest

JOBS = Path(__file__).parent / "jobs"
TOTAL = 90


def await_output(process: Any, text: str) -> None:
    deadline = time.monotonic() + 240
    while text not in process.output:
        assert time.monotonic() < deadline, f"{process.name} never printed {text!r}:\n{process.output}"
        assert process.exit_code is None, f"{process.name} ended:\n{process.output}"
        time.sleep(0.02)


class Jobs:
    """Runs one job after another on the servers of the first one."""

    def __init__(self, first: Any, folder: Path) -> None:
        self.cluster, self._folder = first.cluster, folder

    def run(self, name: str, *arguments: str, loaders: int, checkpoint: Path, nproc: int = 1) -> Any:
        """The reports of a job that resumes from `checkpoint`."""
        for index in range(loaders):
            self.cluster.start_loader(
                *(JOBS / "loader.py", "--total", str(TOTAL), "--resume"),
                replica_index=index,
                replica_size=loaders,
            )
        worker = self.cluster.start_nn_worker(
            *(JOBS / "train.py", "--output", str(self._folder / name), *arguments),
            nproc=nproc,
            env={"PERSIA_RESUME_CHECKPOINT": str(checkpoint)},
        )
        assert self.cluster.wait(worker, 240.0) == 0, worker.output
        for index in range(loaders):
            loader = [p for p in self.cluster.processes if p.name == f"data-loader-{index}"][-1]
            assert self.cluster.wait(loader, 60.0) == 0, loader.output
        names = [f"{name}.rank{rank}.json" for rank in range(nproc)]
        return [json.loads((self._folder / each).read_text()) for each in names]


def loader_options(count: int) -> Sequence[Sequence[str]]:
    return [["--total", str(TOTAL)]] * count


@pytest.mark.timeout(600)  # five jobs one after another
def test_killed_job_resumes_with_any_number_of_loaders_and_ranks(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    whole = start_job("--reproducible", loaders=loader_options(2))
    assert whole.finish_nn_worker() == 0, whole.nn_worker.output
    (undisturbed,) = whole.reports

    checkpoint = tmp_path / "checkpoint"
    job = start_job(
        *("--reproducible", "--dump", str(checkpoint), "--dump-after", "35", "--pace", "0.01"),
        loaders=loader_options(2),
    )
    await_output(job.nn_worker, "batch 40\n")
    for name in ("nn-worker", "data-loader-0", "data-loader-1"):
        job.cluster.kill(name)
    before = list(range(35))
    jobs = Jobs(job, tmp_path)

    # The same number of loaders, in reproducible mode: equal to the last bit, as if nothing had happened.
    (report,) = jobs.run("same", "--reproducible", loaders=2, checkpoint=checkpoint)
    assert report["extra"] == {"batch_ids": before}
    assert report["batch_ids"] == list(range(35, TOTAL))
    assert report["digest"] == undisturbed["digest"]
    assert report["sizes"] == undisturbed["sizes"]
    assert report["losses"] == undisturbed["losses"][35:]

    # Another number of loaders and ranks; and a checkpoint of that job, which another number resumes.
    second = tmp_path / "second"
    options = ("--dump", str(second), "--dump-after", "12", "--pace", "0.01")
    reports = jobs.run("other", *options, loaders=3, checkpoint=checkpoint, nproc=2)
    numbers = [number for report in reports for number in report["batch_ids"]]
    assert sorted(numbers) == list(range(35, TOTAL))
    at_second = [number for report in reports for number in report["batch_ids"][:12]]
    position = Manifest.read(Location.of(second))[0].trained
    assert position is not None
    assert [n for n in range(TOTAL) if n in position] == sorted(before + at_second)

    (report,) = jobs.run("last", loaders=1, checkpoint=second)
    assert sorted(report["batch_ids"] + at_second + before) == list(range(TOTAL))


def test_restarted_loader_begins_where_the_rank_is(start_job: Callable[..., Any]) -> None:
    options = ["--total", str(TOTAL), "--resume"]
    # The loader may take longer to start than the silence that ranks are patient for.
    env = {"PERSIA_LOADER_SILENCE_SEC": "60"}
    job = start_job("--pace", "0.03", loaders=[options, options], env=env)
    await_output(job.nn_worker, "batch 40\n")
    job.cluster.kill("data-loader-0")
    job.cluster.restart("data-loader-0")
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    (report,) = job.reports
    assert sorted(report["batch_ids"]) == list(range(TOTAL))
    assert report["counters"]["batches_released"] <= 1, "one may be under way at the kill"
    begun = re.findall(r"begins at (\d+)", job.cluster.logs("data-loader-0"))
    assert int(begun[-1]) >= 15


def test_dump_after_the_loop_has_the_position_of_ranks_that_have_left(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    options = ("--dump", str(checkpoint), "--dump-at-the-end", "--dump-late")
    job = start_job(*options, loaders=loader_options(2), nproc=2)
    assert job.finish_nn_worker() == 0, job.nn_worker.output
    assert "refused" not in job.reports[0]
    position = Manifest.read(Location.of(checkpoint))[0].trained
    assert position is not None
    assert [n for n in range(TOTAL + 2) if n in position] == list(range(TOTAL))
