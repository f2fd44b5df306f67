"""EmbeddingBagCollection against nn.EmbeddingBag and torch.optim in float64.

A batch moves only its own rows here, while torch's rules also move rows whose gradient is zero (momentum,
weight decay, Adam's moments). So each row is its own parameter in the reference, which torch steps exactly
when it is in the batch; where the dense rule is the same, whole tables are compared as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.config import SlotConfig, SlotsConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.lr_schedule import LRSchedule
from persia.embedding.optim import FTRL, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Lion, Optimizer, RMSprop
from persia.nn import EmbeddingBagCollection

# float32 against float64: sums of at most 48 products of order 1, over at most 40 steps.
RTOL, ATOL = 2e-4, 2e-5

MakeTorch = Callable[[Any], torch.optim.Optimizer]


class RowwiseAdagrad(torch.optim.Optimizer):
    """One accumulator a row, of the mean square of its gradient; torch has none."""

    def __init__(self, params: Any, lr: float, initial_accumulator_value: float) -> None:
        super().__init__(params, {"lr": lr, "init": initial_accumulator_value})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for row in group["params"]:
                if row.grad is None:
                    continue
                state = self.state[row]
                state.setdefault("sum", torch.tensor(group["init"], dtype=row.dtype))
                state["sum"] += (row.grad**2).mean()
                row -= group["lr"] * row.grad / (state["sum"].sqrt() + 1e-10)


class ReferenceFTRL(torch.optim.Optimizer):
    """McMahan et al. (2013), algorithm 1, with a sum of squares that does not begin at 0; torch has none."""

    def __init__(
        self, params: Any, lr: float, l1: float, l2: float, beta: float, initial_accumulator_value: float
    ) -> None:
        defaults = {"lr": lr, "l1": l1, "l2": l2, "beta": beta, "initial": initial_accumulator_value}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for row in group["params"]:
                if row.grad is None:
                    continue
                state = self.state[row]
                n = state.setdefault("n", torch.full_like(row, group["initial"]))
                z = state.setdefault("z", torch.zeros_like(row))
                sigma = ((n + row.grad**2).sqrt() - n.sqrt()) / group["lr"]
                z += row.grad - sigma * row
                n += row.grad**2
                scale = (group["beta"] + n.sqrt()) / group["lr"] + group["l2"]
                row.copy_(torch.where(z.abs() <= group["l1"], 0.0, -(z - z.sign() * group["l1"]) / scale))


class ReferenceLion(torch.optim.Optimizer):
    """Chen et al. (2023), algorithm 2, with decoupled weight decay; torch has none."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                m = self.state[weight].setdefault("m", torch.zeros_like(weight))
                direction = beta1 * m + (1 - beta1) * weight.grad
                weight -= group["lr"] * (direction.sign() + group["weight_decay"] * weight)
                m.mul_(beta2).add_(weight.grad, alpha=1 - beta2)


