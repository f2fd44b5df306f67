"""When rows come and go in a whole job: `EmbeddingConfig(admit_after=, time_to_live_sec=)`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from persia.ctx import TrainCtx, eval_ctx
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import SGD

TIMEOUT_S = 60.0
IDS = np.array([3, 5, 8], np.uint64)


def training(config: EmbeddingConfig, **own: Any) -> TrainCtx:
    """Over two slots, of which "own" has rules of its own."""
    model = torch.nn.Linear(1, 1)
    return TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=1.0),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=config,
        mixed_precision=False,
        slots={"slots_config": {"job": {"dim": 4}, "own": {"dim": 4, **own}}},
    )


def batch_of(ids: np.ndarray[Any, Any], *, requires_grad: bool = True) -> PersiaBatch:
    features = [IDTypeFeatureWithSingleID(slot, ids) for slot in ("job", "own")]
    labels = [Label(np.ones((len(ids), 1), np.float32))]
    return PersiaBatch(features, labels=labels, requires_grad=requires_grad)


def train(ctx: TrainCtx, ids: np.ndarray[Any, Any]) -> list[torch.Tensor]:
    """One step with a gradient of 1; returns what was looked up."""
    batch = ctx.get_embedding_from_data(batch_of(ids))
    _, embeddings, _ = ctx.prepare_features(batch)
    found = [embedding.detach().clone() for embedding in embeddings]
    ctx.backward(sum(e.sum() for e in embeddings))  # type: ignore[arg-type]
    ctx.wait_for_gradients()
    return found


def seen(ids: np.ndarray[Any, Any]) -> list[torch.Tensor]:
    with eval_ctx() as evaluation:
        batch = evaluation.get_embedding_from_data(batch_of(ids, requires_grad=False))
        return [tensor.clone() for tensor in batch.consume_all_id_type_feature_embedding_tensors()]


def test_an_id_has_a_row_from_its_third_batch_on() -> None:
    with training(EmbeddingConfig(emb_initialization=(0.5, 0.5), admit_after=3), admit_after=1) as ctx:
        for sighting in range(1, 5):
            job, own = train(ctx, IDS)
            # The gradients of the first two batches were dropped: the row begins when it is admitted.
            assert (job == (0.0 if sighting < 3 else 0.5 - (sighting - 3))).all()
            assert (own == 0.5 - (sighting - 1)).all()
            seen(IDS)  # is not counted
        assert ctx.counters.rows_missing == 2 * len(IDS)
        assert ctx.counters.rows_updated == (2 + 4) * len(IDS)
        assert ctx.get_embedding_size() == [2 * len(IDS)]


def test_a_row_that_no_batch_uses_goes_after_its_time() -> None:
    others = np.arange(100, 300, dtype=np.uint64)  # of all internal shards: each passes over its rows
    config = EmbeddingConfig(emb_initialization=(0.5, 0.5), time_to_live_sec=0.2)
    with training(config, time_to_live_sec=0.0) as ctx:
        train(ctx, IDS)
        assert all((rows == -0.5).all() for rows in seen(IDS))
        deadline = time.monotonic() + TIMEOUT_S
        while ctx.get_embedding_size() != [len(IDS) + 2 * len(others)]:  # those of the slot that keeps them
            assert time.monotonic() < deadline
            train(ctx, others)
            time.sleep(0.01)
        job, own = seen(IDS)
        assert (job == 0).all()
        assert (own == -0.5).all()
        job, own = train(ctx, IDS)
        assert (job == 0.5).all()  # begins anew
        assert (own == -0.5).all()
