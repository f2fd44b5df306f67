"""Every kind of slot under every optimizer, for N batches, against torch in float64.

Each row is a parameter of its own for torch, and has no gradient in batches without it: torch's rules are
then those of rows that are left alone, step counts included.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from persia import _native
from persia.config import HashStackConfig, SlotConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RMSprop
from persia.pipeline.batch import embedding_tensors, leaf_gradients

from .test_pooling_against_torch import (
    NUM_IDS,
    PREFIX,
    Case,
    expected_pooled,
    expected_raw,
    id_features,
    read_rows,
    slots_of,
)

STEPS, BATCH, DIM = 12, 7, 5
STACK = HashStackConfig(hash_stack_rounds=2, embedding_size=5)

Reference = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Optimizer, Reference]] = {
    "sgd": (
        SGD(lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "adagrad": (
        Adagrad(lr=0.1, initial_accumulator_value=0.01, weight_decay=0.02),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.01, weight_decay=0.02),
    ),
    "adam": (
        Adam(lr=0.01, betas=(0.8, 0.99), weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.01),
    ),
    "adamw": (
        AdamW(lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    "adamax": (Adamax(lr=0.01), lambda p: torch.optim.Adamax(p, lr=0.01)),
    "rmsprop": (
        RMSprop(lr=0.01, alpha=0.9, momentum=0.5),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.5),
    ),
    "adadelta": (Adadelta(lr=1.0), lambda p: torch.optim.Adadelta(p, lr=1.0)),
}
RAW = {"embedding_summation": False, "sample_fixed_size": 3}
KINDS = {
    "sum": SlotConfig(dim=DIM),
    "mean": SlotConfig(dim=DIM, mean_scaling=True),
    "sqrt": SlotConfig(dim=DIM, sqrt_scaling=True),
    "raw": SlotConfig(dim=DIM, **RAW),
    "raw sqrt": SlotConfig(dim=DIM, sqrt_scaling=True, **RAW),
    "stacked sum": SlotConfig(dim=DIM, hash_stack_config=STACK),
    "stacked mean": SlotConfig(dim=DIM, hash_stack_config=STACK, mean_scaling=True),
    "stacked sqrt": SlotConfig(dim=DIM, hash_stack_config=STACK, sqrt_scaling=True),
    "stacked raw": SlotConfig(dim=DIM, hash_stack_config=STACK, **RAW),
}


def random_case(slot: SlotConfig, rng: np.random.Generator) -> Case:
    """Duplicates within and between samples, empty samples, and IDs that the batch does not have."""
    present = rng.choice(NUM_IDS, size=8, replace=False)
    samples = [[int(i) for i in rng.choice(present, size=rng.integers(0, 5))] for _ in range(BATCH)]
    weights = None
    if slot.embedding_summation:  # raw slots take none
        weights = [[float(w) for w in rng.uniform(0.5, 2.0, len(sample))] for sample in samples]
    return Case(slot, samples, weights, int(rng.integers(2**32)))


def rows_in(case: Case) -> set[int]:
    kept = None if case.slot.embedding_summation else case.slot.sample_fixed_size
    return {row for sample in case.samples for i in sample[:kept] for row in case.rows_of(i)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_follow_torch(kind: str, optimizer: str) -> None:
    slot, rng = KINDS[kind], np.random.default_rng(11)
    ours, make_reference = OPTIMIZERS[optimizer]
    case = random_case(slot, rng)
    client = _native.EmbeddedClient(
        slots=slots_of(case).native_slots(), feature_index_prefix_bit=PREFIX, num_internal_shards=2
    )
    config = EmbeddingConfig(emb_initialization=(-1.0, 1.0), weight_bound=0.0, seed=5)
    client.configure(ours.train_config(config))
    start = read_rows(client, case, insert=True)
    rows = [torch.nn.Parameter(torch.tensor(row, dtype=torch.float64)) for row in start]
    reference = make_reference(rows)
    expected_embeddings = expected_pooled if slot.embedding_summation else expected_raw
    for _ in range(STEPS):
        result = client.lookup_direct(0, id_features(case.feature()), requires_grad=True)
        made = embedding_tensors(result, requires_grad=True)
        expected = expected_embeddings(case, torch.stack(rows))
        (found,) = made.tensors
        torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=2e-4, atol=2e-5)

        gradient = case.gradient(*found.shape)
        found.backward(gradient)
        report = client.return_gradients(result.reference, leaf_gradients(made.leaves))
        reference.zero_grad()
        expected.backward(gradient.double())
        present = rows_in(case)
        assert (report.num_updated, report.num_missing) == (len(present), 0)
        for number, row in enumerate(rows):
            if number not in present:
                row.grad = None
        reference.step()
        case = random_case(slot, rng)
    after = torch.stack([row.detach() for row in rows])
    torch.testing.assert_close(torch.tensor(read_rows(client, case)).double(), after, rtol=2e-4, atol=2e-5)
    assert (after - torch.tensor(start).double()).abs().max() > 0.01  # it has moved
