"""Adult income through a PersiaJob: its pods run their real commands, as processes of this machine."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from harness import Namespace, OperatorProcess
from kubelet import FakeKubelet, LocalProcess
from real_pods import EXAMPLE, OF_ONE_PROCESS, TIMEOUT_S, ToyJob, expect_no_loss


def trained_steps(history: Path) -> list[int]:
    records = [json.loads(line) for line in history.read_text().splitlines()]
    return [record["step"] for record in records if "loss" in record]


def test_adult_income_trains_to_success(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    make_job: Callable[..., dict[str, Any]],
    tmp_path: Path,
    data: Path,
) -> None:
    namespace.apply(make_job())
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    summary = json.loads((tmp_path / "output" / "summary.json").read_text())
    best_auc = json.loads((data / "dataset.json").read_text())["best_auc"]
    assert best_auc - 0.02 < summary["test_auc"] < best_auc + 0.005
    assert status["progress"] == {
        "step": 254,
        "auc": summary["test_auc"],
        "samplesPerSecond": summary["samples_per_second"],
        "lastCheckpoint": str(tmp_path / "output" / "checkpoint"),
    }
    assert status["restarts"] == 0
    namespace.await_(
        lambda: set(namespace.list("pods")) == {"adult-income-nn-worker-0", "adult-income-dataloader-0"},
        "servers are gone",
    )
    assert {pod["status"]["phase"] for pod in namespace.list("pods").values()} == {"Succeeded"}


def test_a_job_with_certificates_trains_while_they_are_renewed(toy_job: ToyJob, kubelet: FakeKubelet) -> None:
    namespace = toy_job.namespace
    toy_job.spec["security"] = {"tls": True}
    toy_job.start(30)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    place = (kubelet.address("adult-income-embedding-ps-0"), 8888)

    def certificate() -> bytes:
        """What the parameter server shows, also without a certificate."""
        with socket.create_connection(place, 60) as plain, context.wrap_socket(plain) as peer:
            return peer.getpeercert(binary_form=True) or b""

    first = certificate()
    namespace.expire_certificates("adult-income")
    namespace.await_event("adult-income", "CertificatesRenewed")

    def shows_another() -> bool:
        kubelet.refresh_secrets()
        return certificate() != first

    namespace.await_(shows_another, "the parameter server shows its new certificate", TIMEOUT_S)
    # A new worker has only the new certificates, and meets processes that began with the old ones.
    toy_job.resize("embeddingWorker", 2)
    toy_job.await_batches(80)
    status, report = toy_job.finish()
    assert (status["restarts"], status["loaderRestarts"]) == (0, 0)
    assert set(report["workers"]) == {0, 1}


def test_training_that_is_killed_is_started_again_and_succeeds(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    make_job: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    namespace.apply(make_job(backoffSeconds=0))
    namespace.await_phase("adult-income", "Running", TIMEOUT_S)
    history = tmp_path / "output" / "history.jsonl"
    namespace.await_(lambda: history.exists() and history.read_text().count("\n") > 5, "it trains", TIMEOUT_S)
    run_pods["adult-income-nn-worker-0"].kill()
    namespace.await_(lambda: namespace.status("adult-income").get("restarts") == 1, "restarted", TIMEOUT_S)
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert "exit code 137" in namespace.await_event("adult-income", "Restarting")
    assert status["progress"]["auc"] > 0.5


def test_training_survives_a_loader_that_is_killed(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    make_job: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    namespace.apply(make_job())
    history = tmp_path / "output" / "history.jsonl"
    namespace.await_(lambda: history.exists() and history.read_text().count("\n") > 5, "it trains", TIMEOUT_S)
    run_pods["adult-income-dataloader-0"].kill()
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert (status["restarts"], status["loaderRestarts"]) == (0, 1)
    assert trained_steps(history) == list(range(1, 255))  # every batch, once
    assert "exit code 137" in namespace.await_event("adult-income", "DataLoaderRestarted")


def test_embedding_workers_come_and_go_and_no_batch_is_lost(toy_job: ToyJob) -> None:
    toy_job.start(30)
    for wanted in (2, 1):
        toy_job.resize("embeddingWorker", wanted)
        toy_job.await_batches(80)
    status, report = toy_job.finish()
    assert (status["restarts"], status["loaderRestarts"]) == (0, 0)
    expect_no_loss(report, num_servers=1)
    assert set(report["workers"]) == {0, 1}
    assert set(report["workers"][:20]) == set(report["workers"][-15:]) == {0}
    retired = toy_job.pods["adult-income-embedding-worker-1"]
    assert (retired.exit_code, "given up" in retired.log) == (0, False)


def test_parameter_servers_with_standbys_are_killed_and_training_does_not_go_back(toy_job: ToyJob) -> None:
    pods = toy_job.pods
    config = {"embedding_parameter_server_config": {"standbys": 1, "standby_deadline_sec": 60}}
    (toy_job.folder / "global.yml").write_text(yaml.safe_dump(config))
    toy_job.spec["embeddingParameterServer"]["standbys"] = 1
    toy_job.spec["restartPolicy"] = "OnFailure"
    toy_job.start(20)
    # The other one takes over, and the killed one is started again as its standby.
    has_copy = "has every row and change"
    names = ("adult-income-embedding-ps-0", "adult-income-standby-0")
    for killed, other in (names, names[::-1]):
        toy_job.await_(lambda killed=killed: has_copy in pods[killed].log, "a standby")
        pods[killed].kill()
        toy_job.await_(lambda other=other: has_copy in pods[other].log, "a new standby")
        toy_job.await_batches(20)
    status, _ = toy_job.finish()
    assert status["restarts"] == 0
    assert {role: counts["restarts"] for role, counts in status["roles"].items() if counts["restarts"]} == {
        "embeddingParameterServer": 1,
        "standby": 1,
    }


def test_predictions_of_a_job_are_those_of_its_training(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    kubelet: FakeKubelet,
    localized: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    data: Path,
) -> None:
    """The job is infer.yaml; its checkpoint is one of a training in one process."""
    pytest.importorskip("tritonclient", reason="needs tritonclient (the 'test' extra of persia)")
    output = tmp_path / "output"
    env = {name: value for name, value in os.environ.items() if name not in OF_ONE_PROCESS}
    env |= {"ADULT_DATA": str(data), "ADULT_OUTPUT": str(output), "OMP_NUM_THREADS": "1", "ENABLE_CUDA": "0"}
    trained = subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py")], env=env, capture_output=True, timeout=TIMEOUT_S
    )
    assert trained.returncode == 0, trained.stderr
    namespace.apply(localized("infer.yaml"))
    status = namespace.await_phase("adult-income-predict", "Running", TIMEOUT_S)
    assert {role: counts["ready"] for role, counts in status["roles"].items()} == {
        "embeddingParameterServer": 2,
        "embeddingWorker": 2,
        "inference": 2,
    }
    auc = json.loads((output / "summary.json").read_text())["test_auc"]
    for index in range(2):
        address = f"{kubelet.address(f'adult-income-predict-inference-{index}')}:8001"
        command = [sys.executable, str(EXAMPLE / "serving" / "client.py"), "--address", address]
        command += ["--model", "adult-income", "--data", str(data)]
        answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert answer.stdout.startswith(f"test AUC {auc:.7f} "), (answer, auc)
    assert not any("nats" in name for name in run_pods)


def test_two_nodes_train_as_one_group(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    make_job: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    namespace.apply(make_job(nnWorker={"replicas": 2}))
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert status["progress"]["step"] == 127
    history = tmp_path / "output" / "history.jsonl"
    assert trained_steps(history) == list(range(1, 128))  # of 254 batches, shared by two ranks
    assert status["roles"]["nnWorker"] == {"replicas": 2, "ready": 2, "restarts": 0}
