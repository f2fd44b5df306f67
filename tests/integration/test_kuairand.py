"""The KuaiRand example: one script, in a process and on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kuairand_log import NUM_ROWS, write_log

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kuairand"
TIMEOUT_S = 240
CLUSTER = (
    *("-m", "persia.launcher", "local", "--nn-worker", str(EXAMPLE / "train.py")),
    *("--data-loader", str(EXAMPLE / "data_loader.py")),
    *("--embedding-config", str(EXAMPLE / "embedding_config.yml")),
    *("--parameter-servers", "2", "--embedding-workers", "1"),
)
SETTINGS = (
    "SEED",
    "REPRODUCIBLE",
    "CONSISTENCY",
    "EMBEDDING_STALENESS",
    "PERSIA_NATS_URL",
    "PERSIA_EMBEDDED",
)
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KuaiRand-Pure where KUAIRAND_DIR names it, else a generated log of the same columns."""
    if os.environ.get("KUAIRAND_DIR"):
        return Path(os.environ["KUAIRAND_DIR"])
    folder = tmp_path_factory.mktemp("log")
    write_log(folder / "val.parquet", seed=1)
    write_log(folder / "test.parquet", seed=2)
    watched = [list(range(user % 3, user % 20, 3)) for user in range(250)]  # the last 50 users have none
    histories = {"user_id": np.arange(250), "watch_seq": pa.array(watched, pa.list_(pa.int64()))}
    pq.write_table(pa.table(histories), folder / "user_sequences.parquet")
    return folder


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Run:
    """`run(name, *command, **settings)` runs Python with `command`; returns the summary."""

    def start(name: str, *command: str, **settings: str) -> dict[str, Any]:
        inherited = {key: value for key, value in os.environ.items() if key not in SETTINGS}
        own = {
            "KUAIRAND_DIR": str(data),
            "KUAIRAND_ROWS": str(NUM_ROWS),
            "KUAIRAND_OUTPUT": str(tmp_path / name),
            "OMP_NUM_THREADS": "1",
        }
        finished = subprocess.run(
            [sys.executable, *command],
            env={**inherited, **own, **settings},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        summary: dict[str, Any] = json.loads((tmp_path / name / "summary.json").read_text())
        return summary

    return start


def test_embedded_and_cluster_agree_to_the_last_bit(run: Run) -> None:
    embedded = run("embedded", str(EXAMPLE / "train.py"), REPRODUCIBLE="1")
    cluster = run("cluster", *CLUSTER, REPRODUCIBLE="1")
    for name in ("test_auc", "predictions_sha256", "num_embeddings"):
        assert embedded[name] == cluster[name]
    assert embedded["test_auc"] > 0.58
    other = run("other", str(EXAMPLE / "train.py"), REPRODUCIBLE="1", SEED="1")
    assert other["predictions_sha256"] != embedded["predictions_sha256"]


def test_two_ranks_come_close_to_one_and_to_plain_torch(run: Run) -> None:
    one = run("one", str(EXAMPLE / "train.py"))
    two = run("two", *CLUSTER, "--nproc-per-node", "2")
    plain = run("plain", str(EXAMPLE / "plain.py"))
    assert two["test_auc"] == pytest.approx(
        one["test_auc"], abs=0.02
    )  # seeds differ by 0.01 in so short a run
    assert one["test_auc"] == pytest.approx(plain["test_auc"], abs=0.02)


def test_missing_data_is_named(tmp_path: Path) -> None:
    inherited = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    for folder, message in (("", "KUAIRAND_DIR is not set"), (str(tmp_path), "must be a folder with")):
        finished = subprocess.run(
            [sys.executable, str(EXAMPLE / "plain.py")],
            env={**inherited, "KUAIRAND_DIR": folder},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert finished.returncode == 1
        assert message in finished.stderr
