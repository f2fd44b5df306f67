"""Adult income through a PersiaJob: its pods run their real commands, as processes of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from harness import Namespace, OperatorProcess
from kubelet import Container, FakeKubelet, LocalProcess

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "adult_income"
JOBS = Path(__file__).with_name("jobs")
TIMEOUT_S = 240
_OF_ONE_PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated data of the example's shape: where the real files are is not this test's business."""
    folder = tmp_path_factory.mktemp("adult")
    command = [sys.executable, str(EXAMPLE / "prepare_data.py"), "--generate", "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
    return folder


@pytest.fixture
def run_pods(kubelet: FakeKubelet, tmp_path: Path) -> dict[str, LocalProcess]:
    """Makes the kubelet run commands; returns its processes by pod name."""
    if shutil.which("persia-launcher") is None:
        pytest.skip("no persia-launcher in the PATH: pip install .")
    env = {name: value for name, value in os.environ.items() if name not in _OF_ONE_PROCESS}
    processes: dict[str, LocalProcess] = {}

    def run(container: Container) -> LocalProcess:
        container.command = [_resolve(kubelet, word) for word in container.command]
        container.env = {name: _resolve(kubelet, value) for name, value in container.env.items()}
        process = processes[container.pod] = LocalProcess(container, tmp_path, env)
        return process

    kubelet.runner = run
    return processes


def _resolve(kubelet: FakeKubelet, text: str) -> str:
    """What the cluster's DNS does for the names of the job's services."""
    text = text.replace("nats://adult-income-nats:", f"nats://{kubelet.address('adult-income-nats-0')}:")
    return re.sub(r"(adult-income-[a-z-]+-\d+)\.adult-income-[a-z-]+", lambda m: kubelet.address(m[1]), text)


@pytest.fixture
def localized(data: Path, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """An example's job with the image's folders replaced by this machine's."""

    def load(name: str) -> dict[str, Any]:
        text = (EXAMPLE / "k8s" / name).read_text()
        text = text.replace("/opt/persia/examples", str(REPOSITORY / "examples"))
        text = text.replace("/data/adult-income", str(tmp_path / "output"))
        job: dict[str, Any] = yaml.safe_load(text.replace("/data/adult}", f"{data}}}"))
        return job

    return load


@pytest.fixture
def make_job(localized: Callable[[str], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """That of train-cpu.yaml; `spec` changes it."""

    def make(**spec: Any) -> dict[str, Any]:
        job = localized("train-cpu.yaml")
        job["spec"]["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})
        for name, value in spec.items():
            if isinstance(value, dict):
                job["spec"][name] |= value
            else:
                job["spec"][name] = value
        return job

    return make


@pytest.fixture
def toy(make_job: Callable[..., dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """A job that trains until there is a file `enough` in the folder `toy`, where its report goes."""
    folder = tmp_path / "toy"
    folder.mkdir()
    slots = {"user": {"dim": 8}, "items": {"dim": 8}}
    embedding_config = {"feature_index_prefix_bit": 8, "slots_config": slots}
    (folder / "embedding.yml").write_text(yaml.safe_dump(embedding_config))
    # Few batches wait, so that the job ends soon after it has seen enough.
    (folder / "global.yml").write_text("embedding_worker_config: {forward_buffer_size: 20}\n")
    return make_job(
        persiaEnv={
            "PERSIA_GLOBAL_CONFIG": str(folder / "global.yml"),
            "PERSIA_EMBEDDING_CONFIG": str(folder / "embedding.yml"),
            "PERSIA_NN_WORKER_ENTRY": str(JOBS / "toy_train.py"),
            "PERSIA_DATALOADER_ENTRY": str(JOBS / "toy_loader.py"),
        },
        env=[{"name": "TOY_FOLDER", "value": str(folder)}, {"name": "OMP_NUM_THREADS", "value": "1"}],
        embeddingParameterServer={"replicas": 1},
    )


def await_batches(namespace: Namespace, pods: dict[str, LocalProcess], more: int) -> None:
    """Until the toy job has trained so many batches more."""

    def num_trained() -> int:
        pod = pods.get("adult-income-nn-worker-0")
        return 0 if pod is None else pod.log.count("batch ")

    wanted = num_trained() + more
    namespace.await_(lambda: num_trained() >= wanted, f"{wanted} batches", TIMEOUT_S)


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


def test_a_job_with_certificates_trains_while_they_are_renewed(
    namespace: Namespace,
    kubelet: FakeKubelet,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    toy: dict[str, Any],
    tmp_path: Path,
) -> None:
    toy["spec"]["security"] = {"tls": True}
    namespace.apply(toy)
    await_batches(namespace, run_pods, 30)
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
    namespace.patch("persiajobs", "adult-income", {"spec": {"embeddingWorker": {"replicas": 2}}})
    is_done = ("True", "embeddingWorker.replicas: 2")
    namespace.await_(lambda: condition_of(namespace, "Resized") == is_done, "resized", TIMEOUT_S)
    await_batches(namespace, run_pods, 80)
    (tmp_path / "toy" / "enough").touch()
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert (status["restarts"], status["loaderRestarts"]) == (0, 0)
    report = json.loads((tmp_path / "toy" / "report.rank0.json").read_text())
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


def condition_of(namespace: Namespace, kind: str) -> tuple[str, str]:
    """Status and message."""
    conditions = namespace.status("adult-income").get("conditions", [])
    return next(((c["status"], c.get("message", "")) for c in conditions if c["type"] == kind), ("", ""))


def test_embedding_workers_come_and_go_and_no_batch_is_lost(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    toy: dict[str, Any],
    tmp_path: Path,
) -> None:
    namespace.apply(toy)
    await_batches(namespace, run_pods, 30)
    for wanted in (2, 1):
        namespace.patch("persiajobs", "adult-income", {"spec": {"embeddingWorker": {"replicas": wanted}}})
        is_done = ("True", f"embeddingWorker.replicas: {wanted}")
        namespace.await_(
            lambda is_done=is_done: condition_of(namespace, "Resized") == is_done, "resized", TIMEOUT_S
        )
        await_batches(namespace, run_pods, 80)
    (tmp_path / "toy" / "enough").touch()
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert (status["restarts"], status["loaderRestarts"]) == (0, 0)
    report = json.loads((tmp_path / "toy" / "report.rank0.json").read_text())
    num_sent = int((tmp_path / "toy" / "num_sent").read_text())
    assert report["batch_ids"] == list(range(num_sent))
    assert report["counters"]["batches_trained"] == num_sent
    assert report["counters"]["batches_failed"] == report["counters"]["batches_released"] == 0
    assert set(report["workers"]) == {0, 1}
    assert set(report["workers"][:20]) == set(report["workers"][-15:]) == {0}
    retired = run_pods["adult-income-embedding-worker-1"]
    assert (retired.exit_code, "given up" in retired.log) == (0, False)


def test_parameter_servers_with_standbys_are_killed_and_training_does_not_go_back(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    toy: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {"embedding_parameter_server_config": {"standbys": 1, "standby_deadline_sec": 60}}
    (tmp_path / "toy" / "global.yml").write_text(yaml.safe_dump(config))
    toy["spec"]["embeddingParameterServer"]["standbys"] = 1
    toy["spec"]["restartPolicy"] = "OnFailure"
    namespace.apply(toy)
    await_batches(namespace, run_pods, 20)
    # The other one takes over, and the killed one is started again as its standby.
    has_copy = "has every row and change"
    names = ("adult-income-embedding-ps-0", "adult-income-standby-0")
    for killed, other in (names, names[::-1]):
        namespace.await_(lambda killed=killed: has_copy in run_pods[killed].log, "a standby", TIMEOUT_S)
        run_pods[killed].kill()
        namespace.await_(lambda other=other: has_copy in run_pods[other].log, "a new standby", TIMEOUT_S)
        await_batches(namespace, run_pods, 20)
    (tmp_path / "toy" / "enough").touch()
    status = namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
    assert status["restarts"] == 0
    assert {role: counts["restarts"] for role, counts in status["roles"].items() if counts["restarts"]} == {
        "embeddingParameterServer": 1,
        "standby": 1,
    }
    report = json.loads((tmp_path / "toy" / "report.rank0.json").read_text())
    assert report["batch_ids"] == list(range(int((tmp_path / "toy" / "num_sent").read_text())))


def resize_parameter_servers(namespace: Namespace, wanted: int) -> None:
    namespace.patch(
        "persiajobs", "adult-income", {"spec": {"embeddingParameterServer": {"replicas": wanted}}}
    )


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
    env = {name: value for name, value in os.environ.items() if name not in _OF_ONE_PROCESS}
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
