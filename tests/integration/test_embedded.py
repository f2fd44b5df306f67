"""A job in one process: the same script, and to the last bit what a cluster computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia.testing import LocalNats

JOBS = Path(__file__).parent / "jobs"
EMBEDDING_CONFIG = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 8}, "items": {"dim": 8}}}
TIMEOUT_S = 120.0
NUM_BATCHES = 40
_OTHER_JOBS = ("PERSIA_NATS_URL", "RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_EMBEDDED")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Slots, and neither broker nor rank: what `python train.py` sees on a laptop."""
    config = tmp_path / "embedding_config.yml"
    config.write_text(yaml.safe_dump(EMBEDDING_CONFIG, sort_keys=False))
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHER_JOBS}
    return {**inherited, "PERSIA_EMBEDDING_CONFIG": str(config), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def train(tmp_path: Path, environment: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """Runs jobs/train.py embedded, and returns its report."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        command = [sys.executable, str(JOBS / "train.py"), "--output", str(tmp_path / "embedded"), *arguments]
        finished = subprocess.run(
            command, env={**environment, **(env or {})}, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        report: dict[str, Any] = json.loads((tmp_path / "embedded.rank0.json").read_text())
        return {**report, "stderr": finished.stderr}

    return run


def test_embedded_job_equals_the_cluster_to_the_last_bit(train: Any, run_job: Any) -> None:
    embedded = train("--reproducible", "--embedded-loader", str(NUM_BATCHES))
    (cluster,) = run_job("--reproducible", loaders=[NUM_BATCHES], parameter_servers=2).reports
    assert embedded["losses"] == cluster["losses"]
    assert embedded["digest"] == cluster["digest"]
    assert embedded["optimizer_digest"] == cluster["optimizer_digest"]
    assert sum(embedded["sizes"]) == sum(cluster["sizes"])
    assert embedded["batch_ids"] == list(range(NUM_BATCHES))
    assert embedded["threads"] == []
    assert embedded["stderr"].count("embedded mode: embedding worker and store of 2 slots") == 1


def test_loader_in_a_process_of_its_own_feeds_an_embedded_job(
    train: Any, environment: dict[str, str]
) -> None:
    with LocalNats() as broker:
        shared = {"PERSIA_NATS_URL": broker.url}
        command = [sys.executable, str(JOBS / "loader.py"), "--batches", str(NUM_BATCHES)]
        with subprocess.Popen(command, env={**environment, **shared}) as loader:
            apart = train("--reproducible", env={**shared, "PERSIA_EMBEDDED": "1"})
            assert loader.wait(TIMEOUT_S) == 0
    together = train("--reproducible", "--embedded-loader", str(NUM_BATCHES))
    assert apart["counters"]["batches_trained"] == NUM_BATCHES
    assert apart["losses"] == together["losses"]
    assert apart["digest"] == together["digest"]
