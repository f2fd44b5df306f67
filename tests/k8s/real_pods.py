"""What tests share whose pods run their real commands, as processes of this machine: the jobs' fixtures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:  # they need the persia-k8s distribution, and conftest.py imports this file without it
    from harness import Namespace, OperatorProcess
    from kubelet import Container, FakeKubelet, LocalProcess

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "adult_income"
JOBS = Path(__file__).with_name("jobs")
TIMEOUT_S = 240
OF_ONE_PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE")


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
    from kubelet import LocalProcess

    if shutil.which("persia-launcher") is None:
        pytest.skip("no persia-launcher in the PATH: pip install .")
    env = {name: value for name, value in os.environ.items() if name not in OF_ONE_PROCESS}
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


class ToyJob:
    """The toy job in a namespace, from `start` to `finish`."""

    def __init__(
        self, namespace: Namespace, pods: dict[str, LocalProcess], job: dict[str, Any], folder: Path
    ) -> None:
        self.namespace, self.pods, self.folder = namespace, pods, folder
        self._job = job
        self.spec = job["spec"]  # for a test to change before `start`

    def start(self, batches: int) -> None:
        """Returns when it has trained so many batches."""
        self.namespace.apply(self._job)
        self.await_batches(batches)

    def await_batches(self, more: int) -> None:
        """Until it has trained so many batches more."""

        def num_trained() -> int:
            pod = self.pods.get("adult-income-nn-worker-0")
            return 0 if pod is None else pod.log.count("batch ")

        wanted = num_trained() + more
        self.await_(lambda: num_trained() >= wanted, f"{wanted} batches")

    def await_(self, condition: Callable[[], bool], what: str) -> None:
        self.namespace.await_(condition, what, TIMEOUT_S)

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and message."""
        conditions = self.namespace.status("adult-income").get("conditions", [])
        return next(((c["status"], c.get("message", "")) for c in conditions if c["type"] == kind), ("", ""))

    def scale(self, role: str, replicas: int) -> None:
        self.namespace.patch("persiajobs", "adult-income", {"spec": {role: {"replicas": replicas}}})

    def resize(self, role: str, replicas: int) -> None:
        """Returns when the operator says that it is done."""
        self.scale(role, replicas)
        is_done = ("True", f"{role}.replicas: {replicas}")
        self.await_(lambda: self.condition("Resized") == is_done, "resized")

    def finish(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The job's status, and the report of its rank, which has trained each batch that was sent, once."""
        (self.folder / "enough").touch()
        status = self.namespace.await_phase("adult-income", "Succeeded", TIMEOUT_S)
        report = json.loads((self.folder / "report.rank0.json").read_text())
        assert report["batch_ids"] == list(range(int((self.folder / "num_sent").read_text())))
        return status, report


@pytest.fixture
def toy_job(
    namespace: Namespace,
    run_pods: dict[str, LocalProcess],
    operator: OperatorProcess,
    toy: dict[str, Any],
    tmp_path: Path,
) -> ToyJob:
    return ToyJob(namespace, run_pods, toy, tmp_path / "toy")


def expect_no_loss(report: dict[str, Any], num_servers: int) -> None:
    """That no batch failed, and that so many servers have the rows, none of them twice."""
    counters = report["counters"]
    assert counters["batches_trained"] == len(report["batch_ids"])
    assert counters["batches_failed"] == counters["batches_released"] == 0
    assert len(report["sizes"]) == num_servers
    assert all(size > 0 for size in report["sizes"])
    assert sum(report["sizes"]) <= 250
