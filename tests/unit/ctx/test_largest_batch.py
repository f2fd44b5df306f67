"""The largest batch, all the way: to an embedding worker over TCP, through forward and backward, and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from persia import _native
from persia.ctx import TrainCtx
from persia.embedding.data import MAX_BATCH_SIZE, IDTypeFeature, Label, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import InvalidArgumentError
from persia.pipeline.backend import EmbeddingBackend

NUM_IDS = 100
RATE = 1e-4
SLOTS = {
    "slots_config": {
        "pooled": {"dim": 4},
        "raw": {"dim": 2, "embedding_summation": False, "sample_fixed_size": 2},
    }
}


def make_batch(num_samples: int) -> PersiaBatch:
    """Sample i has the ID i mod 100, twice where it is raw."""
    ids = np.arange(num_samples, dtype=np.uint64) % NUM_IDS
    offsets = np.arange(num_samples + 1, dtype=np.uint32)
    return PersiaBatch(
        [
            IDTypeFeature.from_csr("pooled", ids, offsets),
            IDTypeFeature.from_csr("raw", ids.repeat(2), 2 * offsets),
        ],
        labels=[Label(np.zeros((num_samples, 1), np.float32))],
    )


def test_the_largest_batch_is_looked_up_and_trained(embedding_worker: Callable[..., str]) -> None:
    values = {number: number / NUM_IDS for number in range(NUM_IDS)}
    address = embedding_worker(SLOTS, {"pooled": values, "raw": values})
    client = _native.RemoteClient(1)
    client.set_worker(0, address)
    model = torch.nn.Linear(1, 1)
    with TrainCtx(
        SGD(lr=1.0),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        mixed_precision=False,
        backend=EmbeddingBackend(client, deadline_s=60.0),
    ) as ctx:
        ids = torch.arange(MAX_BATCH_SIZE) % NUM_IDS
        counts = ids.bincount()[ids]
        for step in range(2):
            batch = ctx.get_embedding_from_data(make_batch(MAX_BATCH_SIZE))
            _, (pooled, raw), _ = ctx.prepare_features(batch)
            expected = (ids / NUM_IDS - step * RATE * counts).reshape(-1, 1)
            torch.testing.assert_close(pooled, expected.expand(-1, 4))
            torch.testing.assert_close(raw[:, :, :-1], expected.unsqueeze(2).expand(-1, 2, 2))
            assert bool((raw[:, :, -1] == 1).all()), "the mask"
            ctx.backward(RATE * (pooled.sum() + raw[:, :, :-1].sum() / 2))
            ctx.wait_for_gradients()
        assert ctx.counters.rows_updated == 2 * 2 * NUM_IDS
        assert ctx.counters.rows_missing == 0


def test_one_sample_more_is_refused_when_the_batch_is_built() -> None:
    with pytest.raises(InvalidArgumentError, match="65536 samples: a batch has 1 to 65535, split it"):
        make_batch(MAX_BATCH_SIZE + 1)