OPTIMIZERS: dict[str, tuple[Optimizer, MakeTorch]] = {
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd decay": (SGD(lr=0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    "momentum": (SGD(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "adagrad": (
        Adagrad(lr=0.1, initial_accumulator_value=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.01),
    ),
    "adagrad decay": (
        Adagrad(lr=0.1, initial_accumulator_value=0.01, weight_decay=0.02),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.01, weight_decay=0.02),
    ),
    "rowwise adagrad": (
        Adagrad(lr=0.1, initial_accumulator_value=0.01, vectorwise_shared=True),
        lambda p: RowwiseAdagrad(p, lr=0.1, initial_accumulator_value=0.01),
    ),
    "adam": (
        Adam(lr=0.01, betas=(0.8, 0.99)),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99)),
    ),
    "nesterov": (
        SGD(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    "dampened": (
        SGD(lr=0.05, momentum=0.9, dampening=0.3),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    ),
    "adamw": (
        AdamW(lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    "adamax": (
        Adamax(lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1),
    ),
    "rmsprop": (
        RMSprop(lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1),
    ),
    "rmsprop momentum": (
        RMSprop(lr=0.01, alpha=0.9, momentum=0.5),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.5),
    ),
    "rmsprop centered": (
        RMSprop(lr=0.01, alpha=0.9, eps=1e-2, momentum=0.5, centered=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-2, momentum=0.5, centered=True),
    ),
    "adadelta": (
        Adadelta(weight_decay=0.1),
        lambda p: torch.optim.Adadelta(p, lr=1.0, weight_decay=0.1),
    ),
    "ftrl": (
        FTRL(lr=0.1, l1=0.5, l2=0.1, beta=1.0, initial_accumulator_value=0.1),
        lambda p: ReferenceFTRL(p, lr=0.1, l1=0.5, l2=0.1, beta=1.0, initial_accumulator_value=0.1),
    ),
    "lion": (
        Lion(lr=0.01),
        lambda p: ReferenceLion(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.0),
    ),
    "lion decay": (
        Lion(lr=0.02, betas=(0.8, 0.95), weight_decay=0.1),
        lambda p: ReferenceLion(p, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1),
    ),
}


@dataclass
class Batch:
    """By slot and sample, the IDs; and the gradient [batch, sum of dims]."""

    ids: list[list[list[int]]]
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def values(self) -> torch.Tensor:
        return torch.tensor([i for slot in self.ids for bag in slot for i in bag], dtype=torch.int64)

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([[len(bag) for bag in slot] for slot in self.ids], dtype=torch.int64)


class Reference:
    """Rows [dim] in float64, each a parameter of its own; `groups` tells which rows a slot reads."""

    def __init__(self, slots: SlotsConfig, makers: Mapping[str, MakeTorch]) -> None:
        self.slots = slots
        self.groups = slots.group_numbers()
        self.makers = makers  # by slot
        self.rows: dict[tuple[int, int], torch.nn.Parameter] = {}
        self.optimizers: dict[tuple[int, int], torch.optim.Optimizer] = {}

    def learn(self, ebc: EmbeddingBagCollection, batch: Batch) -> None:
        """Takes the initial values of rows that are new, which inference reads one by one."""
        names = list(self.slots.slots_config)
        for slot, name in enumerate(names):
            key = self.groups[name]
            new = sorted({i for bag in batch.ids[slot] for i in bag if (key, i) not in self.rows})
            single = Batch(
                [[[i] for i in new] if s == slot else [[] for _ in new] for s in range(len(names))]
            )
            with torch.no_grad():
                found = slice_of(ebc(single.values, single.lengths), self.slots, slot)
            for i, row in zip(new, found, strict=True):
                parameter = torch.nn.Parameter(row.double())
                self.rows[key, i] = parameter
                self.optimizers[key, i] = self.makers[name]([parameter])

    def pool(self, batch: Batch) -> torch.Tensor:
        """float64 [batch, sum of dims], by nn.functional.embedding_bag over the stacked rows."""
        pooled = []
        for (name, slot), bags in zip(self.slots.slots_config.items(), batch.ids, strict=True):
            flat = [i for bag in bags for i in bag]
            key = self.groups[name]
            rows = [self.rows[key, i] for i in flat]
            table = torch.stack(rows) if rows else torch.zeros(1, slot.dim, dtype=torch.float64)
            offsets = torch.tensor(np.cumsum([0] + [len(bag) for bag in bags])[:-1])
            sums = torch.nn.functional.embedding_bag(torch.arange(len(flat)), table, offsets, mode="sum")
            if slot.sqrt_scaling:
                counts = torch.tensor([max(len(bag), 1) for bag in bags], dtype=torch.float64)
                sums = sums / counts.sqrt().unsqueeze(1)
            pooled.append(sums)
        return torch.cat(pooled, dim=1)

    def step(self, pooled: torch.Tensor, gradient: torch.Tensor) -> int:
        """Steps the rows that have a gradient; returns how many."""
        if pooled.requires_grad:
            pooled.backward(gradient.double())
        touched = [key for key, row in self.rows.items() if row.grad is not None]
        for key in touched:
            self.optimizers[key].step()
            self.rows[key].grad = None
        return len(touched)


def slice_of(pooled: torch.Tensor, slots: SlotsConfig, slot: int) -> torch.Tensor:
    dims = [config.dim for config in slots.slots_config.values()]
    return pooled[:, sum(dims[:slot]) : sum(dims[: slot + 1])]


def random_batch(rng: np.random.Generator, num_slots: int, size: int, *, single: bool) -> Batch:
    def bag() -> list[int]:
        count = 1 if single else int(rng.integers(0, 6))
        return [int(i) for i in rng.integers(-4, 5, count)]  # negative ones are large unsigned IDs

    return Batch([[bag() for _ in range(size)] for _ in range(num_slots)])


def follow(
    slots: SlotsConfig,
    optimizer: Optimizer,
    make_torch: MakeTorch,
    batches: list[Batch],
    *,
    num_threads: int,
    own: Mapping[str, MakeTorch] = {},
) -> None:
    """Trains both on the same batches and gradients; pooled rows and counts agree before every step."""
    ebc = EmbeddingBagCollection(
        slots,
        optimizer,
        embedding_config=EmbeddingConfig(emb_initialization=(-1.0, 1.0), weight_bound=0.0, seed=9),
        num_threads=num_threads,
    )
    reference = Reference(slots, {name: own.get(name, make_torch) for name in slots.slots_config})
    torch.manual_seed(0)
    num_updated = 0
    for batch in batches:
        pooled = ebc(batch.values, batch.lengths)
        reference.learn(ebc, batch)
        expected = reference.pool(batch)
        torch.testing.assert_close(pooled.double(), expected, rtol=RTOL, atol=ATOL)
        gradient = torch.randn(pooled.shape)
        pooled.backward(gradient)
        num_updated += reference.step(expected, gradient)
        assert ebc.stats().num_updated == num_updated
    assert ebc.stats().num_rows == len(reference.rows)


@pytest.mark.parametrize("single", [True, False], ids=["single", "multi"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_follows_torch(name: str, single: bool) -> None:
    slots = SlotsConfig(
        slots_config={
            "narrow": SlotConfig(dim=3),
            "shared": SlotConfig(dim=16),
            "wide": SlotConfig(dim=70, sqrt_scaling=True),
            "shared too": SlotConfig(dim=16, sqrt_scaling=True),
        },
        feature_groups={"both": ("shared", "shared too")},
    )
    rng = np.random.default_rng(4)
    batches = [random_batch(rng, 4, 8, single=single) for _ in range(40)]
    optimizer, make_torch = OPTIMIZERS[name]
    follow(slots, optimizer, make_torch, batches, num_threads=2)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    dims=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    scaled=st.lists(st.booleans(), min_size=5, max_size=5),
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(list(OPTIMIZERS)),
)
def test_any_shape_follows_torch(
    dims: list[int], scaled: list[bool], sizes: list[int], num_threads: int, seed: int, name: str
) -> None:
    slots = SlotsConfig(
        slots_config={f"slot{i}": SlotConfig(dim=dim, sqrt_scaling=scaled[i]) for i, dim in enumerate(dims)}
    )
    rng = np.random.default_rng(seed)
    batches = [random_batch(rng, len(dims), size, single=bool(rng.integers(2))) for size in sizes]
    optimizer, make_torch = OPTIMIZERS[name]
    follow(slots, optimizer, make_torch, batches, num_threads=num_threads)


@pytest.mark.parametrize("single", [True, False], ids=["single", "multi"])
def test_each_slot_follows_its_own_optimizer(single: bool) -> None:
    """All of one dim, so that nothing but the feature group tells their rows apart."""
    slots = SlotsConfig(
        slots_config={"common": SlotConfig(dim=7)}
        | {name: SlotConfig(dim=7, optimizer=optimizer) for name, (optimizer, _) in OPTIMIZERS.items()}
    )
    rng = np.random.default_rng(11)
    batches = [random_batch(rng, len(slots.slots_config), 6, single=single) for _ in range(25)]
    own = {name: make for name, (_, make) in OPTIMIZERS.items()}
    follow(slots, *OPTIMIZERS["sgd"], batches, num_threads=2, own=own)


MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

SCHEDULES: dict[str, MakeScheduler] = {
    "constant": lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=0.3, total_iters=5),
    "warm-up": lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.01, total_iters=10),
    "polynomial to 0": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, total_iters=15, power=2.0),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=6),
    "lambda from 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(step / 4, 1.0)),
}


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_a_schedule_of_torch_steers_the_rate(name: str, schedule: str) -> None:
    """Also that of a slot with an optimizer of its own, in proportion; no state is lost on the way."""
    optimizer, make_torch = OPTIMIZERS[name]
    ebc = EmbeddingBagCollection(
        {"common": 5, "own": SlotConfig(dim=5, optimizer=Adam(lr=0.02))},
        optimizer,
        embedding_config=EmbeddingConfig(emb_initialization=(-1.0, 1.0), weight_bound=0.0),
        num_threads=1,
    )
    ids, lengths = torch.tensor([3, 3]), torch.tensor([[1], [1]])
    start = ebc(ids, lengths).detach().double()
    rows = [torch.nn.Parameter(start[:, :5].clone()), torch.nn.Parameter(start[:, 5:].clone())]
    references = [make_torch(rows[:1]), torch.optim.Adam(rows[1:], lr=0.02)]
    schedulers = [SCHEDULES[schedule](reference) for reference in references]
    steered = LRSchedule(optimizer, SCHEDULES[schedule])
    generator = torch.Generator().manual_seed(2)
    for _ in range(25):
        assert optimizer.lr == pytest.approx(references[0].param_groups[0]["lr"])
        gradient = torch.randn((1, 10), generator=generator)
        ebc(ids, lengths).backward(gradient)
        rows[0].grad, rows[1].grad = gradient[:, :5].double(), gradient[:, 5:].double()
        for reference, scheduler in zip(references, schedulers, strict=True):
            reference.step()
            scheduler.step()
        steered.step()
    with torch.no_grad():
        found = ebc(ids, lengths).double()
    torch.testing.assert_close(found, torch.cat(rows, dim=1).detach(), rtol=RTOL, atol=ATOL)
    optimizer.set_lr(references[0].defaults["lr"])  # OPTIMIZERS are shared


