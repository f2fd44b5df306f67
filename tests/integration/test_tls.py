"""Whole jobs whose connections are encrypted, by PERSIA_TLS_DIR alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from persia import _native
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import ConfigError, PersiaError
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.security import certificates
from persia.testing import LocalCluster

JOBS = Path(__file__).parent / "jobs"
SLOTS = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 8}, "items": {"dim": 8}}}
TIMEOUT_S = 30.0
DEADLINE_S = 200.0


def make_certificates(folder: Path) -> Path:
    (job,) = certificates.create(folder, ["job"], days=1)
    return job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PERSIA_TLS_DIR of this process and those that it starts."""
    made = make_certificates(tmp_path / "certificates")
    monkeypatch.setenv("PERSIA_TLS_DIR", str(made))
    return made


def configure(address: str) -> None:
    client = _native.RemoteClient(1)
    client.set_worker(0, address)
    client.configure(SGD(lr=1.0).train_config(EmbeddingConfig()), timeout_s=TIMEOUT_S)


def test_the_rpc_connections_of_a_cluster_are_encrypted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = make_certificates(tmp_path / "foreign")
    slots = {"slots_config": {"user": {"dim": 4}}}
    with LocalCluster(embedding_config=slots) as cluster:
        (worker,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, TIMEOUT_S)
        cluster.join()
        configure(worker.address)  # reaches the parameter server through the worker
        monkeypatch.setenv("PERSIA_TLS_DIR", str(foreign))
        cluster.join()
        client = _native.RemoteClient(1)
        client.set_worker(0, worker.address)
        with pytest.raises(PersiaError, match="certificate|TLS|tls"):
            client.sizes(timeout_s=2.0)


def test_one_process_alone_cannot_have_certificates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PERSIA_TLS_DIR.*os\.environ"):
        LocalCluster(embedding_config=SLOTS, env={"PERSIA_TLS_DIR": str(tmp_path)})


def launcher(cluster: LocalCluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "persia.launcher", *arguments]
    result = subprocess.run(
        command, env=cluster.env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_job_trains_and_is_watched(folder: Path, tmp_path: Path) -> None:
    """Two servers and workers, every command that looks at a job, and a renewal while it trains."""
    report = tmp_path / "report"
    with LocalCluster(
        embedding_config=SLOTS, parameter_servers=2, embedding_workers=2, env={"OMP_NUM_THREADS": "1"}
    ) as cluster:
        assert cluster.nats_url.startswith("tls://")
        loader = cluster.start_loader(JOBS / "loader.py", "--batches", "3000")
        trainer = cluster.start_nn_worker(JOBS / "train.py", "--output", str(report), "--pace", "0.02")
        deadline = time.monotonic() + DEADLINE_S
        while "batch 20" not in trainer.output:
            assert trainer.exit_code is None, trainer.output
            assert time.monotonic() < deadline, trainer.output
            time.sleep(0.1)
        processes = json.loads(launcher(cluster, "status", "--json"))
        assert len(processes) == 6
        assert all(process["values"]["ready"] for process in processes)
        trace = tmp_path / "trace.json"
        assert " of 6 processes" in launcher(cluster, "trace", "--batches", "5", "--output", str(trace))
        assert "not ready" not in launcher(cluster, "doctor")
        certificates.create(folder.parent, ["job"], days=2, replace=True)
        cluster.restart("embedding-worker-1")  # makes all its connections anew
        launcher(cluster, "checkpoint", "dump", str(tmp_path / "model"))
        for process in (loader, trainer):
            cluster.kill(process.name)


def test_a_job_by_one_command(folder: Path, tmp_path: Path) -> None:
    slots = tmp_path / "embedding_config.yml"
    slots.write_text(yaml.safe_dump(SLOTS))
    report = tmp_path / "report"
    command = [sys.executable, "-m", "persia.launcher", "local", "--embedding-config", str(slots)]
    command += ["--data-loader", str(JOBS / "loader.py"), "--loader-args", "--batches 50"]
    command += ["--nn-worker", str(JOBS / "train.py"), "--", "--output", str(report)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PERSIA_NATS_URL=tls://127.0.0.1" in result.stderr
