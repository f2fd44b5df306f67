"""A running job for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.attacks.job import AttackedJob, attacked_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedJob]:
    """One for all tests of a module: each leaves it training, or fails."""
    with attacked_job(tmp_path_factory.mktemp("job") / "report") as started:
        yield started


@pytest.fixture(autouse=True)
def unharmed(job: AttackedJob) -> Iterator[None]:
    """After every attack all processes live, and the training goes on."""
    yield
    job.require_alive()
    job.require_training()
