"""The operator's task for a job, with a cluster that answers when the test says so."""

from __future__ import annotations

import asyncio
import threading
from typing import cast
from unittest import mock

import kopf
import pytest
from persia_k8s.builders.manifest import Images
from persia_k8s.cluster import Cluster
from persia_k8s.operator import Operator


class SlowCluster:
    """Says that the job is gone, once it is let go."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.let_go = threading.Event()

    def job(self, namespace: str, name: str) -> None:
        self.asked.set()
        assert self.let_go.wait(120)


def test_a_task_that_is_cancelled_ends_after_its_look() -> None:
    """Else the look of a deleted job could write its status to a new job of the same name."""
    cluster = SlowCluster()
    operator = Operator(cast(Cluster, cluster), mock.create_autospec(Images, instance=True), [])

    async def cancelled_during_a_look() -> None:
        stopped = cast(kopf.DaemonStopped, mock.MagicMock(__bool__=lambda _: False))
        task = asyncio.create_task(operator._look_after("space", "job", cast(kopf.Body, {}), stopped))
        await asyncio.to_thread(cluster.asked.wait, 30)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.2)
        assert not done, "the task ended before its look"
        cluster.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)

    try:
        asyncio.run(cancelled_during_a_look())
    finally:
        cluster.let_go.set()
