"""`persia-launcher preprocess` on Spark and Ray with two workers writes the bytes of the local engine."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine_clusters import ray_cluster, spark_cluster
from benchmarks.raw_clicks import write_clicks

pytest.importorskip("pyarrow")

TIMEOUT_S = 600.0  # a Java process starts slowly on a busy machine
OPTIONS = ("--num-numerical", "2", "--num-categorical", "3", "--block-mib", "0.01", "--frequency-limit", "3")
Cluster = tuple[str, str]  # engine and address


@pytest.fixture(scope="module", params=["ray", "spark", "local[2]"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of one processor each; `local[2]`: Spark in one process."""
    pytest.importorskip("ray.data" if request.param == "ray" else "pyspark", reason="not installed")
    if request.param != "ray" and shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    if request.param == "ray":
        with ray_cluster(tmp_path_factory.mktemp("ray")) as address:
            yield "ray", address
    elif request.param == "spark":
        folder = tmp_path_factory.mktemp("spark")
        with spark_cluster(folder) as address:
            yield "spark", address
        # Each worker has a folder of every application that it ran.
        assert all(list((folder / f"worker_{index}").glob("app-*")) for index in range(2))
    else:
        yield "spark", "local[2]"


def run(folder: Path, output: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "persia.launcher", "preprocess", "day_0", "day_1", "--test", "day_2")
    words = (*command, "--output", output, *OPTIONS, *options)
    environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"}
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )


def preprocess(folder: Path, output: str, *options: str) -> dict[str, str]:
    """Runs the command; returns the digest of each file."""
    done = run(folder, output, *options)
    assert done.returncode == 0, done.stderr
    assert "train: 3999 rows" in done.stdout
    assert "skipped 1 bad records" in done.stderr
    assert "day_1:1001" in done.stderr + done.stdout
    files = (path for path in (folder / output).rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder / output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.mark.timeout(3600)
def test_each_engine_writes_the_same_bytes(cluster: Cluster, tmp_path: Path) -> None:
    for number in range(3):
        write_clicks(tmp_path / f"day_{number}", 2000, seed=number, numerical=2, categorical=3)
    lines = (tmp_path / "day_1").read_text().splitlines(keepends=True)
    lines[1000] = "no record\n"
    (tmp_path / "day_1").write_text("".join(lines))
    flags = ("--engine", cluster[0], "--address", cluster[1], "--partitions", "5")
    for own in ((), ("--contiguous",)):
        local = preprocess(tmp_path, f"local{len(own)}", "--workers", "1", *own)
        assert preprocess(tmp_path, f"{cluster[0]}{len(own)}", *flags, *own) == local
        assert any(name.startswith("test/") for name in local)
    failed = run(tmp_path, "none", *flags, "--max-bad-records", "0")
    assert failed.returncode == 1
    assert "more than 0 bad records" in failed.stderr
    assert "day_1:1001: it has 1 fields" in failed.stderr
