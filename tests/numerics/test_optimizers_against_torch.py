"""Embedding updates against torch.optim on a float64 table, through lookups and gradient returns.

The reference is dense: every row of the table is in every batch, as torch's rules also move rows whose
gradient is zero (momentum, weight decay, Adam's moments), while servers only move the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from persia._native import EmbeddedClient, SlotConfig, TrainConfig, encode_id_features

NUM_ROWS, DIM, BATCH, STEPS = 13, 6, 11, 25
PREFIX = 1 << 56


class RowwiseAdagrad(torch.optim.Optimizer):
    """One accumulator a row, of the mean square of its gradient; torch has none."""

    def __init__(self, params: Any, lr: float, initial_accumulator_value: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "init": initial_accumulator_value, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("sum", torch.full((len(weight), 1), group["init"], dtype=weight.dtype))
                gradient = weight.grad + group["weight_decay"] * weight
                state["sum"] += (gradient**2).mean(dim=1, keepdim=True)
                weight -= group["lr"] * gradient / (state["sum"].sqrt() + 1e-10)


class ReferenceLion(torch.optim.Optimizer):
    """Chen et al. (2023), algorithm 2, with decoupled weight decay; torch has none."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                m = self.state[weight].setdefault("m", torch.zeros_like(weight))
                direction = beta1 * m + (1 - beta1) * weight.grad
                weight -= group["lr"] * (direction.sign() + group["weight_decay"] * weight)
                m.mul_(beta2).add_(weight.grad, alpha=1 - beta2)