DENSE_EQUALS_SPARSE = ("sgd", "adagrad")


@pytest.mark.parametrize("name", DENSE_EQUALS_SPARSE)
def test_a_table_follows_embedding_bag(name: str) -> None:
    """These rules leave rows without a gradient alone, so a plain nn.EmbeddingBag can stand beside them."""
    optimizer, make_torch = OPTIMIZERS[name]
    ebc = EmbeddingBagCollection(
        {"slot": 12}, optimizer, embedding_config=EmbeddingConfig(weight_bound=0.0), num_threads=1
    )
    table = torch.nn.EmbeddingBag(30, 12, mode="sum", dtype=torch.float64)
    ebc.set_embeddings("slot", torch.arange(30), table.weight.detach().float())
    dense = make_torch(table.parameters())
    generator = torch.Generator().manual_seed(8)
    for _ in range(30):
        lengths = torch.randint(0, 5, (1, 16), generator=generator)
        values = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[0].cumsum(0)[:-1]])
        found, expected = ebc(values, lengths), table(values, offsets)
        torch.testing.assert_close(found.double(), expected, rtol=RTOL, atol=ATOL)
        dense.zero_grad()
        expected.pow(2).sum().backward()
        found.pow(2).sum().backward()
        dense.step()
    with torch.no_grad():
        rows = ebc(torch.arange(30), torch.ones(1, 30, dtype=torch.int64))
    torch.testing.assert_close(rows.double(), table.weight.detach(), rtol=RTOL, atol=ATOL)
