"""Clusters of Spark and Ray on this machine for preprocessing: each worker has one core, pinned if asked.

A worker's processes inherit its affinity, so that a second worker adds a core and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from persia.utils import find_free_port

_WAIT_S = 600.0  # a Java process starts slowly on a busy machine


@contextmanager
def ray_cluster(folder: Path, num_workers: int = 2, *, pinned: bool = False) -> Iterator[str]:
    """A cluster of Ray nodes with one processor each; yields its address. `folder` is not used."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with _on_core(0, pinned):
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for index in range(1, num_workers):
            with _on_core(index, pinned):
                cluster.add_node(**node)
        cluster.wait_for_nodes(timeout=_WAIT_S)
        yield cluster.address
    finally:
        cluster.shutdown()


@contextmanager
def spark_cluster(folder: Path, num_workers: int = 2, *, pinned: bool = False) -> Iterator[str]:
    """A standalone master and workers with one core each; yields its URL. Logs are in `folder`."""
    import pyspark

    home = Path(pyspark.__file__).parent
    master = f"spark://127.0.0.1:{(port := find_free_port())}"
    common = ("--host", "127.0.0.1", "--webui-port", "0")
    commands: list[tuple[str, ...]] = [("master.Master", *common, "--port", str(port))]
    for index in range(num_workers):
        limits = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"worker_{index}"))
        commands.append(("worker.Worker", *common, *limits, master))
    with ExitStack() as stack:
        log = stack.enter_context(open(folder / "cluster.log", "w"))
        for index, (name, *words) in enumerate(commands, start=-1):
            with _on_core(index, pinned and index >= 0):
                # It becomes the Java process, so that terminating it is enough.
                started = subprocess.Popen(
                    [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *words],
                    env=os.environ | {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"},
                    stdout=log,
                    stderr=log,
                )
            stack.callback(started.wait, 60)
            stack.callback(started.kill)
        yield master


CLUSTERS: dict[str, Callable[..., AbstractContextManager[str]]] = {
    "ray": ray_cluster,
    "spark": spark_cluster,
}


@contextmanager
def _on_core(index: int, pinned: bool) -> Iterator[None]:
    """Processes that are started within have the `index`-th core of this process, if `pinned`."""
    before = os.sched_getaffinity(0)
    if pinned and index >= len(before):
        sys.exit(f"{index + 1} pinned workers need as many cores, this process has {len(before)}")
    try:
        if pinned:
            os.sched_setaffinity(0, {sorted(before)[index]})
        yield
    finally:
        os.sched_setaffinity(0, before)
