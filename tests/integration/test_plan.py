"""What `persia-launcher plan` predicts, beside a real worker and servers: rows, memory and bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from persia import _native
from persia.data import SyntheticClicks
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.launcher import cli
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER
from persia.observability.status import job_status
from persia.testing import LocalCluster

from .watching import all_processes

DIM, SERVERS = 16, 2
HOSTS = {
    "machine": {"cores": 2, "memory_gib": 8},
    "parameter_servers": {"count": SERVERS},
    "ranks": {"samples_per_s": 1e6},
}
# A large slot and a small one that travel as rows, one that travels pooled, one with several IDs.
CLICKS = SyntheticClicks(
    [400_000, 30, 3_000_000, 50_000], hotness=[1, 1, 1, 3], alpha=0.9, batch_size=8192, num_batches=8
)


def trained(cluster: LocalCluster) -> tuple[dict[str, float], float, float]:
    """Trains all clicks: bytes of a batch by hop, rows, and their memory."""
    (worker,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, 60.0)
    cluster.join()
    client = _native.RemoteClient(1)
    client.set_worker(0, worker.address)
    client.configure(Adagrad(lr=0.01).train_config(EmbeddingConfig()))
    before = counted(cluster)
    gradient = np.full((CLICKS.batch_size, DIM), 1e-3, np.float32)
    for number in CLICKS.read():
        message = CLICKS.make(number, requires_grad=True).encode_id_features()
        result = client.lookup_direct(0, message, requires_grad=True)
        client.return_gradients(result.reference, [(slot.name, gradient) for slot in result.slots])
    after = counted(cluster)
    moved = {name: (after[name] - before[name]) / len(CLICKS) for name in after}
    return moved, sum(client.sizes()), after["memory"]


def counted(cluster: LocalCluster) -> dict[str, float]:
    counts: dict[str, float] = {}
    for status in job_status(all_processes(cluster, SERVERS + 1)):
        assert status.values is not None, status.error
        stats = status.values["stats"]
        for way in ("received", "sent"):
            name = f"{status.info.role} {way}"
            counts[name] = counts.get(name, 0) + stats[f"rpc_num_{way}_bytes"]
        if "server_loads" in stats:
            counts["memory"] = sum(load["memory_bytes"] for load in stats["server_loads"])
    return counts


def planned(folder: Path, *options: str) -> dict[str, Any]:
    hosts = folder / "hosts.yaml"
    hosts.write_text(json.dumps(HOSTS))  # JSON is YAML
    words = ["plan", "--json", "--hosts", str(hosts), "--feature-spec", str(folder), "--dim", str(DIM)]
    words += ["--batch-size", str(CLICKS.batch_size), "--samples", str(len(CLICKS) * CLICKS.batch_size)]
    done = CliRunner().invoke(cli, [*words, "--optimizer", "adagrad", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.timeout(300)
def test_memory_and_bytes_are_predicted_within_a_fifth(tmp_path: Path) -> None:
    spec = CLICKS.spec(str(tmp_path))
    with LocalCluster(embedding_config=spec.slots(DIM), parameter_servers=SERVERS) as cluster:
        moved, num_rows, memory = trained(cluster)
    CLICKS.write_split_binary(str(tmp_path))
    spec.save()
    for options in ((), ("--sample", str(tmp_path))):  # by the power law of the spec, and counted
        plan = planned(tmp_path, *options)
        hops = plan["traffic"]
        expected = {
            f"{EMBEDDING_PARAMETER_SERVER} received": hops["lookups"] + hops["updates"],
            f"{EMBEDDING_PARAMETER_SERVER} sent": hops["rows"],
            # A lookup without a data loader brings its ID features itself.
            f"{EMBEDDING_WORKER} received": hops["id_features"] + hops["gradients"],
            f"{EMBEDDING_WORKER} sent": hops["embeddings"],
        }
        for name, value in expected.items():
            assert value == pytest.approx(moved[name], rel=0.05), (name, options)
        assert plan["num_rows"] == pytest.approx(num_rows, rel=0.05), options
        assert plan["num_rows"] * plan["row_bytes"] == pytest.approx(memory, rel=0.1), options
