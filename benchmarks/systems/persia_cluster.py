"""Our cluster: one embedding worker and two parameter servers, real processes behind RPC on this machine.

The processes inherit this one's cores. A step is the lookup of a batch and the return of its gradients. With
one batch in flight it is what an NN worker waits for without prefetching; with more they overlap, as in
training with a bound on staleness.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import persia
from benchmarks.cases import Case
from benchmarks.systems.base import System, UnavailableError
from benchmarks.systems.persia_optimizers import sparse_optimizer
from benchmarks.workload import Batch, resident_batches
from persia import _native
from persia.embedding import EmbeddingConfig
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.testing import LocalCluster

__all__ = ["PersiaCluster"]

_NUM_SERVERS = 2
_START_DEADLINE_S = 60.0


class PersiaCluster(System):
    """Filled like the embedded side."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if case.work != "train":
            raise UnavailableError(f"the cluster is measured for 'train' only, not {case.work!r}")
        self._slots = [f"f{slot}" for slot in range(case.workload.num_slots)]
        self._gradient = np.full((case.workload.batch_size, case.dim), 1e-3, np.float32)
        self._stack = ExitStack()
        self._threads = self._stack.enter_context(ThreadPoolExecutor(case.in_flight))
        self._room = threading.Semaphore(case.in_flight)
        self._begun: list[Future[None]] = []
        cluster = self._stack.enter_context(
            LocalCluster(
                embedding_config={
                    "feature_index_prefix_bit": 8,
                    "slots_config": {slot: {"dim": case.dim} for slot in self._slots},
                },
                parameter_servers=_NUM_SERVERS,
                embedding_workers=1,
            )
        )
        (worker,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, _START_DEADLINE_S)
        cluster.join()
        self._client = _native.RemoteClient(1)
        self._client.set_worker(0, worker.address)
        self._client.configure(sparse_optimizer(case.optimizer).train_config(EmbeddingConfig()))
        for values, lengths in resident_batches(case.table_rows, case.workload, case.fill):
            self._insert(values, lengths)

    def prepare(self, batch: Batch) -> bytes:
        return self._encode(batch.values, batch.lengths)

    @property
    def step(self) -> Callable[[Any], object]:
        return self._train if self.case.in_flight == 1 else self._begin

    def finish(self) -> None:
        for begun in self._begun:
            begun.result()
        self._begun.clear()

    def versions(self) -> dict[str, str]:
        return {"persia": persia.__version__, "torch": torch.__version__}

    def counters(self) -> dict[str, float]:
        return {"rows": sum(self._client.sizes())}

    def pooled(self, message: bytes) -> NDArray[np.float32]:
        """What a lookup finds, by slot, sample and element; it changes nothing."""
        result = self._client.lookup_direct(0, message, requires_grad=False)
        return np.stack([np.array(slot.rows) for slot in result.slots])

    def close(self) -> None:
        self._stack.close()

    def _begin(self, message: bytes) -> None:
        """Trains on a thread; waits while as many batches as are allowed are in flight."""
        self._room.acquire()
        begun = self._threads.submit(self._train, message)
        begun.add_done_callback(lambda _: self._room.release())
        self._begun.append(begun)

    def _train(self, message: bytes) -> None:
        result = self._client.lookup_direct(0, message, requires_grad=True)
        gradients = [(slot.name, self._gradient) for slot in result.slots]
        self._client.return_gradients(result.reference, gradients)

    def _insert(self, values: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """A lookup in training mode whose batch is given up, so that nothing is updated."""
        message = self._encode(values, lengths)
        result = self._client.lookup_direct(0, message, requires_grad=True)
        self._client.release(result.reference)

    def _encode(self, values: NDArray[np.int64], lengths: NDArray[np.int64]) -> bytes:
        """The message that a loader would send to the embedding worker."""
        num_slots, batch_size = lengths.shape
        offsets = np.zeros((num_slots, batch_size + 1), np.uint32)
        np.cumsum(lengths, axis=1, out=offsets[:, 1:])
        ids = np.split(values.view(np.uint64), lengths.sum(axis=1).cumsum()[:-1])
        return _native.encode_id_features(batch_size, list(zip(self._slots, ids, offsets, strict=True)))
