"""Every adapter does the work that its rows are named after; systems that are not installed are skipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.cases import LEARNING_RATE, Case
from benchmarks.systems import UnavailableError, load_system
from benchmarks.systems.torch_system import TorchSystem
from benchmarks.workload import Batch, Workload, make_batches, row_numbers

DIM = 8
TABLE_ROWS = (10, 50)
# Of the peers' imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
ON_TORCH = ("persia", "persia-arrays", "torch-tables", "torch-fused", "fbgemm", "torchrec")


def make_system(name: str, optimizer: str, workload: Workload, work: str = "train") -> TorchSystem:
    case = Case(name, work, optimizer, DIM, workload, TABLE_ROWS)  # type: ignore[arg-type]
    try:
        system = load_system(name)(case)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert isinstance(system, TorchSystem)
    return system


def workload(mean_ids: float | None) -> Workload:
    return Workload(cardinalities=TABLE_ROWS, batch_size=32, num_batches=1, mean_ids=mean_ids)


def keys_of(name: str, batch: Batch) -> NDArray[np.int64]:
    """A number per ID, equal where the system uses the same row."""
    slots = np.repeat(np.arange(len(TABLE_ROWS)), batch.lengths.sum(axis=1))
    rows = batch.values if name == "persia" else row_numbers(batch, TABLE_ROWS) + 1000 * slots
    keys: NDArray[np.int64] = np.unique(rows, return_inverse=True)[1]
    return keys


def pooled_change_under_sgd(name: str, batch: Batch, gradient: NDArray[np.float64]) -> NDArray[np.float64]:
    """How one SGD step changes the pooled output [batch, num_slots * DIM]; initial values do not matter."""
    num_slots, batch_size = batch.lengths.shape
    keys = keys_of(name, batch)
    bags = np.repeat(np.arange(num_slots * batch_size), batch.lengths.ravel())
    slot_major = gradient.reshape(batch_size, num_slots, DIM).swapaxes(0, 1).reshape(-1, DIM)
    row_change = np.zeros((keys.max() + 1, DIM))
    np.add.at(row_change, keys, -LEARNING_RATE * slot_major[bags])
    pooled = np.zeros_like(slot_major)
    np.add.at(pooled, bags, row_change[keys])
    sample_major: NDArray[np.float64] = pooled.reshape(num_slots, batch_size, DIM).swapaxes(0, 1)
    return sample_major.reshape(batch_size, -1)


@pytest.mark.parametrize("mean_ids", [None, 3.0])
@pytest.mark.parametrize("name", ON_TORCH)
def test_a_step_applies_the_summed_gradients(name: str, mean_ids: float | None) -> None:
    (batch,) = make_batches(workload(mean_ids))
    system = make_system(name, "sgd", workload(mean_ids))
    prepared = system.prepare(batch)
    with torch.no_grad():
        before = system.pooled(prepared.ids).double().numpy()
    system.step(prepared)
    with torch.no_grad():
        after = system.pooled(prepared.ids).double().numpy()
    expected = pooled_change_under_sgd(name, batch, system.gradient.double().numpy())
    assert before.shape == (32, 2 * DIM)
    np.testing.assert_allclose(after - before, expected, rtol=1e-3, atol=5e-8)
    assert np.abs(expected).max() > 1e-5


@pytest.mark.parametrize("name", ON_TORCH)
def test_a_lookup_changes_nothing(name: str) -> None:
    (batch,) = make_batches(workload(None))
    system = make_system(name, "adagrad", workload(None), "lookup")
    prepared = system.prepare(batch)
    with torch.no_grad():
        before = system.pooled(prepared.ids).clone()
        system.step(prepared)
        assert torch.equal(system.pooled(prepared.ids), before)
    assert before.abs().max() > 0


@pytest.mark.parametrize("name", ON_TORCH)
def test_the_small_model_learns(name: str) -> None:
    (batch,) = make_batches(workload(None))
    system = make_system(name, "adagrad", workload(None), "mlp")
    prepared = system.prepare(batch)
    losses = [float(system.train_mlp(prepared)) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_an_optimizer_that_is_lacking_is_named() -> None:
    case = Case("torch-fused", "train", "rowwise_adagrad", DIM, workload(None), TABLE_ROWS)
    with pytest.raises(UnavailableError, match="rowwise_adagrad"):
        load_system("torch-fused")(case)
