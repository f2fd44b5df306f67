"""Engines of `preprocess`: processes of this machine, Apache Spark, Ray Data."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from persia.data.preprocessing import run_tasks
from persia.errors import UnavailableError
from persia.optional import needs


class LocalEngine:
    """Runs tasks in processes of this machine.

    Args:
        workers: processes; None: one for each core that this process may use.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers or len(os.sched_getaffinity(0))

    def __call__(self, tasks: list[str]) -> Iterator[str]:
        """The results of tasks, as they finish. Raises UnavailableError if a process dies."""
        if self._workers == 1:
            for task in tasks:
                yield from _run_list([task])
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self._workers, mp_context=context) as pool:
            futures = [pool.submit(_run_list, [task]) for task in tasks]
            try:
                for future in as_completed(futures):
                    yield from future.result()
            except BrokenProcessPool as error:
                raise UnavailableError(
                    "a process of the local engine died, perhaps for lack of memory: repeat the command, "
                    "which resumes; use fewer --workers"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)


class SparkEngine:
    """Runs tasks with Apache Spark's `mapInArrow`. Its workers need persia and the same paths.

    Args:
        address: URL of a master, as `spark://HOST:7077`; None: what the environment says, or this machine.
    """

    def __init__(self, address: str | None = None) -> None:
        with needs("the engine spark needs pyspark", "'persia[spark]'"):
            from pyspark.sql import SparkSession
        # The Python of this process: another one may lack persia.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        self._builder: Any = SparkSession.builder.appName("persia-preprocess")
        if address is not None:
            self._builder = self._builder.master(address)

    def __call__(self, tasks: list[str]) -> Iterator[str]:
        """The results of tasks, when all have finished."""
        session = self._builder.getOrCreate()
        try:
            # One task a partition: Spark balances partitions, and repeats one that fails.
            rows = session.sparkContext.parallelize([(task,) for task in tasks], len(tasks))
            frame = session.createDataFrame(rows, "task string").mapInArrow(run_tasks, "result string")
            results = [row.result for row in frame.collect()]
        finally:
            session.stop()  # else the cluster keeps its workers for this application
        yield from results


class RayEngine:
    """Runs tasks with Ray Data. Its workers need persia and the same paths.

    Args:
        address: of a cluster; None: what the environment says, or a cluster of this machine alone.
    """

    def __init__(self, address: str | None = None) -> None:
        with needs("the engine ray needs ray[data]", "'persia[ray]'"):
            import ray
            import ray.data
        self._ray: Any = ray
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        # There is one operator. Else half of the processors are kept for others, and workers take turns.
        context.op_resource_reservation_enabled = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)

    def __call__(self, tasks: list[str]) -> Iterator[str]:
        """The results of tasks, as they finish."""
        rows = self._ray.data.from_items([{"task": task} for task in tasks], override_num_blocks=len(tasks))
        for row in rows.map_batches(_run_table, batch_format="pyarrow", batch_size=None).iter_rows():
            yield row["result"]


def _run_list(tasks: list[str]) -> list[str]:
    import pyarrow as pa

    batch = pa.RecordBatch.from_pydict({"task": tasks})
    return [text for result in run_tasks([batch]) for text in result.column(0).to_pylist()]


def _run_table(table: Any) -> Iterator[Any]:
    import pyarrow as pa

    for batch in run_tasks(table.to_batches()):
        yield pa.Table.from_batches([batch])
