"""The benchmarks' cluster, of real processes, trains every batch with several under way at a time."""

from __future__ import annotations

import contextlib

import numpy as np

from benchmarks.cases import LEARNING_RATE, Case
from benchmarks.systems.persia_cluster import PersiaCluster
from benchmarks.workload import Workload, make_batches

STEPS = 7
GRADIENT = 1e-3  # of every element of the output, as the adapter sends it


def test_all_steps_are_done_when_it_has_finished() -> None:
    rows = (40, 60)
    workload = Workload(cardinalities=rows, batch_size=32, num_batches=1)
    case = Case("persia-cluster", "train", "sgd", 8, workload, rows, in_flight=2)
    (batch,) = make_batches(workload)
    with contextlib.closing(PersiaCluster(case)) as system:
        message = system.prepare(batch)
        before = system.pooled(message)
        for _ in range(STEPS):
            system.step(message)
        system.finish()
        after = system.pooled(message)
    ids = batch.values.reshape(batch.lengths.shape)  # one ID each
    counts = [np.unique(of_slot, return_inverse=True, return_counts=True)[1:] for of_slot in ids]
    samples = np.stack([count[place] for place, count in counts])  # by slot and sample: those with its ID
    expected = before - STEPS * LEARNING_RATE * GRADIENT * samples[:, :, None]
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-7)
