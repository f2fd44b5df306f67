"""`persia-launcher ray submit` runs whole jobs on a Ray cluster, with nodes that are processes here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from persia.utils import dump_yaml
from persia.waiting import Attempts
from tests.documented import blocks
from tests.integration.conftest import EMBEDDING_CONFIG, JOBS

pytest.importorskip("ray.data", reason="needs Ray: pip install 'persia[ray]'")
pytestmark = pytest.mark.timeout(900)  # actors start slowly on a busy machine

DEADLINE_S = 400.0
SECRET = os.environ["PERSIA_JOB_SECRET"]


class RayCluster:
    """A head without processors, and nodes with some."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        node = {"include_dashboard": False, "object_store_memory": 80 << 20}
        self._cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
        self.address: str = self._cluster.address

    def add_node(self, **resources: int) -> Any:
        node = self._cluster.add_node(num_cpus=4, object_store_memory=80 << 20, resources=resources)
        self._cluster.wait_for_nodes(timeout=DEADLINE_S)
        return node

    def remove_node(self, node: Any) -> None:
        """As a power failure would."""
        self._cluster.remove_node(node, allow_graceful=False)

    def logs(self) -> str:
        """What Ray has written to its files."""
        folder = Path(self._cluster.head_node.get_logs_dir_path())
        return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PERSIA_JOB_SECRET")  # nodes have it from the job
        cluster = RayCluster()
        try:
            cluster.add_node(some=2)
            cluster.add_node(some=2)
            yield cluster
        finally:
            cluster.close()


class Submitted:
    """A job on the cluster. Leaving it kills the command."""

    def __init__(
        self, cluster: RayCluster, folder: Path, script: str | Path, arguments: Sequence[str]
    ) -> None:
        self._log = folder / "job.log"
        command = (sys.executable, "-m", "persia.launcher", "ray", "submit", "--address", cluster.address)
        fixed = ("--nn-worker", str(script), "--embedding-config", "slots.yml")
        with open(self._log, "w") as log:
            self.driver = subprocess.Popen(
                [*command, *fixed, *arguments],
                cwd=folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "PERSIA_JOB_SECRET": SECRET},
            )

    def __enter__(self) -> Submitted:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.driver.kill()
        self.driver.wait()

    @property
    def output(self) -> str:
        return self._log.read_text()

    def await_output(self, pattern: str) -> str:
        """The first group of `pattern` in the output."""
        for _ in Attempts(DEADLINE_S, pause_s=0.2):
            if found := re.search(pattern, self.output):
                return found[found.re.groups]
            assert self.driver.poll() is None, self.output
        pytest.fail(f"no {pattern!r} in:\n{self.output}")

    def await_end(self) -> int:
        try:
            return self.driver.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(self.output)

    def processes(self) -> dict[int, list[str]]:
        """Processes of the job, by their numbers, with their command lines."""
        url = re.findall(r"PERSIA_NATS_URL=(\S+)", self.output)[-1]
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"PERSIA_NATS_URL={url}\0".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
            except OSError:  # it has ended
                continue
        return found

    def pid_of(self, *words: str) -> int:
        """Of the process whose command line has all `words`, once there is one."""
        for _ in Attempts(DEADLINE_S, pause_s=0.2):
            found = [pid for pid, command in self.processes().items() if set(words) <= set(command)]
            if len(found) == 1:
                return found[0]
        pytest.fail(f"no process {words}: {self.processes()}")

    def await_nothing_left(self) -> None:
        for _ in Attempts(DEADLINE_S, pause_s=0.2):
            if not self.processes():
                return
        pytest.fail(str(self.processes()))


@pytest.fixture
def submit(cluster: RayCluster, tmp_path: Path) -> Iterator[Callable[..., Submitted]]:
    started: list[Submitted] = []

    def start(script: str | Path, *arguments: str, slots: Any = EMBEDDING_CONFIG) -> Submitted:
        dump_yaml(slots, str(tmp_path / "slots.yml"))
        if isinstance(script, str):
            (tmp_path / "script.py").write_text(script)
        path = "script.py" if isinstance(script, str) else script
        started.append(Submitted(cluster, tmp_path, path, arguments))
        return started[-1]

    yield start
    for job in started:
        with job:
            pass


