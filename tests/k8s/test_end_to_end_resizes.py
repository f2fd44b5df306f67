"""Resizes of the parameter servers of a PersiaJob whose pods run their real commands."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from real_pods import TIMEOUT_S, ToyJob, expect_no_loss

SERVERS = "embeddingParameterServer"


def test_parameter_servers_are_resized_and_the_training_goes_on_where_it_was(
    toy_job: ToyJob, tmp_path: Path
) -> None:
    namespace = toy_job.namespace
    toy_job.spec["resizeCheckpoint"] = str(tmp_path)
    toy_job.start(60)
    toy_job.resize(SERVERS, 2)
    place = tmp_path / f"{namespace.name}-adult-income-resize"
    manifest = json.loads((place / "manifest.json").read_text())
    dense = torch.load(place / "dense.pt", weights_only=True)
    num_rows = sum(server["num_rows"] for server in manifest["embeddings"]["servers"])
    assert f"loaded {num_rows} rows" in toy_job.pods["adult-income-rows-load"].log
    namespace.await_phase("adult-income", "Running", TIMEOUT_S)
    toy_job.await_batches(30)
    status, report = toy_job.finish()
    assert (status["resizes"], status["restarts"], status["loaderRestarts"]) == (1, 0, 0)
    log = toy_job.pods["adult-income-nn-worker-0"].log  # of both starts
    # Nothing was learned after the dump, and the training went on with what there was.
    assert log[: log.rindex("batch 0\n")].count("batch ") == manifest["step"] >= 60
    values = b"".join(tensor.numpy().tobytes() for tensor in dense.values())
    assert report["resumed"]["digest"] == hashlib.sha256(values).hexdigest()
    assert report["resumed"]["step"] == manifest["step"]
    assert report["resumed"]["optimizer_digest"] != hashlib.sha256(b"").hexdigest()
    assert len(report["sizes"]) == 2
    assert all(size > 0 for size in report["sizes"])
    assert sum(report["sizes"]) <= 250  # no row was made twice
    namespace.await_(lambda: not place.exists(), "the checkpoint is removed")
    namespace.await_(lambda: "resizeCheckpoint" not in namespace.status("adult-income"), "which is noted")


@pytest.mark.timeout(900)
def test_parameter_servers_are_resized_while_the_training_continues(toy_job: ToyJob) -> None:
    namespace, pods = toy_job.namespace, toy_job.pods
    toy_job.spec[SERVERS]["replicas"] = 2
    toy_job.spec["security"] = {"tls": True}
    toy_job.start(30)
    trains = {
        name: pods[f"adult-income-{name}-0"] for name in ("nn-worker", "embedding-worker", "dataloader")
    }
    for wanted in (3, 2):
        toy_job.resize(SERVERS, wanted)
        toy_job.await_batches(30)
    new = {f"adult-income-embedding-ps-g2-{index}" for index in range(2)}
    namespace.await_(lambda: {n for n in namespace.list("pods") if "-ps-" in n} == new, "others have ended")
    status, report = toy_job.finish()
    assert (status["restarts"], status["loaderRestarts"], status["serverGeneration"]) == (0, 0, 2)
    assert not {"ServerRestarted", "ServersNotReady"} & {r for r, _ in namespace.events("adult-income")}
    assert all(pods[f"adult-income-{name}-0"] is process for name, process in trains.items())
    expect_no_loss(report, num_servers=2)


@pytest.mark.timeout(900)
def test_no_batch_and_no_row_is_lost_if_the_coordinator_of_a_resize_is_killed(toy_job: ToyJob) -> None:
    namespace, pods = toy_job.namespace, toy_job.pods
    toy_job.spec[SERVERS]["replicas"] = 2
    toy_job.start(30)
    coordinator = "adult-income-rows-resize"
    toy_job.scale(SERVERS, 3)
    # Its first line says that rows are being copied, or that they have been.
    toy_job.await_(lambda: coordinator in pods and " ..." in pods[coordinator].log, "rows move")
    killed = pods[coordinator]
    killed.kill()
    toy_job.await_(lambda: pods[coordinator] is not killed, "another coordinator")
    # How far the first one had come decides whether the new servers take over.
    toy_job.await_(lambda: "resize" not in namespace.status("adult-income"), "it ends")
    toy_job.await_batches(30)

    def has_servers(wanted: int) -> bool:
        replicas = namespace.status("adult-income")["roles"][SERVERS]["replicas"]
        return replicas == wanted and toy_job.condition("SpecApplied")[0] == "True"

    for wanted in (2, 3):
        toy_job.scale(SERVERS, wanted)
        toy_job.await_(lambda wanted=wanted: has_servers(wanted), "resized")
        toy_job.await_batches(30)
    status, report = toy_job.finish()
    assert (status["restarts"], status["loaderRestarts"]) == (0, 0)
    assert "ServerRestarted" not in {reason for reason, _ in namespace.events("adult-income")}
    expect_no_loss(report, num_servers=3)


def test_a_training_that_cannot_be_dumped_goes_on_as_it_is(toy_job: ToyJob, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    toy_job.spec["resizeCheckpoint"] = str(tmp_path / "file")
    toy_job.start(10)
    processes = dict(toy_job.pods)
    toy_job.scale(SERVERS, 2)
    assert str(tmp_path / "file") in toy_job.namespace.await_event("adult-income", "ResizeFailed")
    status, _ = toy_job.finish()
    assert status["resizes"] == 0
    assert status["roles"][SERVERS]["replicas"] == 1
    # Nothing was ended for it.
    assert all(toy_job.pods[name] is process for name, process in processes.items())
