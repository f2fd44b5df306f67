"""Resizes of the parameter servers of a PersiaJob whose pods run their real commands."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from harness import Namespace, OperatorProcess
from kubelet import LocalProcess
from real_pods import TIMEOUT_S, await_batches, condition_of


def resize_parameter_servers(namespace: Namespace, wanted: int) -> None:
    namespace.patch(
        "persiajobs", "adult-income", {"spec": {"embeddingParameterServer": {"replicas": wanted}}}
    )


def has_servers(namespace: Namespace, wanted: int) -> bool:
    replicas = namespace.status("adult-income")["roles"]["embeddingParameterServer"]["replicas"]
    return replicas == wanted and condition_of(namespace, "SpecApplied")[0] == "True"


def test_parameter_servers_are_resized_and_the_training_goes_on_where_it_was(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    toy: dict[str, Any],
    tmp_path: Path,
) -> None:
    toy["spec"]["resizeCheckpoint"] = str(tmp_path)
    namespace.apply(toy)
    await_batches(namespace, run_pods, 60)
    resize_parameter_servers(namespace, 2)
    namespace.await_(
        lambda: condition_of(namespace, "Resized") == ("True", "embeddingParameterServer.replicas: 2"),
        "resized",
        TIMEOUT_S,
    )
    place = tmp_path / f"{namespace.name}-adult-income-resize"
    manifest = json.loads((place / "manifest.json").read_text())
    dense = torch.load(place / "dense.pt", weights_only=True)
    num_rows = sum(server["num_rows"] for server in manifest["embeddings"]["servers"])
    assert f"loaded {num_rows} rows" in run_pods["adult-income-rows-load"].log
    namespace.await_phase("adult-income", "Running", TIMEOUT_S)
    await_batches(namespace, run_pods, 30)
    (tmp_path / "toy" / "enough").touch()
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert (status["resizes"], status["restarts"], status["loaderRestarts"]) == (1, 0, 0)
    log = run_pods["adult-income-nn-worker-0"].log  # of both starts
    # Nothing was learned after the dump, and the training went on with what there was.
    assert log[: log.rindex("batch 0\n")].count("batch ") == manifest["step"] >= 60
    report = json.loads((tmp_path / "toy" / "report.rank0.json").read_text())
    values = b"".join(tensor.numpy().tobytes() for tensor in dense.values())
    assert report["resumed"]["digest"] == hashlib.sha256(values).hexdigest()
    assert report["resumed"]["step"] == manifest["step"]
    assert report["resumed"]["optimizer_digest"] != hashlib.sha256(b"").hexdigest()
    assert report["batch_ids"] == list(range(int((tmp_path / "toy" / "num_sent").read_text())))
    assert len(report["sizes"]) == 2
    assert all(size > 0 for size in report["sizes"])
    assert sum(report["sizes"]) <= 250  # no row was made twice
    namespace.await_(lambda: not place.exists(), "the checkpoint is removed")
    namespace.await_(lambda: "resizeCheckpoint" not in namespace.status("adult-income"), "which is noted")


@pytest.mark.timeout(900)
def test_parameter_servers_are_resized_while_the_training_continues(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    toy: dict[str, Any],
    tmp_path: Path,
) -> None:
    toy["spec"]["embeddingParameterServer"]["replicas"] = 2
    toy["spec"]["security"] = {"tls": True}
    namespace.apply(toy)
    await_batches(namespace, run_pods, 30)
    trains = {
        name: run_pods[f"adult-income-{name}-0"] for name in ("nn-worker", "embedding-worker", "dataloader")
    }
    for wanted in (3, 2):
        resize_parameter_servers(namespace, wanted)
        is_done = ("True", f"embeddingParameterServer.replicas: {wanted}")
        namespace.await_(
            lambda is_done=is_done: condition_of(namespace, "Resized") == is_done, "resized", TIMEOUT_S
        )
        await_batches(namespace, run_pods, 30)
    new = {f"adult-income-embedding-ps-g2-{index}" for index in range(2)}
    namespace.await_(lambda: {n for n in namespace.list("pods") if "-ps-" in n} == new, "others have ended")
    (tmp_path / "toy" / "enough").touch()
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert (status["restarts"], status["loaderRestarts"], status["serverGeneration"]) == (0, 0, 2)
    assert not {"ServerRestarted", "ServersNotReady"} & {r for r, _ in namespace.events("adult-income")}
    assert all(run_pods[f"adult-income-{name}-0"] is process for name, process in trains.items())
    report = json.loads((tmp_path / "toy" / "report.rank0.json").read_text())
    num_sent = int((tmp_path / "toy" / "num_sent").read_text())
    assert report["batch_ids"] == list(range(num_sent))
    assert report["counters"]["batches_trained"] == num_sent
    assert report["counters"]["batches_failed"] == report["counters"]["batches_released"] == 0
    assert len(report["sizes"]) == 2
    assert sum(report["sizes"]) <= 250  # no row was made twice


@pytest.mark.timeout(900)
def test_no_batch_and_no_row_is_lost_if_the_coordinator_of_a_resize_is_killed(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    toy: dict[str, Any],
    tmp_path: Path,
) -> None:
    toy["spec"]["embeddingParameterServer"]["replicas"] = 2
    namespace.apply(toy)
    await_batches(namespace, run_pods, 30)
    coordinator = "adult-income-rows-resize"
    resize_parameter_servers(namespace, 3)
    # Its first line says that rows are being copied, or that they have been.
    namespace.await_(
        lambda: coordinator in run_pods and " ..." in run_pods[coordinator].log, "rows move", TIMEOUT_S
    )
    killed = run_pods[coordinator]
    killed.kill()
    namespace.await_(lambda: run_pods[coordinator] is not killed, "another coordinator", TIMEOUT_S)
    # How far the first one had come decides whether the new servers take over.
    namespace.await_(lambda: "resize" not in namespace.status("adult-income"), "it ends", TIMEOUT_S)
    await_batches(namespace, run_pods, 30)
    for wanted in (2, 3):
        resize_parameter_servers(namespace, wanted)
        namespace.await_(lambda wanted=wanted: has_servers(namespace, wanted), "resized", TIMEOUT_S)
        await_batches(namespace, run_pods, 30)
    (tmp_path / "toy" / "enough").touch()
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert (status["restarts"], status["loaderRestarts"]) == (0, 0)
    assert "ServerRestarted" not in {reason for reason, _ in namespace.events("adult-income")}
    report = json.loads((tmp_path / "toy" / "report.rank0.json").read_text())
    num_sent = int((tmp_path / "toy" / "num_sent").read_text())
    assert report["batch_ids"] == list(range(num_sent))
    assert report["counters"]["batches_trained"] == num_sent
    assert len(report["sizes"]) == 3
    assert sum(report["sizes"]) <= 250  # no row was made twice


def test_a_training_that_cannot_be_dumped_goes_on_as_it_is(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    toy: dict[str, Any],
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    toy["spec"]["resizeCheckpoint"] = str(tmp_path / "file")
    namespace.apply(toy)
    await_batches(namespace, run_pods, 10)
    processes = dict(run_pods)
    resize_parameter_servers(namespace, 2)
    assert str(tmp_path / "file") in namespace.await_event("adult-income", "ResizeFailed")
    (tmp_path / "toy" / "enough").touch()
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert status["resizes"] == 0
    assert status["roles"]["embeddingParameterServer"]["replicas"] == 1
    assert all(run_pods[name] is process for name, process in processes.items())  # nothing was ended for it
