"""A job of real processes that trains while strangers attack it."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.job_scripts import SCRIPTS, SLOTS
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER
from persia.testing import LocalCluster

_START_S = 300.0


class AttackedJob:
    """A running job, and how its training fares."""

    def __init__(self, cluster: LocalCluster, trainer: Any) -> None:
        self.cluster = cluster
        self._trainer = trainer
        directory = Directory(cluster.session)
        infos = {role: directory.probe(role, 0, _START_S) for role in self.roles}
        assert None not in infos.values(), infos
        # "host:port" by name, RPC and HTTP.
        self.server = infos[EMBEDDING_PARAMETER_SERVER].address  # type: ignore[union-attr]
        self.worker = infos[EMBEDDING_WORKER].address  # type: ignore[union-attr]
        self.broker = cluster.nats_url.rpartition("@")[2].rpartition("://")[2]
        self.status = {role: info.status_address for role, info in infos.items() if info is not None}
        self.incarnations = {role: info.incarnation for role, info in infos.items() if info is not None}

    roles = (EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER)

    @property
    def ports(self) -> dict[str, str]:
        """Every port that listens."""
        status = {f"status of {role}": address for role, address in self.status.items()}
        return {"server": self.server, "worker": self.worker, "broker": self.broker, **status}

    @property
    def step(self) -> int:
        """The last batch that was trained."""
        # Whole lines: a line of the log may follow a number without a space.
        numbers = re.findall(r"^batch (\d+)$", self._trainer.output[-1000:], re.MULTILINE)
        return int(numbers[-1]) if numbers else -1

    def require_alive(self) -> None:
        for process in self.cluster.processes:
            assert process.exit_code is None, f"{process.name} has ended:\n{process.output[-3000:]}"

    def require_training(self, batches: int = 5, timeout_s: float = 60.0) -> None:
        """Waits until the training is so many batches further; fails if it stops."""
        first, deadline = self.step, time.monotonic() + timeout_s
        while self.step < first + batches:
            self.require_alive()
            assert time.monotonic() < deadline, f"it stands at batch {self.step}, and stood at {first}"
            time.sleep(0.05)

    def memory(self) -> dict[str, int]:
        """Resident bytes of the servers, by name."""
        return {
            process.name: int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096
            for process in self.cluster.processes
            if process.name.startswith("embedding-")
        }


class Watch:
    """Looks at the training on a thread of its own: `still_s` is the longest time without a batch."""

    def __init__(self, job: AttackedJob) -> None:
        self._job = job
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.still_s = 0.0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        last, since = self._job.step, time.monotonic()
        while not self._over.wait(0.1):
            step, now = self._job.step, time.monotonic()
            self.still_s = max(self.still_s, now - since)
            if step != last:
                last, since = step, now


@contextlib.contextmanager
def attacked_job(output: Path, pace_s: float = 0.02) -> Iterator[AttackedJob]:
    """It has trained 20 batches. `pace_s`: between two of them."""
    env = {"PERSIA_DEADLINE_SEC": "300", "OMP_NUM_THREADS": "1"}
    with LocalCluster(embedding_config=SLOTS, env=env, start_deadline_s=_START_S) as cluster:
        cluster.start_loader(SCRIPTS / "loader.py", "--batches", "1000000")
        trainer = cluster.start_nn_worker(
            SCRIPTS / "train.py", "--output", str(output), "--pace", str(pace_s)
        )
        deadline = time.monotonic() + _START_S
        while "batch 20" not in trainer.output:
            assert trainer.exit_code is None, trainer.output
            assert time.monotonic() < deadline, trainer.output
            time.sleep(0.1)
        yield AttackedJob(cluster, trainer)