CASES: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({"optimizer": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd momentum decay": (
        {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "adagrad": (
        {"optimizer": "adagrad", "lr": 0.1, "initial_accumulator_value": 0.01, "weight_decay": 0.02},
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, initial_accumulator_value=0.01, weight_decay=0.02, eps=1e-10
        ),
    ),
    "rowwise adagrad": (
        {"optimizer": "rowwise_adagrad", "lr": 0.1, "initial_accumulator_value": 0.01, "weight_decay": 0.02},
        lambda p: RowwiseAdagrad(p, lr=0.1, initial_accumulator_value=0.01, weight_decay=0.02),
    ),
    "adam": (
        {"optimizer": "adam", "lr": 0.01, "beta1": 0.8, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01},
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), eps=1e-8, weight_decay=0.01),
    ),
    "adamw": (
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    "adamax": ({"optimizer": "adamax", "lr": 0.01}, lambda p: torch.optim.Adamax(p, lr=0.01)),
    "rmsprop": (
        {"optimizer": "rmsprop", "lr": 0.01, "alpha": 0.9, "momentum": 0.5, "weight_decay": 0.01},
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.5, weight_decay=0.01),
    ),
    "adadelta": ({"optimizer": "adadelta", "lr": 1.0}, lambda p: torch.optim.Adadelta(p, lr=1.0)),
    "lion": (
        {"optimizer": "lion", "lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1},
        lambda p: ReferenceLion(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    ),
    "sgd nesterov": (
        {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
}


def samples(rng: np.random.Generator) -> list[NDArray[np.uint64]]:
    """Samples with duplicates and one empty sample, which together have every row."""
    ids = np.concatenate([rng.permutation(NUM_ROWS), rng.integers(0, NUM_ROWS, 20)]).astype(np.uint64)
    cuts = np.sort(rng.integers(0, len(ids) + 1, BATCH - 2))
    return [np.empty(0, np.uint64), *np.split(ids, cuts)]


def encode(data: list[NDArray[np.uint64]]) -> bytes:
    offsets = np.cumsum([0] + [len(sample) for sample in data]).astype(np.uint32)
    return encode_id_features(len(data), [("slot", np.concatenate(data), offsets)])


def client(
    train: dict[str, Any], *, sqrt_scaling: bool = False, own: dict[str, object] | None = None
) -> EmbeddedClient:
    slot = SlotConfig(name="slot", dim=DIM, sqrt_scaling=sqrt_scaling, index_prefix=PREFIX, rows=own)
    made = EmbeddedClient(slots=[slot], feature_index_prefix_bit=8)
    made.configure(TrainConfig(**{"weight_bound": 0.0, **train}))
    return made


def lookup_rows(embeddings: EmbeddedClient) -> NDArray[np.float32]:
    """The table, one row a sample."""
    single = encode([np.array([i], np.uint64) for i in range(NUM_ROWS)])
    return embeddings.lookup_direct(0, single, requires_grad=False).slots[0].rows.copy()


@pytest.mark.parametrize("whose", ["job", "slot"])
@pytest.mark.parametrize("sqrt_scaling", [False, True], ids=["sum", "sqrt"])
@pytest.mark.parametrize("case", list(CASES))
def test_rows_follow_torch(case: str, sqrt_scaling: bool, whose: str) -> None:
    train, make_optimizer = CASES[case]
    rng = np.random.default_rng(3)
    if whose == "slot":
        own = {"optimizer": {("name" if key == "optimizer" else key): train[key] for key in train}}
        embeddings = client({"optimizer": "adagrad", "lr": 9.0}, sqrt_scaling=sqrt_scaling, own=own)
    else:
        embeddings = client(train, sqrt_scaling=sqrt_scaling)
    start = rng.normal(size=(NUM_ROWS, DIM)).astype(np.float32)
    # Rows come into being by a lookup; then they get values that are easy to tell apart.
    first = embeddings.lookup_direct(0, encode(samples(rng)), requires_grad=True)
    embeddings.release(first.reference)
    embeddings.set_embeddings(np.arange(NUM_ROWS, dtype=np.uint64) + np.uint64(PREFIX), start)
    np.testing.assert_array_equal(lookup_rows(embeddings), start)

    table = torch.nn.Parameter(torch.from_numpy(start).double())
    optimizer = make_optimizer([table])
    for _ in range(STEPS):
        data = samples(rng)
        found = embeddings.lookup_direct(0, encode(data), requires_grad=True)
        expected = pooled(table, data, sqrt_scaling)
        np.testing.assert_allclose(found.slots[0].rows, expected.detach().numpy(), rtol=2e-4, atol=2e-5)

        gradient = rng.normal(size=(BATCH, DIM)).astype(np.float32)
        optimizer.zero_grad()
        expected.backward(torch.from_numpy(gradient).double())
        optimizer.step()
        report = embeddings.return_gradients(found.reference, [("slot", gradient)])
        assert (report.num_updated, report.num_missing) == (NUM_ROWS, 0)
    np.testing.assert_allclose(lookup_rows(embeddings), table.detach().numpy(), rtol=2e-4, atol=2e-5)


def pooled(table: torch.Tensor, data: list[NDArray[np.uint64]], sqrt_scaling: bool) -> torch.Tensor:
    offsets = torch.tensor(np.cumsum([0] + [len(sample) for sample in data])[:-1])
    ids = torch.from_numpy(np.concatenate(data).astype(np.int64))
    rows = torch.nn.functional.embedding_bag(ids, table, offsets, mode="sum")
    if not sqrt_scaling:
        return rows
    lengths = torch.tensor([max(len(sample), 1) for sample in data], dtype=table.dtype)
    return rows / lengths.sqrt().unsqueeze(1)


def test_loss_scale_is_divided_out() -> None:
    rng = np.random.default_rng(0)
    data, gradient = encode(samples(rng)), rng.normal(size=(BATCH, DIM)).astype(np.float32)
    tables = []
    for scale in (1.0, 1024.0):
        embeddings = client({"optimizer": "sgd", "lr": 0.1})
        found = embeddings.lookup_direct(0, data, requires_grad=True)
        embeddings.return_gradients(found.reference, [("slot", gradient * np.float32(scale))], scale=scale)
        tables.append(lookup_rows(embeddings))
    np.testing.assert_array_equal(tables[0], tables[1])


def test_weight_bound_holds_after_each_update() -> None:
    embeddings = client({"optimizer": "sgd", "lr": 1.0, "weight_bound": 0.5})
    data = encode([np.arange(NUM_ROWS, dtype=np.uint64)])
    found = embeddings.lookup_direct(0, data, requires_grad=True)
    embeddings.return_gradients(found.reference, [("slot", np.full((1, DIM), -3.0, np.float32))])
    np.testing.assert_array_equal(lookup_rows(embeddings), np.full((NUM_ROWS, DIM), 0.5, np.float32))
