"""Rows of slots with rules of their own, through real workers and servers, beside torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from persia import _native
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER
from persia.testing import LocalCluster

from .watching import Pages

DIM, NUM_IDS, STEPS, TIMEOUT_S = 4, 40, 12, 60.0
JOB_LR = 0.05
MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

RULES: dict[str, tuple[dict[str, Any], MakeOptimizer]] = {
    "of_job": ({}, lambda p: torch.optim.Adagrad(p, JOB_LR, initial_accumulator_value=0.01)),
    "sgd": (
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adam": ({"optimizer": {"name": "adam", "lr": 0.01}}, lambda p: torch.optim.Adam(p, 0.01)),
    "adamw": ({"optimizer": {"name": "adamw", "lr": 0.01}}, lambda p: torch.optim.AdamW(p, 0.01)),
    "adamax": ({"optimizer": {"name": "adamax", "lr": 0.01}}, lambda p: torch.optim.Adamax(p, 0.01)),
    "rmsprop": ({"optimizer": {"name": "rmsprop", "lr": 0.01}}, lambda p: torch.optim.RMSprop(p, 0.01)),
    "adadelta": ({"optimizer": {"name": "adadelta", "lr": 1.0}}, lambda p: torch.optim.Adadelta(p, 1.0)),
}
INITIAL = {"zeros": 0.0, "ones": 1.0, "constant": 0.25}


def slots() -> dict[str, Any]:
    made = {name: {"dim": DIM, **rules} for name, (rules, _) in RULES.items()}
    for name in INITIAL:
        value = {"value": INITIAL[name]} if name == "constant" else {}
        made[name] = {"dim": DIM, "initializer": {"name": name, **value}}
    made["xavier"] = {"dim": DIM, "initializer": {"name": "xavier_uniform"}}
    made["bounded"] = {"dim": DIM, "optimizer": {"name": "sgd", "lr": 1.0}, "weight_bound": 0.125}
    made["half"] = {"dim": DIM, "admit_probability": 0.5}
    made["third"] = {"dim": DIM, "admit_after": 3}
    made["few"] = {"dim": DIM, "capacity": 8}
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = {"slots_config": slots()}
    server = {"num_hashmap_internal_shards": 2}
    with LocalCluster(
        embedding_config=config,
        global_config={"embedding_parameter_server_config": server},
        parameter_servers=2,
        embedding_workers=2,
    ) as started:
        yield started


class Job:
    """Batches of one slot, each by one of the workers in turn."""

    def __init__(self, cluster: LocalCluster) -> None:
        workers = Directory(cluster.session).wait_for(EMBEDDING_WORKER, TIMEOUT_S)
        cluster.join()
        self.client = _native.RemoteClient(len(workers))
        for worker in workers:
            self.client.set_worker(worker.index, worker.address)
        embedding_config = EmbeddingConfig(emb_initialization=(-0.1, 0.1), weight_bound=0.0, seed=3)
        self.client.configure(Adagrad(lr=JOB_LR).train_config(embedding_config), replace=True)
        self._num_lookups = 0

    def lookup(self, slot: str, ids: NDArray[np.uint64], *, train: bool = True) -> Any:
        offsets = np.arange(len(ids) + 1, dtype=np.uint32)
        message = _native.encode_id_features(len(ids), [(slot, ids, offsets)])
        self._num_lookups += 1
        return self.client.lookup_direct(
            self._num_lookups % 2, message, requires_grad=train, timeout_s=TIMEOUT_S
        )

    def rows(self, slot: str, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.lookup(slot, ids, train=False).slots[0].rows.copy()
        return found

    def train(self, slot: str, ids: NDArray[np.uint64], gradient: NDArray[np.float32]) -> Any:
        result = self.lookup(slot, ids)
        return self.client.return_gradients(result.reference, [(slot, gradient)], timeout_s=TIMEOUT_S)


@pytest.fixture
def job(cluster: LocalCluster) -> Job:
    return Job(cluster)


IDS = np.arange(NUM_IDS, dtype=np.uint64)


@pytest.mark.parametrize("slot", list(RULES))
def test_a_slots_optimizer_is_torchs(job: Job, slot: str) -> None:
    """Every row is in every batch, where torch's rule and that of rows by themselves are the same."""
    rng = np.random.default_rng(5)
    job.lookup(slot, IDS)
    weight = torch.tensor(job.rows(slot, IDS), dtype=torch.float64, requires_grad=True)
    optimizer = RULES[slot][1]([weight])
    for _ in range(STEPS):
        gradient = rng.normal(size=(NUM_IDS, DIM)).astype(np.float32)
        job.train(slot, IDS, gradient)
        weight.grad = torch.from_numpy(gradient).double()
        optimizer.step()
    np.testing.assert_allclose(job.rows(slot, IDS), weight.detach().numpy(), rtol=2e-4, atol=2e-6)


def test_a_slots_rows_begin_as_it_says(job: Job) -> None:
    for slot, value in INITIAL.items():
        assert (job.lookup(slot, IDS).slots[0].rows == value).all()
    values = job.lookup("xavier", IDS).slots[0].rows
    bound = np.sqrt(3 / DIM)
    assert 0.9 * bound < np.abs(values).max() <= bound


def test_a_slots_weight_bound_holds(job: Job) -> None:
    job.train("bounded", IDS, np.ones((NUM_IDS, DIM), np.float32))
    assert (job.rows("bounded", IDS) == -0.125).all()


def test_a_slots_admission_holds_on_all_servers(job: Job) -> None:
    ids = np.arange(2000, dtype=np.uint64)
    first = job.lookup("half", ids).slots[0].rows.copy()
    admitted = first.any(axis=1)
    assert 0.45 < admitted.mean() < 0.55
    gradient = np.ones((len(ids), DIM), np.float32)
    report = job.train("half", ids, gradient)
    assert (report.num_updated, report.num_missing) == (admitted.sum(), (~admitted).sum())
    assert not job.rows("half", ids)[~admitted].any()
    for sighting in range(1, 4):
        rows = job.lookup("third", IDS).slots[0].rows
        assert bool(rows.any()) == (sighting == 3)


def test_a_slots_capacity_is_each_servers(job: Job, cluster: LocalCluster) -> None:
    job.lookup("of_job", IDS)
    before = job.rows("of_job", IDS)
    for first in range(0, 400, 10):
        job.lookup("few", np.arange(first, first + 10, dtype=np.uint64))
    held = job.rows("few", np.arange(400, dtype=np.uint64)).any(axis=1)
    assert held.sum() == 2 * 8
    assert held[-40:].sum() >= 14, "the newest of each internal shard"
    np.testing.assert_array_equal(job.rows("of_job", IDS), before)
    evicted = Pages(cluster, 4).sum(EMBEDDING_PARAMETER_SERVER, "persia_evicted_rows")
    assert evicted == 400 - 16
