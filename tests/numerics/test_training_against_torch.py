"""A whole training context against the same model with nn.EmbeddingBag tables, in float64.

Pooled slots with and without sqrt_scaling and a raw slot, with duplicates and empty samples, trained through
forward and backward: lookup, autograd tensors, gradient return and update together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia._native import EmbeddedClient, SlotConfig
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.pipeline.backend import EmbeddingBackend

NUM_IDS, DIM, FIXED, BATCH, STEPS = 9, 4, 3, 8, 12
SLOTS = ("pooled", "scaled", "raw")


def make_client() -> EmbeddedClient:
    slots = [
        SlotConfig(name="pooled", dim=DIM, index_prefix=1 << 56, group=1),
        SlotConfig(name="scaled", dim=DIM, index_prefix=2 << 56, group=2, sqrt_scaling=True),
        SlotConfig(
            name="raw",
            dim=DIM,
            index_prefix=3 << 56,
            group=3,
            embedding_summation=False,
            sample_fixed_size=FIXED,
        ),
    ]
    return EmbeddedClient(slots=slots, feature_index_prefix_bit=8)


Steps = list[dict[str, Any]]


def make_steps(seed: int) -> Steps:
    rng = np.random.default_rng(seed)

    def ids() -> list[NDArray[np.uint64]]:
        return [rng.integers(0, NUM_IDS, rng.integers(0, 5)).astype(np.uint64) for _ in range(BATCH)]

    return [
        {
            **{slot: ids() for slot in SLOTS},
            "dense": rng.normal(size=(BATCH, 2)).astype(np.float32),
            "label": rng.normal(size=(BATCH, 1)).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


class StepsDataset(IterableDataset):
    def __init__(self, steps: Steps) -> None:
        super().__init__(buffer_size=3)
        self.steps = steps

    def __iter__(self) -> Iterator[PersiaBatch]:
        for step in self.steps:
            yield PersiaBatch(
                [IDTypeFeature(slot, step[slot]) for slot in SLOTS],
                non_id_type_features=[NonIDTypeFeature(step["dense"])],
                labels=[Label(step["label"])],
            )


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2 + 3 * DIM, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        pooled, scaled, raw = embeddings
        # Weighted by position, so that a row in the wrong place would be seen; the mask must be 1 where rows
        # are.
        weights = torch.arange(1, raw.shape[1] + 1, dtype=raw.dtype).unsqueeze(1)
        summed = (raw[..., :-1] * raw[..., -1:] * weights).sum(dim=1)
        output: torch.Tensor = self.linear(torch.cat([dense[0], pooled, scaled, summed], dim=1))
        return output


def reference_embeddings(step: dict[str, Any], tables: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    def bag(slot: str) -> torch.Tensor:
        lengths = [len(sample) for sample in step[slot]]
        ids = torch.from_numpy(np.concatenate(step[slot]).astype(np.int64))
        offsets = torch.tensor(np.cumsum([0, *lengths])[:-1])
        return torch.nn.functional.embedding_bag(ids, tables[slot], offsets, mode="sum")

    lengths = torch.tensor([max(len(sample), 1) for sample in step["scaled"]], dtype=torch.float64)
    raw = torch.zeros(BATCH, FIXED, DIM + 1, dtype=torch.float64)
    for row, sample in enumerate(step["raw"]):
        for column, number in enumerate(sample[:FIXED].tolist()):
            raw[row, column, :DIM] = tables["raw"][number]
            raw[row, column, DIM] = 1.0
    return [bag("pooled"), bag("scaled") / lengths.sqrt().unsqueeze(1), raw]


def initial_tables(ctx: TrainCtx) -> dict[str, torch.Tensor]:
    """Makes every row, and reads it."""
    ids = [np.array([i], np.uint64) for i in range(NUM_IDS)]
    label = Label(np.zeros((NUM_IDS, 1), np.float32))
    batch = ctx.get_embedding_from_data(
        PersiaBatch([IDTypeFeature(slot, ids) for slot in SLOTS], labels=[label])
    )
    tensors = batch.consume_all_id_type_feature_embedding_tensors()
    values = [tensors[0], tensors[1], tensors[2][:, 0, :DIM]]
    return {
        slot: value.detach().double().clone().requires_grad_()
        for slot, value in zip(SLOTS, values, strict=True)
    }


def test_training_follows_torch() -> None:
    torch.manual_seed(1)
    model, steps = Model(), make_steps(seed=5)
    reference = Model().double()
    reference.load_state_dict(model.state_dict())
    ctx = TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.05),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        embedding_config=EmbeddingConfig(emb_initialization=(-1.0, 1.0)),
        mixed_precision=False,
        backend=EmbeddingBackend(make_client(), deadline_s=30.0),
    )
    with ctx:
        tables = initial_tables(ctx)
        optimizer = torch.optim.SGD([*reference.parameters(), *tables.values()], lr=0.05)
        for step, batch in zip(steps, DataLoader(StepsDataset(steps), reproducible=True), strict=True):
            output, labels = ctx.forward(batch)
            expected = reference(
                [torch.from_numpy(step["dense"]).double()], reference_embeddings(step, tables)
            )
            torch.testing.assert_close(output.double(), expected, rtol=2e-4, atol=2e-5)

            ctx.backward(((output - labels[0]) ** 2).mean())
            optimizer.zero_grad()
            ((expected - torch.from_numpy(step["label"]).double()) ** 2).mean().backward()
            optimizer.step()
    assert ctx.counters.gradients_submitted == STEPS
    assert ctx.counters.batches_trained == STEPS
    assert ctx.staleness.max == 0
