"""`persia-launcher preprocess --engine ray` on two nodes writes the bytes of the local engine."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.raw_clicks import write_clicks

pytest.importorskip("pyarrow")
pytest.importorskip("ray.data", reason="needs Ray: pip install 'persia[ray]'")

TIMEOUT_S = 280.0
OPTIONS = ("--num-numerical", "2", "--num-categorical", "3", "--block-mib", "0.01", "--frequency-limit", "3")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster with two nodes of one processor each."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes(timeout=TIMEOUT_S)
        yield cluster.address
    finally:
        cluster.shutdown()


def preprocess(folder: Path, output: str, *options: str) -> dict[str, str]:
    """Runs the command; returns the digest of each file."""
    command = (sys.executable, "-m", "persia.launcher", "preprocess", "day_0", "day_1", "--test", "day_2")
    words = (*command, "--output", output, *OPTIONS, *options)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "train: 3999 rows" in done.stdout
    assert "skipped 1 bad records" in done.stderr
    assert "day_1:1001" in done.stderr + done.stdout
    files = (path for path in (folder / output).rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder / output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.mark.parametrize("contiguous", [(), ("--contiguous",)], ids=["hashed", "contiguous"])
def test_ray_writes_the_same_bytes(contiguous: tuple[str, ...], address: str, tmp_path: Path) -> None:
    for number in range(3):
        write_clicks(tmp_path / f"day_{number}", 2000, seed=number, numerical=2, categorical=3)
    lines = (tmp_path / "day_1").read_text().splitlines(keepends=True)
    lines[1000] = "no record\n"
    (tmp_path / "day_1").write_text("".join(lines))
    local = preprocess(tmp_path, "local", "--workers", "1", *contiguous)
    ray = preprocess(
        tmp_path, "ray", "--engine", "ray", "--address", address, "--partitions", "5", *contiguous
    )
    assert ray == local
    assert any(name.startswith("test/") for name in ray)
