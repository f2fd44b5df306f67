"""A cluster whose RPC connections are encrypted."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia import _native
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import PersiaError
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.security import certificates
from persia.testing import LocalCluster

TIMEOUT_S = 30.0


def make_certificates(folder: Path) -> Path:
    (job,) = certificates.create(folder, ["job"], days=1)
    return job


def configure(address: str) -> None:
    client = _native.RemoteClient(1)
    client.set_worker(0, address)
    client.configure(SGD(lr=1.0).train_config(EmbeddingConfig()), timeout_s=TIMEOUT_S)


def test_the_rpc_connections_of_a_cluster_are_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, foreign = make_certificates(tmp_path / "job"), make_certificates(tmp_path / "foreign")
    slots = {"slots_config": {"user": {"dim": 4}}}
    with LocalCluster(embedding_config=slots, env={"PERSIA_TLS_DIR": str(folder)}) as cluster:
        (worker,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, TIMEOUT_S)
        monkeypatch.setenv("PERSIA_TLS_DIR", str(folder))
        cluster.join()
        configure(worker.address)  # reaches the parameter server through the worker
        monkeypatch.setenv("PERSIA_TLS_DIR", str(foreign))
        cluster.join()
        client = _native.RemoteClient(1)
        client.set_worker(0, worker.address)
        with pytest.raises(PersiaError, match="certificate|TLS|tls"):
            client.sizes(timeout_s=2.0)