def parent_of(pid: int) -> int:
    return int(re.search(r"^PPid:\t(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1])  # type: ignore[index]


def test_a_whole_job_trains_and_its_embedding_worker_is_started_again(cluster, submit, tmp_path):
    loader = (
        "--data-loader",
        str(JOBS / "loader.py"),
        "--data-loaders",
        "2",
        "--loader-args",
        "--batches 20",
    )
    sizes = ("--parameter-servers", "2", "--embedding-workers", "2", "--nproc-per-node", "2")
    needs = ("--resources", "ranks", "CPU=1", "--resources", "embedding-workers", "CPU=0.5 memory=1e7")
    gate = ("--gate", "gate", "--gate-at", "6")
    words = (*loader, *sizes, *needs, "--max-restarts", "1", "--", "--output", "report", *gate)
    job = submit(JOBS / "train.py", *words)
    job.await_output(r"nn-worker .*batch \d+")
    os.kill(job.pid_of("embedding-worker", "--replica-index=1"), signal.SIGKILL)
    job.await_output("embedding-worker-1 was ended by SIGKILL; it is started again in 0 s")
    job.await_output(r"(?s)it is started again.*embedding-worker 1 of 2 at \S+ \(pid \d+\) is ready")
    commands = str(job.processes())
    (tmp_path / "gate").touch()
    assert job.await_end() == 0, job.output
    reports = [json.loads((tmp_path / f"report.rank{rank}.json").read_text()) for rank in (0, 1)]
    assert sorted(reports[0]["batch_ids"] + reports[1]["batch_ids"]) == list(range(40))
    assert "restarts: 1 of 1 (embedding-worker-1 1)" in job.output
    secret = SECRET.rpartition(".")[2]
    for text in (commands, job.output, cluster.logs()):
        assert secret not in text
    job.await_nothing_left()


def test_the_first_failure_is_the_exit_code(submit):
    job = submit("import os, sys\nsys.exit(int(os.environ['CODE']))\n", "--env", "CODE=7")
    assert job.await_end() == 7, job.output
    assert "nn-worker ended with exit code 7; the job was stopped" in job.output
    job.await_nothing_left()


STAY = """
import os, signal, subprocess, sys, time
deaf = '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(1e4)
'''
subprocess.Popen([sys.executable, "-c", deaf])
time.sleep(1e4)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_command(submit, number):
    job = submit(STAY)
    job.await_output("nn-worker .* deaf")
    job.await_output("embedding-worker 0 of 1 .* is ready")
    job.driver.send_signal(number)
    assert job.await_end() == (130 if number == signal.SIGINT else -signal.SIGKILL)
    job.await_nothing_left()


def test_ctrl_c_ends_a_job_that_waits_for_room(submit):
    job = submit("", "--resources", "ranks", "GPU=3")
    job.await_output("waiting for the Ray cluster .* GPU: 3 needed, 0 free of 0")
    job.driver.send_signal(signal.SIGINT)
    assert job.await_end() == 130


STAY_ONCE = """
import os, time
print("start", os.environ["PERSIA_RESTARTS"])
os.environ["PERSIA_RESTARTS"] == "1" or time.sleep(1e4)
"""


def test_a_place_of_the_broker_that_is_lost_restarts_the_job(submit):
    job = submit(STAY_ONCE, "--max-restarts", "1")
    job.await_output("start 0")
    os.kill(parent_of(job.pid_of("-c")), signal.SIGKILL)
    assert job.await_end() == 0, job.output
    assert "nats was ended by SIGKILL; every process is started again" in job.output
    assert "start 1" in job.output


def test_a_process_that_waits_for_a_place_is_started_again_with_the_others(cluster, submit):
    node = cluster.add_node(rare=1)
    needs = ["--resources", "embedding-workers", "rare=1"]
    for role in ("parameter-servers", "ranks"):
        needs += ["--resources", role, "some=1"]
    job = submit(f"import os\nprint('pid', os.getpid())\n{STAY_ONCE}", *needs, "--max-restarts", "2")
    pid = int(job.await_output(r"pid (\d+)"))
    job.await_output("embedding-worker 0 of 1 .* is ready")
    cluster.remove_node(node)
    job.await_output("waiting for the Ray cluster to have a place for embedding-worker-0")
    os.kill(pid, signal.SIGKILL)
    assert job.await_end() == 0, job.output
    assert "start 1" in job.output


def test_places_of_a_dead_node_move_to_another(cluster, submit, tmp_path):
    """Two groups of ranks, whose embedding worker is on a node that dies."""
    nodes = [cluster.add_node(spot=1) for _ in range(2)]
    loader = ("--data-loader", str(JOBS / "loader.py"), "--loader-args", "--batches 20")
    needs = ["--nodes", "2", "--resources", "embedding-workers", "spot=1"]
    for role in ("parameter-servers", "data-loaders", "ranks"):
        needs += ["--resources", role, "some=1"]
    gate = ("--gate", "gate", "--gate-at", "3")
    job = submit(JOBS / "train.py", *loader, *needs, "--max-restarts", "1", "--", "--output", "report", *gate)
    job.await_output(r"nn-worker-1 .*batch \d+")
    actor = parent_of(job.pid_of("embedding-worker", "--replica-index=0"))
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    cluster.remove_node(nodes[raylets.index(parent_of(actor))])
    job.await_output("embedding-worker-0 was ended by SIGKILL; it is started again in 0 s")
    job.await_output(r"(?s)it is started again.*embedding-worker 0 of 1 at \S+ \(pid \d+\) is ready")
    (tmp_path / "gate").touch()
    assert job.await_end() == 0, job.output
    reports = [json.loads((tmp_path / f"report.rank{rank}.json").read_text()) for rank in (0, 1)]
    assert sorted(reports[0]["batch_ids"] + reports[1]["batch_ids"]) == list(range(20))


TRAIN_CLICKS = """
import json
from pathlib import Path

import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.optim import SGD


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 1)

    def forward(self, dense, embeddings):
        ages.extend(dense[0].flatten().tolist())
        return self.linear(torch.cat(dense + embeddings, dim=1))


model = Model()
ages = []
with TrainCtx(
    model=model,
    embedding_optimizer=SGD(lr=0.1),
    dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    mixed_precision=False,
    device_id=None,
) as ctx:
    for batch in DataLoader(StreamingDataset(buffer_size=4)):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
Path("ages.json").write_text(json.dumps(ages))
"""


def test_a_data_loader_reads_parquet_with_ray_data(submit, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = list(range(5000))
    columns = {"user": numbers, "age": numbers, "clicked": [number % 2 for number in numbers]}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet", row_group_size=512)
    (block,) = (block for block in blocks("criteo.md") if "ray.data.read_parquet" in block.text)
    (tmp_path / "loader.py").write_text(block.text)
    slots = {"slots_config": {"user": {"dim": 8}}}
    job = submit(
        TRAIN_CLICKS,
        "--data-loader",
        "loader.py",
        *("--loader-args", str(tmp_path / "clicks.parquet")),
        slots=slots,
    )
    assert job.await_end() == 0, job.output
    assert sorted(json.loads((tmp_path / "ages.json").read_text())) == numbers
