"""How several ranks find each other, under torchrun or each by itself, and how one that fails ends all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from persia.testing import LocalCluster

JOBS = Path(__file__).parent / "jobs"
CONFIG = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 8}, "items": {"dim": 8}}}
NUM_BATCHES = 16
TIMEOUT_S = 120.0

Run = Callable[..., tuple[list[int], str]]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(embedding_config=CONFIG, env={"OMP_NUM_THREADS": "1"}) as cluster:
        cluster.start_loader(JOBS / "loader.py", "--batches", str(NUM_BATCHES))
        yield cluster


def run(cluster: LocalCluster, commands: list[list[str]], **env: str) -> tuple[list[int], str]:
    """Runs processes side by side; returns their exit codes and all they have written."""
    processes = [
        subprocess.Popen(
            command,
            env={
                **cluster.env,
                **env,
                **({"RANK": str(i), "LOCAL_RANK": str(i)} if len(commands) > 1 else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, command in enumerate(commands)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(outputs)


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]


def reports(output: Path) -> list[dict[str, Any]]:
    return [json.loads(output.with_name(f"{output.name}.rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", ["torchrun", "tcp", "file"])
def test_ranks_meet_and_train_as_one(cluster: LocalCluster, tmp_path: Path, way: str) -> None:
    output = tmp_path / "report"
    script = [str(JOBS / "train.py"), "--output", str(output)]
    if way == "file":
        script += ["--sync-file", str(tmp_path / "meeting")]
    if way == "torchrun":
        codes, text = run(cluster, [torchrun(*script)])
    else:  # each rank by itself; over TCP, rank 0's address is discovered
        codes, text = run(cluster, [[sys.executable, *script]] * 2, WORLD_SIZE="2")
    assert set(codes) == {0}, text
    both = reports(output)
    assert sorted(both[0]["batch_ids"] + both[1]["batch_ids"]) == list(range(NUM_BATCHES))
    assert both[0]["digest"] == both[1]["digest"]


def test_failing_rank_ends_the_job_with_its_error(cluster: LocalCluster, tmp_path: Path) -> None:
    script = [str(JOBS / "train.py"), "--output", str(tmp_path / "report")]
    fail = ["--fail-after", "3", "--fail-rank", "1"]
    launcher = [sys.executable, "-m", "persia.launcher", "nn-worker", "--nproc-per-node", "2"]
    codes, text = run(cluster, [[*launcher, *script, *fail]])
    assert codes == [1], text
    assert "ValueError: boom after 3 batches" in text
    assert "persia-launcher: rank 1 ended with exit code 1; its error is above" in text
