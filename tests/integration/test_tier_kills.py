"""Servers over pools, worker and trainer are killed at random moments of a training that dumps in place.

After each round the job must go back to one checkpoint, not older than any that was said to count; its rows,
optimizer state and dense part are compared bit by bit with those of a training in memory that nobody killed.

    PERSIA_CRASH_ROUNDS=200 pytest -n 0 -s tests/integration/test_tier_kills.py

PERSIA_CRASH_SEED repeats what was killed and when, as far as processes are the same twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from persia.checkpoint.checkpoints import DumpRequest, Source
from persia.testing import LocalCluster

from .conftest import EMBEDDING_CONFIG, JOBS
from .test_tiers import KINDS, checkpoints_of, global_config, rows_of, status_of

SERVERS = ["embedding-parameter-server-0", "embedding-parameter-server-1"]
WORKER, TRAINER = "embedding-worker-0", "trainer"
DEADLINE_S = 240.0
LONGEST_PAUSE_S = 0.25


class Trainer:
    """jobs/killed.py and the child in it that trains."""

    def __init__(self, env: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._child = 0
        self._process = subprocess.Popen(
            [sys.executable, str(JOBS / "killed.py")],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.await_line("ready")

    def start(self, root: Path) -> None:
        assert self._process.stdin is not None
        self.lines.clear()
        self._process.stdin.write(f"{root}\n")
        self._child = int(self.await_line("child").split()[1])

    def kill(self) -> None:
        """Nothing where it does not run."""
        if self._child:
            if "ended" not in self.lines:  # else its number may be another process's
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._child, signal.SIGKILL)
            self.await_line("ended")
            self._child = 0

    @property
    def counted(self) -> list[int]:
        """Steps of checkpoints that it was told to count, since it was started."""
        with self._changed:
            return [int(line.split()[1]) for line in self.lines if line.startswith("counts ")]

    def close(self) -> None:
        self.kill()
        self._process.kill()
        self._reader.join()
        with self._process:  # closes its pipes
            pass

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.strip())
                self._changed.notify_all()

    def await_line(self, what: str) -> str:
        """The first that begins like that."""

        def found() -> str | None:
            return next((line for line in self.lines if line.split()[:1] == [what]), None)

        with self._changed:
            line = self._changed.wait_for(found, DEADLINE_S)
        assert line is not None, f"the trainer has not said {what!r}: {self.lines}"
        return line


class Model:
    """The same training in memory, in this process, up to a step that rises."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(JOBS))
            for name in ("killed", "loader", "train"):  # an example's, which another test imported
                patch.delitem(sys.modules, name, raising=False)
            import killed

        self._train_step = killed.train_step
        self._ctx = self._stack.enter_context(killed.make_ctx(slots=EMBEDDING_CONFIG))

    def checkpoint_at(self, step: int) -> Path:
        while self._ctx.step < step:
            self._train_step(self._ctx)
        assert self._ctx.step == step
        path = self._folder / f"model-{step}"
        if not path.exists():
            self._ctx.dump_checkpoint(path)
        return path

    def close(self) -> None:
        self._stack.close()


