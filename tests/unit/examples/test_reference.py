"""The training in plain PyTorch: delay 0 is ordinary training, and a delay is one of the embeddings alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dataset import Split
from recipes import PUBLISHED, Recipe
from reference import Reference

NUM_CATEGORIES = [3] * 8
STEPS = 4


def make_split() -> Split:
    rng = np.random.default_rng(0)
    rows = STEPS * PUBLISHED.batch_size
    return Split(
        ids=rng.integers(0, 3, (rows, 8)).astype(np.uint64),
        dense=rng.standard_normal((rows, 5), dtype=np.float32),
        labels=(rng.random((rows, 1)) < 0.5).astype(np.float32),
    )


def trained(delay: int) -> Reference:
    reference = Reference(NUM_CATEGORIES, seed=0, delay=delay)
    reference.train(make_split())
    return reference


def ordinary_training() -> list[torch.Tensor]:
    """The same without any version of a table but the present one."""
    reference, split = Reference(NUM_CATEGORIES, seed=0), make_split()
    model, tables = reference._model.train(), list(reference._tables.parameters())
    for batch in split.training_batches(PUBLISHED):
        ids = torch.from_numpy(batch.ids.astype("int64"))
        rows = [functional.embedding(ids[:, column], table) for column, table in enumerate(tables)]
        output = model([torch.from_numpy(batch.dense)], rows)
        for optimizer in (reference._dense_optimizer, reference._embedding_optimizer):
            optimizer.zero_grad()
        nn.BCELoss()(output, torch.from_numpy(batch.labels)).backward()
        for optimizer in (reference._dense_optimizer, reference._embedding_optimizer):
            optimizer.step()
    return tables


def test_delay_zero_is_ordinary_training() -> None:
    found = trained(delay=0)._tables.parameters()
    assert all(torch.equal(a, b) for a, b in zip(found, ordinary_training(), strict=True))


def test_every_delay_trains_and_trains_differently() -> None:
    tables = [next(trained(delay)._tables.parameters()) for delay in (0, 1, 2)]
    assert not torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[1], tables[2])


def test_a_delay_longer_than_the_run_looks_up_initial_rows_only() -> None:
    """Then one more step of delay changes nothing."""
    pairs = zip(trained(STEPS)._tables.parameters(), trained(STEPS + 1)._tables.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_recipe_sets_batches_passes_and_rates() -> None:
    recipe = Recipe(batch_size=2 * PUBLISHED.batch_size, num_passes=2, dense_rate=0.0, embedding_rate=0.0)
    reference = Reference(NUM_CATEGORIES, seed=0, recipe=recipe)
    before = [weight.detach().clone() for weight in reference._tables.parameters()]
    reference.train(make_split())
    norm = reference._model.dense_norm
    assert norm.num_batches_tracked == STEPS // 2 * 2
    assert all(torch.equal(a, b) for a, b in zip(before, reference._tables.parameters(), strict=True))