class Round:
    """What is killed, and when: a function of the seed and the round's number."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = random.Random(f"{seed}, {number}")
        names = [*SERVERS, WORKER, TRAINER]
        self.victims = self._random.sample(names, self._random.choice([1, 1, 2, 3]))
        # What the trainer has reached before, however busy the machine is; None: it has just been started.
        self.awaited = self._random.choice(["began", "counts", "counts", None])
        self.recoveries_killed = self._random.choice([0, 0, 0, 1, 2])

    def pause(self, longest_s: float = LONGEST_PAUSE_S) -> None:
        time.sleep(self._random.uniform(0, longest_s))

    def __str__(self) -> str:
        order = " then ".join(name.removeprefix("embedding-") for name in self.victims)
        return f"{order}, {self.recoveries_killed} recoveries"


class Job:
    """Two servers over pools, a worker, a trainer."""

    def __init__(self, cluster: LocalCluster, trainer: Trainer, root: Path) -> None:
        self.cluster, self.trainer, self.root = cluster, trainer, root

    def kill(self, round_: Round) -> None:
        for name in round_.victims:
            if name == TRAINER:
                self.trainer.kill()
            else:
                self.cluster.kill(name)
            round_.pause(0.02)

    def recover(self, round_: Round) -> None:
        """Servers start again, some to be killed while they recover; in the end all have.

        First trainer and worker end: servers that are back take their updates, and their dumps would count,
        with rows of several moments, as those of a training that went on without a start of the whole.
        """
        self.trainer.kill()
        self.cluster.kill(WORKER)
        for _ in range(round_.recoveries_killed):
            started = [self._start(name) for name in SERVERS]
            round_.pause()
            for process in started:
                process.send_signal(signal.SIGKILL)
                process.wait(120)
        self._start_and_wait([*SERVERS, WORKER])

    def _start_and_wait(self, names: list[str]) -> None:
        for name, process in [(name, self._start(name)) for name in names]:
            role, _, index = name.rpartition("-")
            self.cluster._await_ready(role, pid=process.pid, index=int(index))

    def _start(self, name: str) -> Any:
        """Kills the one that runs."""
        self.cluster.kill(name)
        spec = next(process.spec for process in self.cluster.processes if process.name == name)
        return self.cluster._supervisor.start(spec)

    def check(self, model: Model, folder: Path) -> int:
        """The step of the checkpoint that all have gone back to."""
        steps = {status_of(self.cluster, index)["step"] for index in range(len(SERVERS))}
        if not (self.root / "latest").exists():
            assert steps == {None}
            return 0
        source = Source(self.root)
        step = source.manifest.step
        assert step is not None
        assert steps == {step}
        checkpoints = checkpoints_of(self.cluster)
        checkpoints.load(source)
        checkpoints.dump(DumpRequest(folder))
        expected = model.checkpoint_at(step)
        assert rows_of(folder) == rows_of(expected)
        for name in ("dense.pt", "opt.pt"):
            found, wanted = (torch.load(_dense(place, name)) for place in (self.root, expected))
            assert as_bytes(found) == as_bytes(wanted), name
        return step


def as_bytes(value: Any) -> Any:
    """Of whatever is in it, tensors as what they are to the last bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: as_bytes(item) for key, item in value.items()}
    return [as_bytes(item) for item in value] if isinstance(value, list | tuple) else value


def _dense(place: Path, name: str) -> Any:
    import io

    return io.BytesIO(Source(place).dense(name))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    made = Model(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_killed_the_job_goes_back_to_the_last_checkpoint(
    kind: str, model: Model, local_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    num_rounds = int(os.environ.get("PERSIA_CRASH_ROUNDS", "2"))
    seed = int(os.environ.get("PERSIA_CRASH_SEED", "1"))
    print(f"PERSIA_CRASH_SEED={seed}")
    (tmp_path / "pools").mkdir()
    cluster = local_cluster(
        embedding_config=EMBEDDING_CONFIG,
        global_config=global_config(tmp_path / "pools", kind),
        parameter_servers=len(SERVERS),
        env={"OMP_NUM_THREADS": "1", "PERSIA_DEADLINE_SEC": "60"},
    )
    trainer = Trainer(cluster.env)
    job, last, killed = Job(cluster, trainer, tmp_path / "root"), 0, Counter[str]()
    try:
        for number in range(num_rounds):
            round_ = Round(seed, number)
            print(f"{kind}, round {number}: {round_}, from step {last}", flush=True)
            trainer.start(job.root)
            if round_.awaited is not None:
                trainer.await_line(round_.awaited)
            round_.pause()
            job.kill(round_)
            job.recover(round_)
            step = job.check(model, tmp_path / "files")
            assert step >= max([last, *trainer.counted]), "a checkpoint that counted is lost"
            last = step
            killed.update(round_.victims)
    finally:
        trainer.close()
    print(f"{kind}: {num_rounds} rounds, {last} steps, killed {dict(killed)}")
    assert last > num_rounds / 4, "it was always killed before it did anything"
